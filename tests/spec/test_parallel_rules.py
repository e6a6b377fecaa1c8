"""The rules of Megatron-Core, context and expert parallelism, and HSDP: what they refuse, in whole sentences."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load

SIZES: dict[str, Any] = {"l": 4, "d": 64, "h": 4, "V": 100}
MOE = {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 48}


def refusal(**blocks: dict[str, Any]) -> str:
    model = SIZES | blocks.pop("model", {})
    with pytest.raises(InputError) as raised:
        load({"model": model} | blocks)
    return str(raised.value)


def test_megatron_keeps_fp32_main_gradients() -> None:
    message = refusal(training={"implementation": "megatron", "recipe": "pure"})

    assert message == (
        "configuration: training.recipe: recipe = pure does not run with implementation = megatron, which keeps fp32 "
        "main gradients: recipe mixed-18. Set recipe: mixed-18, or another engine and implementation."
    )
    message = refusal(parallelism={"engine": "megatron"}, training={"recipe": "mixed-20", "implementation": "plain"})
    assert "recipe = mixed-20 does not run with engine = megatron, which keeps fp32 main gradients" in message


def test_megatrons_engine_trains_its_own_modules() -> None:
    """As Megatron-LM does with --bf16; another implementation is not overridden."""
    training = load({"model": SIZES, "parallelism": {"engine": "megatron"}}).training
    defaults = (training.implementation, training.recipe, training.optimizer_implementation, training.loss)

    assert defaults == ("megatron", "mixed-18", "fused", "vocab-parallel")
    around = load({"model": SIZES, "training": {"implementation": "plain"}, "parallelism": {"engine": "megatron"}})
    assert (around.training.implementation, around.training.recipe, around.training.loss) == (
        "plain",
        "mixed-18",
        "materialized",
    )
    stages = {"schedule": "interleaved", "zero_stage": 1, "pipeline_parallel": 2, "virtual_stages": 2}
    derived = load({"model": SIZES, "training": {"gradient_accumulation_steps": 4}, "parallelism": stages})
    assert (derived.parallelism.engine, derived.training.recipe) == ("megatron", "mixed-18")


def test_megatrons_matrices_need_its_engine() -> None:
    assert refusal(training={"implementation": "megatron"}, parallelism={"engine": "deepspeed"}) == (
        "configuration: parallelism.engine: implementation = megatron does not support engine = deepspeed: its linear "
        "layers add to main gradients. Leave engine out, or set engine: megatron."
    )


@pytest.mark.parametrize("loss", ["materialized", "chunked"])
def test_megatrons_loss_works_on_parts_of_the_vocabulary(loss: str) -> None:
    assert refusal(training={"implementation": "megatron", "loss": loss}) == (
        f"configuration: training.loss: implementation = megatron does not support loss = {loss}: its loss shards the "
        "vocabulary. Set loss: vocab-parallel (Megatron-Core's own) or fused (Transformer Engine's)."
    )


def test_megatrons_fused_attention_is_flash() -> None:
    assert refusal(training={"implementation": "megatron", "attention": "memory-efficient"}) == (
        "configuration: training.attention: implementation = megatron does not support attention = memory-efficient. "
        "Set attention: flash (Transformer Engine) or eager (Megatron-Core's own modules)."
    )


def test_megatrons_own_modules_have_no_experts() -> None:
    experts = {"num_experts": 4, "num_experts_per_token": 2, "expert_intermediate_size": 64}
    assert (
        "configuration: training.attention: attention = eager is not modelled with implementation = megatron and "
        "experts. Set attention: flash, or implementation: plain."
        in refusal(model={"moe": experts}, training={"implementation": "megatron", "attention": "eager"})
    )


def test_megatron_in_fp32_has_no_fused_attention_and_its_own_recipe() -> None:
    wide = {"implementation": "megatron", "dtype": "fp32"}
    assert (
        "configuration: training.attention: attention = flash has no fused kernel for dtype = fp32. Set attention: "
        "eager, or dtype: bf16 or fp16." in refusal(training=wide | {"attention": "flash"})
    )
    assert "Set recipe: fp32-main" in refusal(training=wide | {"recipe": "fp32"})
    assert (
        "configuration: training.recipe: recipe = fp32-main needs implementation = megatron, not plain. Set recipe: "
        "fp32, or implementation: megatron."
        in refusal(training={"dtype": "fp32", "recipe": "fp32-main", "implementation": "plain"})
    )


def test_models_that_megatrons_layers_do_not_have_are_refused() -> None:
    assert refusal(training={"implementation": "megatron"}, model={"norms_per_layer": 4}) == (
        "configuration: model.norms_per_layer: norms_per_layer = 4 is not modelled with implementation = megatron. Set "
        "norms_per_layer: 2, or implementation: plain."
    )


def test_a_sequence_is_cut_into_two_pieces_for_each_context_parallel_rank() -> None:
    assert refusal(parallelism={"context_parallel": 3}) == (
        "configuration: parallelism.context_parallel: sequence_length = 2048 is not a multiple of 2 x 3 x 1 = 6, the "
        "chunks of context_parallel = 3. Set sequence_length to a multiple of 6, such as 2046."
    )
    spread = {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}
    assert load({"model": SIZES, "parallelism": spread}).parallelism.context_parallel == 2


def test_no_context_parallel_rank_sees_a_whole_attention_map() -> None:
    assert (
        "configuration: training.attention: context_parallel = 2 needs attention = flash, not eager: no rank has all "
        "keys at once. Set attention: flash."
        in refusal(parallelism={"context_parallel": 2}, training={"attention": "eager"})
    )


def test_heads_are_exchanged_evenly() -> None:
    spread = {"context_parallel": 8, "context_parallel_method": "all-to-all"}
    assert refusal(parallelism=spread) == (
        "configuration: parallelism.context_parallel: context_parallel = 8 does not divide the 4 query heads of a "
        "rank, which all-to-all exchanges. Set context_parallel_method: ring, or lower context_parallel."
    )


@pytest.mark.parametrize("field", ["expert_parallel", "expert_tensor_parallel"])
def test_there_are_experts_to_spread(field: str) -> None:
    assert refusal(parallelism={field: 2}) == (
        f"configuration: parallelism.{field}: {field} = 2, but the model has no experts. Leave {field} out."
    )


def test_experts_are_distributed_evenly_over_the_ranks() -> None:
    moe = {"moe": MOE}
    assert "expert_parallel = 3 does not divide num_experts = 8." in refusal(
        model=moe, parallelism={"expert_parallel": 3}
    )
    assert "expert_tensor_parallel = 5 does not divide expert_intermediate_size = 48." in refusal(
        model=moe, parallelism={"expert_tensor_parallel": 5}
    )
    assert refusal(model=moe, parallelism={"expert_parallel": 4, "data_parallel": 2}) == (
        "configuration: parallelism.expert_parallel: expert 4 x expert_tensor 1 does not divide tensor 1 x context 1 x "
        "data 2 = 2 ranks. Change expert_parallel or data_parallel: groups of experts use the same ranks."
    )
    assert load({"model": SIZES | moe, "parallelism": {"expert_parallel": 4, "data_parallel": 4}})


def test_hybrid_sharding_has_groups_of_one_size() -> None:
    shared = {"engine": "fsdp2", "zero_stage": 3, "data_parallel": 8}
    assert "data_parallel_replicate = 3 does not divide data_parallel = 8." in refusal(
        parallelism=shared | {"data_parallel_replicate": 3}
    )
    assert (
        "configuration: parallelism.data_parallel_replicate: data_parallel_replicate = 2 needs engine = fsdp1 or "
        "fsdp2, not ddp. Set engine: fsdp2, which shards inside groups (HSDP), or leave data_parallel_replicate out."
        in refusal(parallelism={"data_parallel": 8, "data_parallel_replicate": 2})
    )


PIPELINE = {"pipeline_parallel": 2}


@pytest.mark.parametrize(
    ("spread", "message"),
    [
        (
            {"schedule": "gpipe"},
            (
                "schedule = gpipe needs several stages, but pipeline_parallel = 1. Leave schedule out, or raise "
                "pipeline_parallel."
            ),
        ),
        (
            PIPELINE | {"schedule": "interleaved"},
            (
                "schedule = interleaved needs several chunks per stage, but virtual_stages = 1. Set virtual_stages: 2 "
                "or "
                "more."
            ),
        ),
        (
            {"schedule": "dualpipe", "pipeline_parallel": 3},
            (
                "schedule = dualpipe needs an even number of stages, but pipeline_parallel = 3. Set pipeline_parallel: "
                "4 "
                "or another even number."
            ),
        ),
        (
            {"schedule": "zb-v", "pipeline_parallel": 4},
            (
                "schedule = zb-v splits the model into 8 chunks, but num_layers = 4. Lower pipeline_parallel or "
                "virtual_stages: a chunk needs at least one layer."
            ),
        ),
    ],
)
def test_a_schedule_has_stages_and_layers_enough(spread: dict[str, Any], message: str) -> None:
    assert refusal(parallelism=spread) == f"configuration: parallelism.schedule: {message}"


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_deepspeeds_pipeline_engine_has_one_schedule(schedule: str) -> None:
    """DeepSpeed 0.19.8 runtime/pipe/engine.py: train_batch runs TrainSchedule, which is 1F1B."""
    spread = {"pipeline_parallel": 2, "schedule": schedule, "data_parallel": 2}
    assert refusal(parallelism=spread | {"zero_stage": 1, "engine": "deepspeed"}) == (
        f"configuration: parallelism.schedule: schedule = {schedule} does not run with engine = deepspeed, which has "
        "1f1b only. Leave schedule out, or set engine: megatron (recipe mixed-18) or fsdp2."
    )
    assert load({"model": SIZES, "parallelism": spread | {"zero_stage": 2}}).parallelism.engine == "fsdp2"
    training = {"recipe": "mixed-18"}
    run = load({"model": SIZES, "training": training, "parallelism": spread | {"zero_stage": 1}})
    assert run.parallelism.engine == "megatron"
    assert load({"model": SIZES, "parallelism": spread}).parallelism.engine == "ddp"


def test_only_interleaving_has_virtual_stages() -> None:
    assert refusal(parallelism=PIPELINE | {"virtual_stages": 2}) == (
        "configuration: parallelism.virtual_stages: virtual_stages = 2 needs schedule = interleaved, not 1f1b. Set "
        "schedule: interleaved, or leave virtual_stages out; V schedules always have two chunks per stage."
    )


def test_torchtitan_is_fsdp2_over_fp32_shards() -> None:
    spec = load(
        {"preset": "llama-3-8b", "training": {"implementation": "torchtitan"}, "parallelism": {"data_parallel": 8}}
    )

    assert (spec.parallelism.engine, spec.parallelism.zero_stage, spec.training.recipe) == ("fsdp2", 3, "amp")


def test_torchtitan_needs_ranks_and_its_own_model() -> None:
    titan = {"training": {"implementation": "torchtitan"}, "parallelism": {"data_parallel": 8}}
    with pytest.raises(InputError, match="normalization = layernorm is not modelled with implementation = torchtitan"):
        load({"model": SIZES} | titan)
    with pytest.raises(InputError, match="needs several ranks for FSDP2"):
        load({"preset": "llama-3-8b", "training": titan["training"], "parallelism": {"zero_stage": 3}})


def test_torchtitan_without_fsdp() -> None:
    """distributed/utils.py, maybe_enable_amp: autocast on one GPU and under DDP, fp32 with tensor parallelism."""
    words = ("implementation=torchtitan", "gpu=b200")
    alone = load("llama-3-8b", words)
    assert (alone.parallelism.engine, alone.training.recipe, alone.training.attention) == ("ddp", "amp", "flash")
    split = ("tensor_parallel=2", "sequence_parallel=true", "loss=vocab-parallel", "engine=ddp")
    with pytest.raises(InputError, match="computes in fp32 with tensor or pipeline parallelism and without FSDP2"):
        load("llama-3-8b", (*words, *split))
    training = load("llama-3-8b", (*words, *split, "dtype=fp32")).training
    assert (training.recipe, training.attention) == ("fp32", "math")
    with pytest.raises(InputError, match="with experts or latent attention is modelled for engine = fsdp2, not ddp"):
        load("qwen3-30b-a3b", (*words, "engine=ddp", "data_parallel=8"))


@pytest.mark.parametrize(
    ("engine", "stages", "count", "least"),
    [
        ("fsdp2", 2, 9, 8),  # 4 rounds of 2
        ("fsdp2", 4, 10, 0),  # 2 rounds of 5
        ("fsdp2", 4, 11, 8),
        ("fsdp2", 4, 3, 0),  # one round
        ("megatron", 4, 10, 8),
        ("megatron", 4, 8, 0),
    ],
)
def test_an_interleaved_schedule_has_full_rounds(engine: str, stages: int, count: int, least: int) -> None:
    """PyTorch's ScheduleInterleaved1F1B and Megatron-Core raise an error for others."""
    words = (
        *("schedule=interleaved", "virtual_stages=2", f"pipeline_parallel={stages}", "data_parallel=4"),
        *(f"engine={engine}", f"zero_stage={2 if engine == 'fsdp2' else 0}", f"gradient_accumulation_steps={count}"),
    )
    if not least:
        assert load("llama-3-8b", words).training.gradient_accumulation_steps == count
        return
    with pytest.raises(InputError, match=f"needs full rounds.*Set gradient_accumulation_steps: {least}, or"):
        load("llama-3-8b", words)


def test_fsdp2_takes_parameters_of_one_dtype() -> None:
    """transformers builds ERNIE's routers in fp32: PyTorch's assertion was the traceback of a trace."""
    words = ("num_layers=2", "implementation=huggingface", "engine=fsdp2", "zero_stage=3", "data_parallel=2")
    with pytest.raises(InputError, match="FSDP2, which rejects parameters of two dtypes"):
        load("ernie-4.5-21b-a3b", (*words, "recipe=pure"))
    for other in (("recipe=amp",), ("recipe=pure", "implementation=plain"), ("recipe=pure", "data_parallel=1")):
        load("ernie-4.5-21b-a3b", (*words, *other))


def of_transformers(model: str, **parallelism: Any) -> str:
    """The refusal of context parallelism with the modules of a published model."""
    modules = {"implementation": "huggingface", "recipe": "pure", "sequence_length": 2048}
    with pytest.raises(InputError) as raised:
        load(
            {
                "preset": model,
                "training": modules,
                "parallelism": {"context_parallel": 2, "zero_stage": 3} | parallelism,
            }
        )
    return str(raised.value)


def test_accelerates_context_parallelism_drops_masks_so_it_rejects_windows() -> None:
    assert of_transformers("mistral-7b") == (
        "configuration: parallelism.context_parallel: context_parallel = 2 drops the masks of attention, so Accelerate "
        "rejects layers with a sliding window. Set context_parallel: 1, or implementation: plain."
    )


def test_transformers_exchange_of_heads_is_not_modelled() -> None:
    assert of_transformers("llama-3-8b", context_parallel_method="all-to-all") == (
        "configuration: parallelism.context_parallel_method: context_parallel_method = all-to-all is not modelled with "
        "transformers' modules. Set context_parallel_method: all-gather, or implementation: plain."
    )
