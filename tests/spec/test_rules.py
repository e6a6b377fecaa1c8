"""Sizes that cannot be together are refused in one message: the key, the value, the rule in numbers, the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec

SIZES: dict[str, Any] = {"l": 4, "d": 64, "h": 4, "V": 100}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 48}
MLA: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


def run(**blocks: dict[str, Any]) -> Spec:
    """The spec of a small model and further blocks; fields of `model` go over the sizes."""
    return load(blocks | {"model": SIZES | blocks.get("model", {})})


def refusal(**blocks: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        run(**blocks)
    assert caught.value.remedy
    return str(caught.value)


# -- heads and widths --------------------------------------------------------------------------------------------------


def test_heads_divide_the_hidden_size() -> None:
    assert refusal(model={"d": 66}) == (
        "configuration: model.num_attention_heads: num_attention_heads = 4 does not divide hidden_size = 66. Set "
        "num_attention_heads to a divisor, such as 3, or set head_dim."
    )
    assert run(model={"d": 66, "head_dim": 16}).model.query_size == 64


def test_key_value_heads_divide_the_heads() -> None:
    assert refusal(model={"num_key_value_heads": 3}) == (
        "configuration: model.num_key_value_heads: num_key_value_heads = 3 does not divide num_attention_heads = 4. "
        "Each key/value head serves the same number of query heads: try 1, 2, 4."
    )
    assert run(model={"num_key_value_heads": 2}).model.key_value_size == 32


def test_more_key_value_heads_than_heads_are_refused() -> None:
    assert "num_key_value_heads = 8 does not divide num_attention_heads = 4" in refusal(
        model={"num_key_value_heads": 8}
    )


def test_norms_after_are_two() -> None:
    assert refusal(model={"norm_placement": "after", "norms_per_layer": 4}) == (
        "configuration: model.norm_placement: norm_placement = after places 2 norms, but norms_per_layer = 4. Set "
        "norms_per_layer: 2, or leave norm_placement out; 4 norms are before and after attention and MLP."
    )


def test_dense_layers_exist_and_are_not_too_many_to_look_at() -> None:
    assert refusal(model={"moe": MOE | {"dense_layers": [4]}}) == (
        "configuration: model.moe.dense_layers: dense_layers names layer 4, but the layers are 0 to 3. Remove layer 4, "
        "or raise num_layers."
    )


def test_layers_are_not_too_many_to_lay_out() -> None:
    assert refusal(model={"l": 2**31}) == (
        "configuration: model.num_layers: num_layers = 2147483648 is more than 1,024, the limit of memcalc. Set at "
        "most 1,024."
    )


def test_one_norm_a_layer_needs_a_parallel_block() -> None:
    assert refusal(model={"norms_per_layer": 1}) == (
        "configuration: model.norms_per_layer: norms_per_layer = 1 needs parallel_block: true. Set parallel_block: "
        "true, or norms_per_layer: 2."
    )
    assert run(model={"norms_per_layer": 1, "parallel_block": True}).model.norms_per_layer == 1


def test_a_latent_head_is_as_wide_as_its_parts() -> None:
    assert refusal(model={"mla": MLA, "head_dim": 16}) == (
        "configuration: model.head_dim: head_dim = 16 differs from the head dimension of latent attention: "
        "qk_nope_head_dim + qk_rope_head_dim = 12 + 8 = 20. Leave head_dim out, or set 20."
    )


def test_a_token_visits_no_more_experts_than_there_are() -> None:
    assert refusal(model={"moe": MOE | {"num_experts_per_token": 9}}) == (
        "configuration: model.moe.num_experts_per_token: num_experts_per_token = 9 is more than num_experts = 8. Set "
        "at most 8: a token uses each expert at most once."
    )
    assert run(model={"moe": MOE | {"num_experts_per_token": 8}}).model.moe is not None


def test_no_more_first_layers_are_dense_than_there_are_layers() -> None:
    assert refusal(model={"moe": MOE | {"first_dense_layers": 5}}) == (
        "configuration: model.moe.first_dense_layers: first_dense_layers = 5 is more than num_layers = 4. Set at most "
        "4."
    )
    assert run(model={"moe": MOE | {"first_dense_layers": 4}}).model.moe is not None


# -- sequence and precision --------------------------------------------------------------------------------------------


def test_a_sequence_has_a_learned_position_for_each_token() -> None:
    longer = {"s": 4096}
    assert refusal(training=longer) == (
        "configuration: training.sequence_length: sequence_length = 4096 is longer than the 2048 learned positions. "
        "Set sequence_length: 2048 or less, or raise model.max_position_embeddings."
    )
    assert run(training=longer, model={"max_position_embeddings": 4096}).training.sequence_length == 4096
    for other in ("rope", "alibi", "none"):  # positions that are computed know no end
        assert run(training=longer, model={"position_embedding": other}).training.sequence_length == 4096


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_recipe_fp32_computes_in_fp32(dtype: str) -> None:
    assert refusal(training={"recipe": "fp32", "dtype": dtype}) == (
        f"configuration: training.recipe: recipe = fp32 computes in fp32, but dtype = {dtype}. Set dtype: fp32, or "
        "recipe: amp to compute in 16 bits with fp32 weights."
    )


@pytest.mark.parametrize("recipe", ["amp", "mixed-16", "mixed-18", "mixed-20"])
def test_mixed_precision_computes_in_16_bit(recipe: str) -> None:
    assert refusal(training={"recipe": recipe, "dtype": "fp32"}) == (
        f"configuration: training.recipe: recipe = {recipe} computes in 16 bits, but dtype = fp32. Set dtype: bf16 or "
        "fp16, or recipe: fp32."
    )
    assert run(training={"recipe": recipe, "dtype": "fp16"}).training.recipe == recipe


def test_pure_computes_in_any_dtype() -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        assert run(training={"recipe": "pure", "dtype": dtype}).training.dtype == dtype


# -- layers ------------------------------------------------------------------------------------------------------------


def test_a_stage_holds_at_least_one_layer() -> None:
    assert refusal(parallelism={"pipeline_parallel": 5}) == (
        "configuration: parallelism.pipeline_parallel: pipeline_parallel = 5 is more than num_layers = 4. Set at most "
        "4: a stage needs at least one layer."
    )
    assert run(parallelism={"pipeline_parallel": 4}).parallelism.pipeline_parallel == 4


def test_a_plan_names_layers_that_exist() -> None:
    assert refusal(training={"recompute": [0, 9, 4]}) == (
        "configuration: training.recompute: recompute names layer 9, but the layers are 0 to 3. Remove layer 9, or "
        "raise num_layers."
    )
    assert run(training={"recompute": [0, 3]}).training.recompute == (0, 3)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def tensor(ranks: int, training: dict[str, Any] | None = None, *, sequence: bool = False, **model: Any) -> str:
    parallelism = {"tensor_parallel": ranks, "sequence_parallel": sequence}
    return refusal(model=model, training=training or {}, parallelism=parallelism)


def test_tensor_parallelism_divides_the_heads() -> None:
    assert tensor(3) == (
        "configuration: parallelism.tensor_parallel: tensor_parallel = 3 does not divide num_attention_heads = 4. "
        "Tensor parallelism splits attention by head: try 1, 2, 4."
    )


def test_a_rank_has_whole_key_value_heads_or_a_copy_of_one() -> None:
    assert tensor(4, h=12, num_key_value_heads=6, head_dim=16) == (
        "configuration: parallelism.tensor_parallel: tensor_parallel = 4 and num_key_value_heads = 6: neither divides "
        "the other. A rank needs whole key/value heads, or a copy of one: try 1, 2, 3, 6, or a multiple of 6."
    )
    assert run(model={"num_key_value_heads": 2}, parallelism={"tensor_parallel": 4}).parallelism.tensor_parallel == 4


def test_latent_attention_has_no_key_value_heads_to_divide() -> None:
    spec = run(model={"mla": MLA, "num_key_value_heads": 2}, parallelism={"tensor_parallel": 4})

    assert spec.parallelism.tensor_parallel == 4


@pytest.mark.parametrize(
    ("model", "name", "width", "tries"),
    [
        ({"intermediate_size": 30}, "intermediate_size", 30, "1, 2, 3, 5, 6, 10, 15, 30"),
        ({"moe": MOE | {"expert_intermediate_size": 18}}, "expert_intermediate_size", 18, "1, 2, 3, 6, 9, 18"),
        ({"moe": MOE | {"shared_expert_intermediate_size": 6}}, "shared_expert_intermediate_size", 6, "1, 2, 3, 6"),
    ],
)
def test_tensor_parallelism_divides_the_widths(model: dict[str, Any], name: str, width: int, tries: str) -> None:
    assert tensor(4, **model) == (
        f"configuration: parallelism.tensor_parallel: tensor_parallel = 4 does not divide {name} = {width}. Try "
        f"{tries}."
    )


def test_sequence_parallelism_divides_the_sequence() -> None:
    assert tensor(4, {"s": 102}, sequence=True) == (
        "configuration: parallelism.sequence_parallel: tensor_parallel = 4 does not divide sequence_length = 102. Set "
        "sequence_length to a multiple of 4, or sequence_parallel: false."
    )
    assert run(training={"s": 102}, parallelism={"tensor_parallel": 4}).training.sequence_length == 102


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "stage", "stages", "others"),
    [
        ("ddp", 1, ("0",), "deepspeed or megatron"),
        ("ddp", 3, ("0",), "fsdp2 or deepspeed"),
        ("fsdp2", 0, ("2", "3"), "ddp or deepspeed or megatron"),
        ("fsdp2", 1, ("2", "3"), "deepspeed or megatron"),
        ("megatron", 2, ("0", "1"), "fsdp2 or deepspeed"),
        ("megatron", 3, ("0", "1"), "fsdp2 or deepspeed"),
    ],
)
def test_an_engine_does_its_own_stages(engine: str, stage: int, stages: tuple[str, ...], others: str) -> None:
    assert refusal(parallelism={"engine": engine, "zero_stage": stage}).splitlines()[0] == (
        f"configuration: parallelism.engine: engine = {engine} supports zero_stage {' and '.join(stages)}, not "
        f"{stage}. "
        f"Set zero_stage: {' or '.join(stages)}, or engine: {others}."
    )


@pytest.mark.parametrize(
    ("engine", "stage"), [("ddp", 0), ("fsdp2", 2), ("fsdp2", 3), *(("deepspeed", stage) for stage in range(4))]
)
def test_engines_with_their_stages_load(engine: str, stage: int) -> None:
    assert run(parallelism={"engine": engine, "zero_stage": stage}).parallelism.engine == engine


@pytest.mark.parametrize(("engine", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("fsdp1", 3)])
def test_only_fsdp2_shards_gradients_of_a_pipeline(engine: str, stage: int) -> None:
    assert (
        f"configuration: parallelism.zero_stage: zero_stage = {stage} is not modelled with pipeline_parallel = 2 and "
        f"engine = {engine}: gradients would be sharded while later micro-batches still add to them. Set engine: "
        "fsdp2, which reduces them after the last one, zero_stage: 0 or 1, or pipeline_parallel: 1."
    ) in refusal(parallelism={"engine": engine, "zero_stage": stage, "pipeline_parallel": 2})
    assert run(parallelism={"zero_stage": 1, "pipeline_parallel": 2}).parallelism.zero_stage == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp2_reduces_gradients_of_a_pipeline_once(stage: int) -> None:
    spread = {"engine": "fsdp2", "zero_stage": stage, "pipeline_parallel": 2, "data_parallel": 4}

    assert run(parallelism=spread).parallelism.reduces_once
    assert not run(parallelism=spread | {"pipeline_parallel": 1}).parallelism.reduces_once
    assert refusal(parallelism=spread | {"offload": "all"}) == (
        "configuration: parallelism.offload: offload = all is not modelled with pipeline_parallel = 2 and engine = "
        "fsdp2. Set offload: none, or pipeline_parallel: 1."
    )


# -- what is not modelled yet ------------------------------------------------------------------------------------------


def test_transformers_modules_are_not_split() -> None:
    message = refusal(training={"implementation": "huggingface"}, parallelism={"tensor_parallel": 2})

    assert message == (
        "configuration: parallelism.tensor_parallel: tensor_parallel = 2 is not modelled with transformers' modules. "
        "Set tensor_parallel: 1, or implementation: plain."
    )


# -- cards -------------------------------------------------------------------------------------------------------------


def test_an_unknown_gpu_is_refused_with_the_nearest_ones() -> None:
    message = refusal(hardware={"gpu": "a100-sxm"})

    assert message.startswith("configuration: hardware.gpu: 'a100-sxm' is not a known GPU. Nearest: a100-40gb, ")
    assert message.endswith(". `memcalc gpus` lists all GPUs; --budget SIZE takes the memory of any other GPU.")


def test_an_unknown_gpu_of_an_option_is_named_after_it() -> None:
    with pytest.raises(InputError) as caught:
        load({"model": SIZES, "hardware": {"gpu": "t4"}}, gpu="abacus")

    assert str(caught.value).startswith(
        "--gpu: hardware.gpu: 'abacus' is not a known GPU. `memcalc gpus` lists all GPUs;"
    )


# -- values of a wrong kind --------------------------------------------------------------------------------------------

WHOLE = "is not a whole number. Write digits only, such as 8."
RECOMPUTE = (
    "Write none, selective, full, every-k (every-2: each second layer) or a list of layers; a nested list or a range "
    '("4-7") is one checkpoint segment.'
)


@pytest.mark.parametrize(
    ("block", "field", "value", "rest"),
    [
        ("training", "micro_batch_size", 0, "= 0 is too small. Set more than 0."),
        ("training", "micro_batch_size", -3, "= -3 is too small. Set more than 0."),
        ("training", "micro_batch_size", 1.5, f"= 1.5 {WHOLE}"),
        ("training", "micro_batch_size", 2.0, f"= 2.0 {WHOLE}"),
        ("training", "micro_batch_size", "2", f"= '2' {WHOLE}"),
        ("training", "micro_batch_size", True, f"= True {WHOLE}"),
        ("training", "micro_batch_size", [1], f"= a list {WHOLE}"),
        ("training", "micro_batch_size", {"x": 1}, f"= a block {WHOLE}"),
        ("training", "micro_batch_size", 2**41, "= 2199023255552 is too large. Set at most 1099511627776."),
        ("training", "dropout", 1, "= 1 is too large. Set less than 1.0."),
        ("training", "dropout", -0.5, "= -0.5 is too small. Set at least 0.0."),
        ("training", "dropout", "x", "= 'x' is not a number. Write a number, such as 0.1."),
        ("training", "recompute", "every-0", f"= 'every-0' is not a valid value. {RECOMPUTE}"),
        ("training", "recompute", "fulll", f"= 'fulll' is not a valid value. {RECOMPUTE}"),
        ("training", "recompute", 3, f"= 3 is not a valid value. {RECOMPUTE}"),
        ("training", "recompute", [-1], f"= a list is not a valid value. {RECOMPUTE}"),
        ("training", "recompute", ["a"], f"= a list is not a valid value. {RECOMPUTE}"),
        ("training", "zero_grad", "free", "= 'free' is not a known value. Choose 'set_to_none' or 'zero'."),
        ("training", "dtype", "fp8", "= 'fp8' is not a known value. Choose 'fp32', 'bf16' or 'fp16'."),
        (
            "training",
            "attention",
            3,
            "= 3 is not a known value. Choose 'eager', 'flash', 'memory-efficient' or 'math'.",
        ),
        ("parallelism", "zero_stage", 4, "= 4 is too large. Set at most 3."),
        ("parallelism", "zero_stage", -1, "= -1 is too small. Set at least 0."),
        ("parallelism", "pipeline_parallel", 4096, "= 4096 is too large. Set at most 1024."),
        ("parallelism", "sequence_parallel", "yes", "= 'yes' is neither true nor false. Write true or false."),
        ("model", "qkv_bias", 1, "= 1 is neither true nor false. Write true or false."),
        ("model", "norms_per_layer", 3, "= 3 is not a known value. Choose 1, 2 or 4."),
        ("model", "moe", 3, "= 3 is not a block. Write the block's fields indented below it."),
        ("hardware", "gpu", 3, "= 3 is not a word. Write a word; put it in quotes if YAML reads it as a number."),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_with_value_rule_and_remedy(
    block: str, field: str, value: object, rest: str
) -> None:
    assert refusal(**{block: {field: value}}) == f"configuration: {block}.{field}: {field} {rest}"


def test_a_name_that_is_no_word_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        load({"name": 3, "model": SIZES})

    assert str(caught.value) == (
        "configuration: name: name = 3 is not a word. Write a word; put it in quotes if YAML reads it as a number."
    )


def test_a_wrong_value_in_a_nested_block_is_named_by_its_whole_path() -> None:
    assert refusal(model={"moe": MOE | {"num_experts": 0}}) == (
        "configuration: model.moe.num_experts: num_experts = 0 is too small. Set more than 0."
    )


def test_a_rule_points_to_the_line_of_its_key_whatever_its_name(tmp_path: Path) -> None:
    """The file says s, the message says sequence_length: the line is the one of s."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {l: 4, d: 64, h: 4, V: 100}\ntraining:\n  b: 1\n  s: 4096\n")
    with pytest.raises(
        InputError, match=rf"^{re.escape(str(file))}:4: training.sequence_length: sequence_length = 4096 is longer"
    ):
        load(file)


def test_labels_are_those_of_a_tiled_loss() -> None:
    assert refusal(training={"labeled_tokens": 8}) == (
        "configuration: training.labeled_tokens: labeled_tokens = 8 has no effect on loss = materialized, which reads "
        "all tokens. Leave labeled_tokens out, or set loss: tiled."
    )
    assert refusal(training={"labeled_tokens": 16, "sequence_length": 16, "loss": "tiled"}) == (
        "configuration: training.labeled_tokens: labeled_tokens = 16 must be less than sequence_length = 16: the last "
        "token has no label. Lower labeled_tokens, or raise sequence_length."
    )
