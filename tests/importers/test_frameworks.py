"""Each framework's configuration in our words. The excerpts are of our own making, after published files."""

from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.api.sources import run_of
from memcalc.errors import InputError
from memcalc.importers.field_tables import ImportedConfig
from memcalc.importers.loading import import_file, load
from memcalc.importers.registry import FRAMEWORKS
from memcalc.layout.parameters import count_parameters
from tests.importers.cases import CASES
from tests.importers.excerpts import AXOLOTL, NEMO, QLORA, TORCHTITAN, TRAINER, ZERO_3


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def imported(folder: Path, name: str, text: str, *overrides: str) -> ImportedConfig:
    found = import_file(written(folder, name, text), overrides)
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_it_comes_to(case: str, tmp_path: Path) -> None:
    name, text, overrides, expected = CASES[case]
    spec = load(written(tmp_path, name, text), overrides)
    found = {}
    for path in expected:
        value: Any = spec
        for part in path.split("."):
            value = getattr(value, part)
        found[path] = value

    assert found == expected
    assert spec.name == Path(name).stem
    framework = next(framework.name for framework in FRAMEWORKS if case.startswith(framework.name))
    assert spec.origin.notes[0].startswith(f"read as a configuration of {framework} ")


def test_every_framework_is_tested() -> None:
    assert {framework.name for framework in FRAMEWORKS} <= CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_no_field_is_dropped(case: str, tmp_path: Path) -> None:
    """Every value of the file is in exactly one of the lists."""
    name, text, overrides, _ = CASES[case]
    found = imported(tmp_path, name, text, *overrides)
    listed = [
        *(path for path, _, _ in found.mapped),
        *(path for path, _ in found.no_effect),
        *(path for path, _ in found.not_modelled),
        *found.unknown,
    ]
    auto = [note for note in found.notes if " is auto: " in note or " is set elsewhere" in note]

    assert len(listed) == len(set(listed))
    assert len(listed) + len(auto) == leaves(name, text)


def leaves(name: str, text: str) -> int:
    """How many values a file has: counted apart from the importer."""
    import json
    import re
    import tomllib

    import yaml

    if name.endswith(".sh"):
        plain = re.sub(r"#.*", "", text)
        return len(set(re.findall(r"(?<!\S)(?:\w+=\")?--([a-z_-]+)", plain)))
    data = (
        json.loads(text)
        if name.endswith(".json")
        else tomllib.loads(text)
        if name.endswith(".toml")
        else yaml.safe_load(text)
    )

    def count(value: Any) -> int:
        if isinstance(value, dict):
            return sum(map(count, value.values()))
        return value is not None

    return count(data)


def test_the_lists_of_axolotl(tmp_path: Path) -> None:
    found = imported(tmp_path, "run.yaml", AXOLOTL)

    assert found.unknown == ("a_field_of_tomorrow",)
    assert [path for path, _ in found.not_modelled] == ["liger_layer_norm"]
    assert [path for path, _ in found.no_effect] == ["plugins", "datasets", "learning_rate"]
    assert [path for path, _ in found.missing] == ["parallelism.data_parallel"]
    assert found.blocks["parallelism"]["offload"] == "all"


def test_what_is_switched_off_changes_nothing(tmp_path: Path) -> None:
    found = imported(tmp_path, "run.yaml", AXOLOTL.replace("liger_layer_norm: true", "liger_layer_norm: false"))

    assert found.not_modelled == ()
    assert "liger_layer_norm" in [path for path, _ in found.no_effect]


def test_a_run_that_shards_must_say_over_how_many(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.yaml: .* uses ZeRO stage 3 but does not set the number of GPUs"):
        load(written(tmp_path, "run.yaml", AXOLOTL))


def test_sizes_are_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not define the model \(missing vocab_size\)\. Add --set preset="):
        load(written(tmp_path, "nemo.yaml", NEMO))
    nowhere = QLORA.replace("base_model: ", "base_model: /models/").replace("llama-3-70b-fp16", "no-such-model")
    with pytest.raises(InputError, match=r"\(missing num_layers, hidden_size, num_attention_heads, vocab_size\)"):
        load(written(tmp_path, "run.yaml", nowhere))
    with pytest.raises(InputError, match=r"run\.yaml: .*no-such-model: not in memcalc's catalogue"):
        load(written(tmp_path, "run.yaml", QLORA.replace("llama-3-70b-fp16", "no-such-model")))


def test_a_value_that_matters_and_is_not_known_is_refused_unless_it_is_set(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "run.yaml",
        QLORA.replace("paged_adamw_8bit", "adamw_torch").replace("adapter: qlora", "adapter: galore"),
    )

    with pytest.raises(InputError, match=r"run\.yaml: adapter = 'galore' is not a supported value of axolotl"):
        load(path)
    assert load(path, ["finetune=lora"]).training.finetune == "lora"


def test_a_config_json_beside_it_is_the_model(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, '
        '"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}'
    )
    text = TRAINER.replace("mistralai/Mistral-7B-v0.1", "mine").replace("max_seq_length: 2048", "max_seq_length: 64")
    spec = load(written(tmp_path, "run.yaml", text))

    assert (spec.model.num_layers, spec.model.hidden_size) == (3, 64)


def test_a_deepspeed_file_beside_it_is_read(tmp_path: Path) -> None:
    written(tmp_path, "any.json", '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}')
    text = ZERO_3.replace("examples/deepspeed/ds_z3_config.json", "any.json")
    found = imported(tmp_path, "run.yaml", text)

    assert found.blocks["parallelism"]["zero_stage"] == 1
    assert NO_OFFLOAD in found.notes
    assert "offload" not in found.blocks["parallelism"]


NO_OFFLOAD = "not modelled: offload_optimizer of such a run: it is counted in device memory"


@pytest.mark.parametrize(
    ("zero", "more", "offload", "noted"),
    [
        ('"stage": 2, "offload_optimizer": {"device": "cpu"}', "", "optimizer", False),
        ('"stage": 3, "offload_optimizer": {"device": "nvme"}', "", "optimizer", False),
        ('"stage": 2, "cpu_offload": true', "", "optimizer", False),
        ('"stage": 3, "offload_param": {"device": "cpu"}', "", "parameters", False),
        ('"stage": 3, "offload_param": {"device": "cpu"}', ', "optimizer": {"type": "Lamb"}', "parameters", False),
        (
            '"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}',
            "",
            "all",
            False,
        ),
        ('"stage": 2, "offload_optimizer": {"device": "none"}, "cpu_offload": false', "", "none", False),
        ('"stage": 1, "offload_optimizer": {"device": "cpu"}', "", "none", True),
        ('"stage": 2, "offload_optimizer": {"device": "cpu"}', ', "optimizer": {"type": "Lamb"}', "none", True),
    ],
)
def test_deepspeeds_optimizer_on_the_host(zero: str, more: str, offload: str, noted: bool, tmp_path: Path) -> None:
    text = (
        f'{{"bf16": {{"enabled": true}}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {{{zero}}}{more}}}'
    )
    spec = load(written(tmp_path, "ds.json", text), ("preset=gpt2", "data_parallel=2"))

    assert spec.parallelism.offload == offload
    assert (NO_OFFLOAD in spec.origin.notes) is noted
    assert any("to NVMe" in note for note in spec.origin.notes) is ("nvme" in zero)


@pytest.mark.parametrize(
    ("more", "finds"),
    [
        ("", True),
        ("gradient_checkpointing: true\n", False),
        ("gradient_checkpointing: true\nuse_peft: true\nlora_r: 8\n", True),  # a PeftModel is no PreTrainedModel
        ("ddp_find_unused_parameters: false\n", False),
        ("gradient_checkpointing: true\nddp_find_unused_parameters: true\n", True),
        ("fsdp: full_shard auto_wrap\n", False),
    ],
)
def test_whether_the_trainers_ddp_looks_for_unused_parameters(more: str, finds: bool, tmp_path: Path) -> None:
    text = "model_name_or_path: openai-community/gpt2\nblock_size: 128\nper_device_train_batch_size: 1\nbf16: true\n"
    spec = load(written(tmp_path, "run.yaml", text + more), ("data_parallel=2", "framework=trainer"))

    assert spec.parallelism.find_unused_parameters is finds


def test_the_trainers_bucket_size_of_ddp(tmp_path: Path) -> None:
    text = "model_name_or_path: openai-community/gpt2\nblock_size: 128\nper_device_train_batch_size: 1\nbf16: true\nddp_bucket_cap_mb: CAP\n"
    sizes = [
        load(written(tmp_path, "run.yaml", text.replace("CAP", cap)), ("data_parallel=2", "framework=trainer"))
        for cap in ("100", "null")
    ]

    assert [spec.parallelism.bucket_cap_mb for spec in sizes] == [100, None]


@pytest.mark.parametrize(("gpus", "ranks"), [(4, 2), (3, 1)])
def test_fit_sets_the_ranks_that_an_offload_needs(gpus: int, ranks: int, tmp_path: Path) -> None:
    """One rank alone would be refused. Where the other axes do not divide the GPUs it is one replica."""
    text = '{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}'
    path = written(
        tmp_path, "ds.json", text.replace('"stage": 2', '"stage": 2, "offload_optimizer": {"device": "cpu"}')
    )
    words = ("preset=gpt2", "s=128", "implementation=plain")

    assert run_of(path, *words, verb="fit", gpus=gpus).spec.parallelism.data_parallel == gpus
    alone = run_of(written(tmp_path, "own.json", text), *words, "tensor_parallel=2", verb="fit", gpus=gpus)
    assert alone.spec.parallelism.data_parallel == ranks


@pytest.mark.parametrize(
    ("zero", "feature"),
    [
        ('"offload_optimizer": {"device": "cpu", "ratio": 0.5}', "optimizer states that stay on the device"),
        ('"offload_optimizer": {"device": "cpu", "super_offload": true}', "SuperOffload's updates on the device"),
        ('"zenflow": {"topk_ratio": 0.1}', "ZenFlow's updates on the device"),
        ('"offload_optimizer": {"device": "cpu", "ratio": 1.0, "super_offload": false}', ""),
    ],
)
def test_updates_on_the_device_beside_an_offload_make_a_lower_bound(zero: str, feature: str, tmp_path: Path) -> None:
    text = f'{{"bf16": {{"enabled": true}}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 3, {zero}}}}}'
    spec = load(written(tmp_path, "ds.json", text), ("preset=gpt2", "data_parallel=2"))

    assert {limit.feature for limit in spec.origin.limits if limit.holds_memory} == ({feature} if feature else set())


@pytest.mark.parametrize("how", ["offload_params: true", "fsdp_offload_params: true"])
def test_fsdps_shards_on_the_host(how: str, tmp_path: Path) -> None:
    """With them come gradients and states, where the optimizer has kernels there and nothing is frozen."""
    text = f"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config: {{{how}}}\n"
    spec = load(written(tmp_path, "fsdp.yaml", text), ("preset=gpt2",))

    assert (spec.parallelism.offload, spec.parallelism.offload_pin_memory) == ("all", True)
    alone = load(written(tmp_path, "one.yaml", text.replace("s: 4", "s: 1")), ("preset=gpt2",))
    assert alone.parallelism.offload == "none"
    assert "not modelled: offload of such a run's shards: they are counted in device memory" in alone.origin.notes


def test_a_word_of_zero_that_the_table_does_not_know_is_unknown(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        "ds.json",
        '{"zero_optimization": {"stage": 1, "overlap_comm": true, "reduce_scatter": true, "new": 1}}',
    )

    assert found.unknown == ("zero_optimization.new",)
    assert [path for path, _ in found.no_effect] == ["zero_optimization.reduce_scatter"]


def test_accelerates_offload_is_deepspeeds(tmp_path: Path) -> None:
    text = """
        distributed_type: DEEPSPEED
        mixed_precision: bf16
        num_processes: 4
        deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu, offload_param_device: none}
    """

    assert load(written(tmp_path, "zero.yaml", text), ("preset=gpt2",)).parallelism.offload == "optimizer"
    alone = load(written(tmp_path, "one.yaml", text.replace("s: 4", "s: 1")), ("preset=gpt2",))
    assert alone.parallelism.offload == "optimizer"
    unsharded = load(written(tmp_path, "whole.yaml", text.replace("zero_stage: 2", "zero_stage: 1")), ("preset=gpt2",))
    assert unsharded.parallelism.offload == "none"
    assert NO_OFFLOAD in unsharded.origin.notes


def test_a_global_batch_fills_the_pipeline_however_many_replicas_there_are(tmp_path: Path) -> None:
    """It said one micro-batch a step where the number of GPUs is not in the script, so one in flight instead of 4."""
    text = "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    text += "--vocab-size 1024 --pipeline-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 48 --bf16"
    path = written(tmp_path, "run.sh", f"python pretrain_gpt.py {text}")

    assert load(path).training.gradient_accumulation_steps == 24  # 48 / 2
    assert load(path, ("data_parallel=3",)).training.gradient_accumulation_steps == 8  # 48 / (2 * 3)
    odd = written(tmp_path, "odd.sh", f"python pretrain_gpt.py {text.replace('48', '49')}")
    assert load(odd).training.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("[q_proj, v_proj]", ("q_proj", "v_proj")),
        ("[self_attn.q_proj, mlp.up_proj, q_proj]", ("q_proj", "up_proj")),
        ("'q_proj, v_proj'", ("q_proj", "v_proj")),
        ("all-linear", "all-linear"),
        ("[c_fc, c_proj]", ("up_proj", "o_proj", "down_proj")),
        ("[q_proj, linear_attn.in_proj_qkvz]", ("q_proj", "in_proj_qkvz")),
        ("[q_proj, out_proj, lm_head]", ("q_proj", "o_proj", "lm_head")),
        (r"'model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj'", ("up_proj", "down_proj", "q_proj")),
        (r"'model.layers.\d+.self_attn.(q_proj|o_proj)$'", ("q_proj", "o_proj")),
    ],
)
def test_targets_of_adapters(targets: str, expected: object, tmp_path: Path) -> None:
    """As a list, a text with commas, or one of PEFT's patterns."""
    text = QLORA.replace("lora_target_linear: true", f"lora_target_modules: {targets}")
    lora = load(written(tmp_path, "run.yaml", text)).training.lora

    assert lora is not None
    assert lora.target_modules == expected


def test_adapters_on_unknown_layers_are_a_limit(tmp_path: Path) -> None:
    """The model may have such a layer: an adapter on it holds memory."""
    text = QLORA.replace("lora_target_linear: true", "lora_target_modules: [q_proj, embed_tokens]")
    spec = load(written(tmp_path, "run.yaml", text))

    assert spec.training.lora is not None
    assert spec.training.lora.target_modules == ("q_proj",)
    assert [limit.feature for limit in spec.origin.limits if limit.holds_memory] == ["adapters on embed_tokens"]


def test_a_pattern_that_is_not_read_is_a_limit(tmp_path: Path) -> None:
    targets = r"'model.layers.\d+.(mlp.(experts.\d+.)?(gate_proj|up_proj))'"
    spec = load(
        written(tmp_path, "run.yaml", QLORA.replace("lora_target_linear: true", f"lora_target_modules: {targets}"))
    )

    assert spec.training.lora is not None
    assert spec.training.lora.target_modules == "all-linear"
    assert "adapters on layers that match a pattern" in [
        each.feature for each in spec.origin.limits if each.holds_memory
    ]


def test_adapters_on_unknown_layers_alone_are_refused(tmp_path: Path) -> None:
    text = QLORA.replace("lora_target_linear: true", "lora_target_modules: [foo]")

    with pytest.raises(InputError, match="target_modules names foo, which the layers of this model do not have"):
        load(written(tmp_path, "run.yaml", text))


def test_a_schedule_without_stages_waits_for_them(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("[activation_checkpoint]", 'pipeline_parallel_schedule = "1F1B"\n[activation_checkpoint]')

    assert load(written(tmp_path, "run.toml", text)).parallelism.pipeline_parallel == 1


def test_recipes_of_torchtune_that_do_not_train_are_not_read(tmp_path: Path) -> None:
    text = "model: {_component_: torchtune.models.llama2.llama2_7b}\nprompt: {user: hello}\n"

    assert import_file(written(tmp_path, "generation.yaml", text)) is None


def test_words_of_fsdp_that_are_none(tmp_path: Path) -> None:
    """A list may hold anything; it is words all the same."""
    path = written(tmp_path, "run.json", '{"per_device_train_batch_size": 1, "fsdp": [null]}')

    assert load(path, ["preset=gpt2", "data_parallel=2"]).parallelism.zero_stage == 3


@pytest.mark.parametrize(
    ("fields", "inner"),
    [
        ("", 4 * 64),
        ('"intermediate_size": 100,', 100),
        ('"activation": "swiglu", "mlp_multiple_of": 64,', 128),  # 4 * 64 * 2 // 3 // 2 = 85
        ('"intermediate_size": 32768, "activation": "swiglu", "mlp_multiple_of": 256,', 11_008),  # Llama 7B's
        ('"activation": "geglu",', 4 * 64 * 2 // 3 // 2),
        ('"expansion_factor": 2,', 128),
    ],
)
def test_inner_sizes_of_gpt_neox(fields: str, inner: int, tmp_path: Path) -> None:
    """A gated one has two thirds of what is said in its two halves, rounded up to a multiple."""
    text = '{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "pipe_parallel_size": 0, ' + fields + "}"

    assert imported(tmp_path, "7B.yml", text).blocks["model"]["intermediate_size"] == inner


def test_parameters_of_llemma_34b_in_gpt_neox(tmp_path: Path) -> None:
    """configs/llemma/34B.yml has no intermediate_size: 2/3 of 4 * 8192 for gate and up together, 11,008 for each.

    Code Llama 34B's is 22,016, which GPT-NeoX made of this file before its pull request 1212.
    """
    text = (
        '{"num_layers": 48, "hidden_size": 8192, "num_attention_heads": 64, "num_kv_heads": 8, "activation": "swiglu",'
        '"mlp_multiple_of": 256, "norm": "rmsnorm", "pos_emb": "rotary", "no_weight_tying": true, "seq_length": 4096,'
        '"max_position_embeddings": 4096, "use_bias_in_attn_linear": false, "pipe_parallel_size": 0,'
        '"train_micro_batch_size_per_gpu": 1, "padded_vocab_size": 32000}'
    )
    path = written(tmp_path, "34B.yml", text)
    found = imported(tmp_path, "34B.yml", text)

    assert found.blocks["model"]["intermediate_size"] == 11_008
    assert any("until September 2024 (#1212) gave Llama's 22,016" in note for note in found.notes)
    of_mlp = 48 * (3 * 8192 + 2) * (22_016 - 11_008)  # gate and up have biases by default
    fewer, more = (
        count_parameters(load(path, ("data_parallel=1", *words)).model) for words in ((), ("intermediate_size=22016",))
    )
    assert more - fewer == of_mlp
    assert 33.7e9 < more < 33.9e9  # Code Llama 34B


@pytest.mark.parametrize(
    ("kinds", "attention", "stated"),
    [
        ('[[["flash"], 2]]', "flash", False),
        ('[[["global"], 2]]', "eager", False),
        ('[[["flash", "local"], 1]]', "flash", True),
    ],
)
def test_attention_of_gpt_neox(kinds: str, attention: str, stated: bool, tmp_path: Path) -> None:
    text = '{"num_layers": 2, "hidden_size": 64, "pipe_parallel_size": 1, "attention_config": ' + kinds + "}"
    found = imported(tmp_path, "7B.yml", text)

    assert found.blocks["training"]["attention"] == attention
    assert any("other attention types" in note for note in found.notes) is stated


def test_parameters_of_gpt_neox_20b(tmp_path: Path) -> None:
    """20,554,567,680 of GPT-NeoX-20B (arXiv 2204.06745, section 2), with a vocabulary padded to 50,432."""
    spec = load(written(tmp_path, *CASES["GPT-NeoX"][:2]), ("vocab_size=50432",))

    assert memcalc.estimate(spec).parameters == 20_554_567_680
