"""Which programs have batches of different lengths: those that pad each batch to its longest sequence."""

from pathlib import Path

import pytest

from memcalc.frameworks.lengths import NOTE
from memcalc.importers.loading import load

TRAINER = "model_name_or_path: gpt2\nper_device_train_batch_size: 2\nbf16: true\nmax_length: 512\noutput_dir: out\n"
FACTORY = "model_name_or_path: gpt2\nstage: sft\ndo_train: true\ncutoff_len: 512\nfinetuning_type: full\nbf16: true\n"
AXOLOTL = (
    "base_model: openai-community/gpt2\nmicro_batch_size: 2\nsequence_len: 512\ndatasets: []\nbf16: true\n"
    "optimizer: adamw_torch_fused\nnum_epochs: 1\n"
)
TUNE = (
    "tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}\n"
    "model: {_component_: torchtune.models.llama3_2.llama3_2_1b}\nbatch_size: 2\ndtype: bf16\n"
    "optimizer: {_component_: torch.optim.AdamW, fused: true}\n"
    "loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}\n"
)


@pytest.mark.parametrize(
    ("text", "varies"),
    [
        pytest.param(TRAINER, True, id="Trainer"),
        pytest.param(TRAINER.replace("max_length", "block_size"), False, id="run_clm.py cuts blocks"),
        pytest.param(TRAINER + "packing: true\n", True, id="TRL's best fit fills rows as well as it can"),
        pytest.param(TRAINER + "packing: true\npacking_strategy: wrapped\n", False, id="TRL's wrapped packing"),
        pytest.param(FACTORY, True, id="LLaMA-Factory"),
        pytest.param(FACTORY + "packing: true\n", False, id="LLaMA-Factory's packing"),
        pytest.param(FACTORY + "neat_packing: true\n", False, id="LLaMA-Factory's neat packing"),
        pytest.param(FACTORY.replace("sft", "pt"), False, id="LLaMA-Factory's pre-training packs"),
        pytest.param(FACTORY.replace("sft", "pt") + "packing: false\n", True, id="unless packing is off"),
        pytest.param(AXOLOTL, True, id="axolotl"),
        pytest.param(AXOLOTL + "sample_packing: true\n", False, id="axolotl pads packed samples"),
        pytest.param(AXOLOTL + "sample_packing: true\npad_to_sequence_len: false\n", True, id="unless padding is off"),
        pytest.param(AXOLOTL + "pad_to_sequence_len: true\n", False, id="axolotl pads all samples"),
        pytest.param(TUNE, True, id="torchtune"),
        pytest.param(TUNE + "dataset: {packed: true}\n", False, id="torchtune's packed data"),
    ],
)
def test_what_the_file_says(text: str, varies: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    spec = load(path, ("data_parallel=1",))

    assert spec.training.variable_lengths is varies
    assert (NOTE in spec.origin.notes) is varies


def test_the_user_knows_the_data(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TRAINER)
    spec = load(path, ("variable_lengths=false",))

    assert not spec.training.variable_lengths
    assert NOTE not in spec.origin.notes
