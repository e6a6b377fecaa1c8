"""`--set field=value`: every way to name a field, every kind of value, and what is said of wrong ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.spec.fields import BLOCKS, BY_PATH, HOME, NESTED, SYMBOLS
from memcalc.spec.loading import load
from memcalc.spec.overrides import apply_overrides, parse_overrides
from memcalc.spec.yaml_source import parse_yaml

MODEL: dict[str, Any] = {"l": 4, "d": 64, "h": 4, "V": 100}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 48}


def refusal(*assignments: str, **model: Any) -> str:
    with pytest.raises(InputError) as caught:
        load({"model": MODEL | model}, assignments)
    return str(caught.value)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("b", ("training", "micro_batch_size")),
        ("micro_batch_size", ("training", "micro_batch_size")),
        ("training.micro_batch_size", ("training", "micro_batch_size")),
        ("training.b", ("training", "micro_batch_size")),
        ("s", ("training", "sequence_length")),
        ("l", ("model", "num_layers")),
        ("d", ("model", "hidden_size")),
        ("h", ("model", "num_attention_heads")),
        ("V", ("model", "vocab_size")),
        ("model.V", ("model", "vocab_size")),
        ("zero_stage", ("parallelism", "zero_stage")),
        ("gpu", ("hardware", "gpu")),
        ("hardware.gpu", ("hardware", "gpu")),
        ("moe.num_experts", ("model", "moe", "num_experts")),
        ("model.moe.num_experts", ("model", "moe", "num_experts")),
        ("mla.kv_lora_rank", ("model", "mla", "kv_lora_rank")),
        ("moe", ("model", "moe")),
        ("name", ("name",)),
        ("preset", ("preset",)),
        ("model.preset", ("preset",)),
        ("hf_config", ("hf_config",)),
        (" b ", ("training", "micro_batch_size")),
    ],
)
def test_a_field_is_found_by_each_of_its_names(name: str, path: tuple[str, ...]) -> None:
    assert parse_overrides([f"{name}=1"]) == {path: 1}


def test_every_field_is_found_by_its_bare_name_and_by_its_path() -> None:
    """No two blocks have a field of one name, so the bare name is enough; those of generation have paths alone."""
    paths = {(block, field) for block, model in BLOCKS.items() for field in model.model_fields if block not in BY_PATH}
    names = [field for _, field in paths]

    assert len(names) == len(set(names))
    for block, field in paths - {("parallelism", "fsdp")}:  # alone it is TrainingArguments' word
        assert parse_overrides([f"{field}=1"]) == parse_overrides([f"{block}.{field}=1"]) == {(block, field): 1}
    for block in BY_PATH:
        for field in BLOCKS[block].model_fields:
            assert parse_overrides([f"{block}.{field}=1"]) == {(block, field): 1}
    for nested, model in NESTED.items():
        for field in model.model_fields:
            assert parse_overrides([f"{nested}.{field}=1"]) == {(HOME[nested], nested, field): 1}
    for block, symbols in SYMBOLS.items():
        for symbol, field in symbols.items():
            assert parse_overrides([f"{symbol}=1"]) == {(block, field): 1}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("b", "--set b: the '=' is missing. Write --set field=value, such as --set b=4."),
        ("", "--set : the '=' is missing. Write --set field=value, such as --set b=4."),
        ("=4", "--set =4: unknown field ''. `memcalc schema` lists all fields."),
        ("zz=1", "--set zz=1: unknown field 'zz'. `memcalc schema` lists all fields."),
        (
            "hiden_size=3",
            "--set hiden_size=3: unknown field 'hiden_size'. Did you mean hidden_size?",
        ),
        (
            "training.micro_batch=3",
            (
                "--set training.micro_batch=3: unknown field 'training.micro_batch'. "
                "Did you mean training.micro_batch_size?"
            ),
        ),
        (
            "model.b=2",
            "--set model.b=2: unknown field 'model.b'. Did you mean training.micro_batch_size?",
        ),
        (
            "training.tensor_parallel=2",
            (
                "--set training.tensor_parallel=2: unknown field 'training.tensor_parallel'. "
                "Did you mean parallelism.tensor_parallel?"
            ),
        ),
        (
            "moe.num_expert=3",
            "--set moe.num_expert=3: unknown field 'moe.num_expert'. Did you mean moe.num_experts?",
        ),
        ("model=3", "--set: preset: preset = 3 is not a name. Write a path or the name of a preset."),
        (
            "training={b: 2}",
            ("--set training={b: 2}: training is a block of fields. Set a field, such as training.micro_batch_size."),
        ),
    ],
)
def test_a_name_that_is_no_field_is_refused_with_the_nearest_one(assignment: str, message: str) -> None:
    assert refusal(assignment) == message


def test_a_long_assignment_is_cut_in_its_message() -> None:
    message = refusal("x" * 10_000 + "=1")

    assert message == f"--set {'x' * 114}: unknown field '{'x' * 57}...'. `memcalc schema` lists all fields."


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        (" 4", 4),
        ("0.1", 0.1),
        ("1e-2", 0.01),
        ("true", True),
        ("full", "full"),
        ("'4'", "4"),
        ("[0, 2]", [0, 2]),
        ("{a: 1}", {"a": 1}),
        ("a=b", "a=b"),
        ("", None),
        ("null", None),
        ("~", None),
    ],
)
def test_a_value_is_read_as_yaml(text: str, value: object) -> None:
    assert parse_overrides([f"recompute={text}"]) == {("training", "recompute"): value}


def test_the_last_of_several_wins_under_whatever_name() -> None:
    assert load({"model": MODEL}, ["b=2", "micro_batch_size=3", "training.b=4"]).training.micro_batch_size == 4


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "b=four",
            (
                "--set: training.micro_batch_size: micro_batch_size = 'four' is not a whole number. Write digits only, "
                "such as 8."
            ),
        ),
        (
            "b==4",
            (
                "--set: training.micro_batch_size: micro_batch_size = '=4' is not a whole number. Write digits only, "
                "such as 8."
            ),
        ),
        ("b=0", "--set: training.micro_batch_size: micro_batch_size = 0 is too small. Set more than 0."),
        (
            "b=[",
            (
                "--set b=[: this is not YAML: did not find expected node content. "
                "Check indentation, quotes and colons there."
            ),
        ),
        ("dropout=.nan", "--set dropout=.nan: .nan is not a finite number. Write a plain number."),
        ("s=010", "--set s=010: 010 is not decimal: YAML reads it in another base. Write a plain number."),
        (
            "b=!!python/name:os.system",
            (
                "--set b=!!python/name:os.system: 'python/name:os.system' is not a type of value that a configuration "
                "has. Use plain mappings, lists, numbers, words, true and false."
            ),
        ),
        (
            "tensor_parallel=3",
            (
                "--set: parallelism.tensor_parallel: tensor_parallel = 3 does not divide num_attention_heads = 4. "
                "Tensor parallelism splits attention by head: try 1, 2, 4."
            ),
        ),
        (
            "h=5",
            (
                "--set: model.num_attention_heads: num_attention_heads = 5 does not divide hidden_size = 64. Set "
                "num_attention_heads to a divisor, such as 4, or set head_dim."
            ),
        ),
        (
            "gpu=abacus",
            (
                "--set: hardware.gpu: 'abacus' is not a known GPU. `memcalc gpus` lists all GPUs; --budget SIZE takes "
                "the "
                "memory of any other GPU."
            ),
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_where_it_was_given(assignment: str, message: str) -> None:
    assert refusal(assignment) == message


def test_a_file_and_an_override_are_distinguished(tmp_path: Path) -> None:
    """The value that is wrong came from --set, the file is right; and the other way round."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {l: 4, d: 64, h: 4, V: 100}\ntraining:\n  dropout: 2\n")
    with pytest.raises(InputError, match=r"^--set: training.dropout: dropout = 3 is too large"):
        load(file, ["dropout=3"])
    with pytest.raises(InputError, match=rf"^{re.escape(str(file))}:3: training.dropout: dropout = 2 is too large"):
        load(file, ["b=2"])


# -- effects -----------------------------------------------------------------------------------------------------------


def test_sizes_that_follow_from_an_overridden_one_follow() -> None:
    """d = 128 with 4 heads: heads of 128 / 4 = 32, an MLP of 4 x 128 = 512."""
    model = load({"model": MODEL}, ["d=128"]).model

    assert (model.hidden_size, model.head_dim, model.intermediate_size, model.embedding_size) == (128, 32, 512, 128)


def test_null_unsets_a_field_so_that_its_default_holds_again() -> None:
    given = {"model": MODEL | {"head_dim": 24, "intermediate_size": 96}, "training": {"s": 64}}
    assert load(given).model.head_dim == 24
    spec = load(given, ["head_dim=null", "intermediate_size=", "s=~"])

    assert (spec.model.head_dim, spec.model.intermediate_size, spec.training.sequence_length) == (16, 256, 2048)


def test_null_unsets_a_gpu_a_block_and_a_preset() -> None:
    given = {"preset": "mixtral-8x7b", "hardware": {"gpu": "t4"}}
    assert load(given, ["gpu=null"]).hardware.gpu is None
    assert load({"model": MODEL | {"moe": MOE}}, ["moe=null"]).model.moe is None
    assert load({"preset": "gpt2", "model": MODEL}, ["preset=null"]).model.max_position_embeddings == 2048


def test_unsetting_a_field_of_a_missing_block_changes_nothing() -> None:
    """Above all it makes no latent attention out of nothing."""
    assert load({"model": MODEL}, ["mla.q_lora_rank=null", "moe.num_experts="]) == load({"model": MODEL})


def test_unsetting_a_required_field_is_rejected() -> None:
    message = "--set: model.num_layers: num_layers is required and cannot be derived from other fields. Add a line `num_layers: ...`."

    assert refusal("l=null") == message


def test_nested_fields_are_changed_one_by_one() -> None:
    moe = load({"model": MODEL | {"moe": MOE}}, ["moe.num_experts=16", "model.moe.first_dense_layers=1"]).model.moe

    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_token, moe.first_dense_layers) == (16, 2, 1)


def test_a_nested_block_can_be_given_as_a_whole_or_grow_from_nothing() -> None:
    inline = "moe={num_experts: 8, num_experts_per_token: 2, expert_intermediate_size: 48}"
    steps = [f"moe.{field}={value}" for field, value in MOE.items()]

    assert load({"model": MODEL}, [inline]) == load({"model": MODEL}, steps) == load({"model": MODEL | {"moe": MOE}})


def test_a_nested_block_that_is_incomplete_is_refused() -> None:
    message = refusal("moe.num_experts=4")

    assert (
        "model.moe.num_experts_per_token: num_experts_per_token is required and cannot be derived from other fields."
        in message
    )


def test_a_field_of_a_preset_is_overridden() -> None:
    spec = load("mixtral-8x7b", ["moe.num_experts=4", "l=2"])

    assert spec.model.moe is not None
    assert (spec.model.moe.num_experts, spec.model.num_layers, spec.model.hidden_size) == (4, 2, 4096)


def test_the_preset_itself_is_overridden() -> None:
    assert load({"preset": "gpt2"}, ["preset=gpt2-xl"]).model.hidden_size == 1600


def test_an_override_makes_the_blocks_it_needs() -> None:
    blocks: dict[str, Any] = {"model": {}}
    apply_overrides(blocks, {("hardware", "gpu"): "t4", ("model", "moe", "num_experts"): 2, ("name",): "x"})

    assert blocks == {"model": {"moe": {"num_experts": 2}}, "hardware": {"gpu": "t4"}, "name": "x"}


@pytest.mark.parametrize("text", ["4", "-1", "+2", "1e-2", "1_000", "true", "null", "bf16", "every-2", "v0.19.6"])
def test_a_scalar_is_read_as_in_a_file(text: str) -> None:
    for _ in range(2):  # the second time as it was read the first time
        assert parse_overrides([f"name={text}"]) == {("name",): parse_yaml(text, "").data}


@pytest.mark.parametrize("text", ["2026-01-02", "010", ".inf"])
def test_what_a_file_refuses_is_refused_every_time(text: str) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match=re.escape(f"--set b={text}")):
            parse_overrides([f"b={text}"])


def test_a_list_is_each_caller_s_own() -> None:
    first, second = (parse_overrides(["recompute=[0, 1]"])["training", "recompute"] for _ in range(2))
    first.append(2)

    assert second == [0, 1]
