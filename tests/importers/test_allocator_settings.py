"""Settings of PyTorch's allocator that frameworks make: read, told, and changed by the user's own."""

from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.importers.loading import load

EXPANDABLE = "expandable_segments:True"
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 1024\n'
AXOLOTL = "base_model: meta-llama/Meta-Llama-3-8B\nsequence_len: 1024\nmicro_batch_size: 2\ndatasets: []\n"
FACTORY = "model_name_or_path: meta-llama/Meta-Llama-3-8B\ncutoff_len: 1024\nfinetuning_type: full\nbf16: true\n"
TUNE = (
    "model: {_component_: torchtune.models.llama3.llama3_8b}\noptimizer: {_component_: torch.optim.AdamW}\n"
    "batch_size: 1\ntokenizer: {max_seq_len: 1024}\ndevice: cuda\n"
)
TRAINER = "model_name_or_path: gpt2\nper_device_train_batch_size: 1\nmax_length: 512\n"
MEGATRON = "python pretrain_gpt.py --num-layers 2 --hidden-size 128 --num-attention-heads 2 --bf16 --vocab-size 512\n"


@pytest.mark.parametrize(
    ("name", "text", "words", "expected"),
    [
        ("a.toml", TITAN, ("data_parallel=8",), EXPANDABLE),
        ("b.yml", AXOLOTL, (), EXPANDABLE),
        ("c.yaml", FACTORY, (), ""),  # one GPU: no torchrun, and no settings
        ("c.yaml", FACTORY, ("data_parallel=8",), EXPANDABLE),
        ("d.yaml", TUNE, (), ""),  # those of torchtune's main branch, not of its last release
        ("e.yaml", TRAINER, (), ""),
        ("f.sh", f"export PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}\n{MEGATRON}", (), EXPANDABLE),
        ("f.sh", f"PYTORCH_ALLOC_CONF=max_split_size_mb:64 {MEGATRON}", (), "max_split_size_mb:64"),
        ("f.sh", f"export PYTORCH_CUDA_ALLOC_CONF=$1\n{MEGATRON}", (), ""),  # left to whoever runs it
        ("f.sh", MEGATRON, (), ""),
        ("b.yml", AXOLOTL, ("alloc_conf=",), ""),
        ("b.yml", AXOLOTL, ("alloc_conf=max_split_size_mb:64",), "max_split_size_mb:64"),
    ],
)
def test_what_frameworks_set(name: str, text: str, words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    extra = ("sequence_length=512", "max_position_embeddings=512") if name == "f.sh" else ()
    spec = load(tmp_path / name, (*words, *extra))

    assert spec.training.alloc_conf == expected
    notes = [note for note in spec.origin.notes if note.startswith("allocator settings ")]
    assert bool(notes) is (expected == EXPANDABLE and name != "f.sh")  # settings of a script are mapped fields


def test_the_replay_is_played_under_them(tmp_path: Path) -> None:
    """Expandable segments hold what is allocated, in whole pages of 2 and 20 MiB."""

    def reserved(*words: str, alloc_conf: str | None = None) -> int:
        result = memcalc.estimate("gpt2", *words, alloc_conf=alloc_conf)
        return result.headline.reserved_bytes or 0

    plain, expandable = reserved(), reserved(f"alloc_conf={EXPANDABLE}")

    assert memcalc.estimate("gpt2").ledger.peak_bytes < expandable < plain - 2**29
    assert reserved(f"alloc_conf={EXPANDABLE}", alloc_conf="expandable_segments:False") == plain


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("expandable_segments", r"'expandable_segments' is not an allocator option\. Write name:value pairs"),
        ("no_such:1", r"torch 2\.13 has no allocator option 'no_such'"),
        ("max_split_size_mb:1", "max_split_size_mb"),
    ],
)
def test_settings_that_the_release_refuses_are_refused(settings: str, words: str) -> None:
    with pytest.raises(InputError, match=f"training.alloc_conf: .*{words}"):
        memcalc.estimate("gpt2", f"alloc_conf={settings}")


def test_releases_differ() -> None:
    memcalc.estimate("gpt2", "alloc_conf=large_segment_size_mb:40", "torch_version=v2.13")
    with pytest.raises(InputError, match=r"torch 2\.6 has no allocator option 'large_segment_size_mb'"):
        memcalc.estimate("gpt2", "alloc_conf=large_segment_size_mb:40", "torch_version=v2.6")
