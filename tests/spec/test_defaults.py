"""What holds where a file is silent, what follows from what it says, and the batch that ties three fields."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import InputError
from memcalc.spec.defaults import default_parallelism, default_training, tie_batch
from memcalc.spec.loading import load
from memcalc.spec.recipes import ALIASES

SIZES: dict[str, Any] = {"l": 4, "d": 64, "h": 4, "V": 100}


def test_a_silent_file_has_these_values() -> None:
    """INTERFACE, "Defaults where a file is silent", field by field."""
    spec = load({"model": SIZES})

    assert spec.name == "unnamed"
    assert spec.training.model_dump() == {
        "micro_batch_size": 1,
        "sequence_length": 2048,
        "pairs": False,
        "reference_model": False,
        "scored_apart": False,
        "reference_logits_until": "loss",
        "teacher": None,
        "teacher_dtype": None,
        "divergence": "forward",
        "evaluation_batch_size": None,
        "evaluation_when": "between",
        "empty_cache_steps": None,
        "empty_cache_when": "before-backward",
        "reentrant_checkpoints": False,
        "evaluation_loss": "training",
        "optimizer_in_backward": False,
        "vision_tower": "trained",
        "completion_length": None,
        "steps_per_generation": None,
        "gradient_accumulation_steps": 1,
        "global_batch_size": None,
        "dtype": "bf16",
        "autocast": None,
        "recipe": "mixed-20",
        "fp8": "none",
        "fp8_skip": ("lm_head", "mlp.router"),
        "fp8_all_gather": False,
        "fp8_params": False,
        "fake_quantization": "none",
        "fake_quantization_group": 256,
        "implementation": "plain",
        "optimizer": "adamw",
        "optimizer_implementation": "foreach",
        "optimizer_options": {
            "amsgrad": False,
            "nesterov": None,
            "centered": False,
            "momentum": None,
            "weight_decay": None,
            "rank": None,
            "paged": False,
            "embeddings_32bit": False,
        },
        "gradient_dtype": None,
        "gradient_clipping": None,
        "ema": "none",
        "zero_grad": "set_to_none",
        "zero_grad_before": "forward",
        "weight_dtype": None,
        "fp32_modules": (),
        "recompute": "none",
        "recompute_modules": ("core_attn",),
        "recompute_keep": (),
        "compile": False,
        "offload_activations": "none",
        "attention": "flash",
        "attention_windows": "kernel",
        "padding_free": False,
        "variable_lengths": False,
        "labeled_tokens": None,
        "padding_mask": "none",
        "dropout": None,
        "loss": "materialized",
        "loss_chunks": 8,
        "loss_recompute": True,
        "chunked_head": True,
        "repeat_kv": False,
        "heads_first": False,
        "norm_dtype": "input",
        "loss_shift": "labels",
        "loss_upcast": True,
        "logits_dtype": "compute",
        "kernels": "torch",
        "logits_until": "backward",
        "torch_version": "v2.13",
        "alloc_conf": "",
        "finetune": "full",
        "framework": None,
        "versions": None,
        "lora": None,
        "qlora": None,
    }
    assert spec.parallelism.model_dump() == {
        "engine": "ddp",
        "data_parallel": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "context_parallel": 1,
        "expert_parallel": 1,
        "sequence_parallel": False,
        "context_parallel_method": "ring",
        "expert_tensor_parallel": None,
        "schedule": "1f1b",
        "virtual_stages": 1,
        "pipeline_split": "layers",
        "pipeline_tensors": None,
        "data_parallel_replicate": 1,
        "zero_stage": 0,
        "fsdp": {
            "param_dtype": None,
            "reduce_dtype": None,
            "output_dtype": None,
            "wrap": "layers",
            "least_unit_parameters": 100_000_000,
            "reshard_root": False,
            "gradient_sync": "each",
            "weights_from": "meta",
            "keeps_unsharded_weights": False,
            "use_orig_params": False,
            "load_dtype": None,
            "forward_prefetch": False,
            "backward_prefetch": "pre",
        },
        "zero_optimization": {
            "reduce_bucket_size": 500_000_000,
            "prefetch_bucket_size": 50_000_000,
            "param_persistence_threshold": 100_000,
            "overlap_comm": None,
            "separate_no_decay": False,
            "copies_fp32_weights": False,
            "casts_fp32_weights": False,
            "automatic": (),
            "bf16_optimizer": False,
            "own_adam": False,
        },
        "offload": "none",
        "offload_pin_memory": False,
        "find_unused_parameters": False,
        "bucket_cap_mb": None,
    }
    assert spec.hardware.gpu is None


def test_a_silent_model_is_the_papers_gpt_without_dropout() -> None:
    model = load({"model": SIZES}).model

    assert (model.position_embedding, model.normalization, model.mlp, model.norms_per_layer) == (
        "learned",
        "layernorm",
        "gelu",
        2,
    )
    assert model.qkv_bias
    assert model.output_bias
    assert model.mlp_bias
    assert model.tie_word_embeddings
    assert not model.lm_head_bias
    assert (model.attention_dropout, model.residual_dropout, model.embedding_dropout) == (0, 0, 0)


def test_a_key_without_a_value_is_silent() -> None:
    given: dict[str, Any] = {
        "name": None,
        "model": SIZES | {"head_dim": None, "moe": None},
        "training": {"s": None, "recipe": None},
        "parallelism": None,
        "hardware": {"gpu": None},
    }

    assert load(given) == load({"model": SIZES})


@pytest.mark.parametrize(("positions", "expected"), [(128, 128), (2047, 2047), (2048, 2048), (131072, 2048)])
def test_a_sequence_is_2048_tokens_or_what_the_positions_allow(positions: int, expected: int) -> None:
    assert load({"model": SIZES | {"max_position_embeddings": positions}}).training.sequence_length == expected


@pytest.mark.parametrize(("preset", "expected"), [("gpt2", 1024), ("llama-3-8b", 2048), ("gpt3", 2048)])
def test_a_preset_has_the_sequence_that_its_positions_allow(preset: str, expected: int) -> None:
    assert load(preset).training.sequence_length == expected


# -- recipe, dtype, optimizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alias", "recipe"), [("zero", "mixed-16"), ("megatron", "mixed-18"), ("mt-nlg", "mixed-20")])
def test_recipes_have_the_names_of_what_they_imitate(alias: str, recipe: str) -> None:
    assert ALIASES[alias] == recipe
    assert load({"model": SIZES, "training": {"recipe": alias}}).training.recipe == recipe


@pytest.mark.parametrize("given", [{"dtype": "fp32"}, {"recipe": "fp32"}, {"dtype": "fp32", "recipe": "fp32"}])
def test_fp32_as_dtype_or_recipe_means_both(given: dict[str, str]) -> None:
    training = load({"model": SIZES, "training": given}).training

    assert (training.dtype, training.recipe) == ("fp32", "fp32")


def test_another_recipe_given_beside_fp32_stays() -> None:
    training = load({"model": SIZES, "training": {"dtype": "fp32", "recipe": "pure"}}).training

    assert (training.dtype, training.recipe) == ("fp32", "pure")


# -- engine ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "engine"), [(0, "ddp"), (1, "deepspeed"), (2, "deepspeed"), (3, "fsdp2")])
def test_the_engine_follows_from_the_stage(stage: int, engine: str) -> None:
    assert load({"model": SIZES}, [f"zero_stage={stage}"]).parallelism.engine == engine


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "context", "expert"])
def test_megatron_is_its_own_engine_once_the_model_is_split(kind: str) -> None:
    assert default_parallelism({f"{kind}_parallel": 2}, "megatron")["engine"] == "megatron"
    assert default_parallelism({f"{kind}_parallel": 2}, "plain")["engine"] == "ddp"
    assert default_parallelism({"data_parallel": 2}, "megatron")["engine"] == "ddp"
    assert default_parallelism({"data_parallel": 2, "zero_stage": 1}, "megatron")["engine"] == "megatron"


def test_a_release_of_torch_may_stand_in_quotes_without_its_v() -> None:
    """Without quotes YAML reads 2.10 as the number 2.1, which is refused with the names that are known."""
    assert default_training({"torch_version": "2.10"}, SIZES)["torch_version"] == "v2.10"
    with pytest.raises(InputError, match=r"torch_version = 2\.1 is not a known value\. Choose 'v2\.6'"):
        load({"model": SIZES, "training": {"torch_version": 2.1}})


def test_megatron_does_what_megatron_lm_does_where_its_options_are_silent() -> None:
    silent = default_training({"implementation": "megatron"}, SIZES)
    given_loss = default_training({"implementation": "megatron", "loss": "fused"}, SIZES)

    assert (silent["recipe"], silent["optimizer_implementation"]) == ("mixed-18", "fused")
    assert (silent["loss"], given_loss["loss"]) == ("vocab-parallel", "fused")


def test_an_engine_that_is_given_stays() -> None:
    assert load({"model": SIZES}, ["zero_stage=3", "engine=deepspeed"]).parallelism.engine == "deepspeed"


# -- the batch ---------------------------------------------------------------------------------------------------------


def tied(data_parallel: int = 1, **training: int) -> tuple[int, int]:
    """Micro-batch and accumulation of a run."""
    spec = load({"model": SIZES, "training": training, "parallelism": {"data_parallel": data_parallel}})
    return spec.training.micro_batch_size, spec.training.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({"global_batch_size": 32}, 1, (1, 32)),  # 1 x 32 x 1
        ({"global_batch_size": 32}, 4, (1, 8)),  # 1 x 8 x 4
        ({"global_batch_size": 32, "micro_batch_size": 4}, 2, (4, 4)),  # 4 x 4 x 2
        ({"global_batch_size": 32, "gradient_accumulation_steps": 4}, 2, (4, 4)),
        ({"global_batch_size": 32, "micro_batch_size": 4, "gradient_accumulation_steps": 4}, 2, (4, 4)),
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 3}, 2, (4, 3)),  # nothing to tie
    ],
)
def test_the_global_batch_gives_what_is_silent(given: dict[str, int], ranks: int, expected: tuple[int, int]) -> None:
    assert tied(ranks, **given) == expected


OF_TWO = "Set a multiple of 2, or change these."
ANY_OF_FOUR = "Change one of these, or leave one out: memcalc computes the fourth."


@pytest.mark.parametrize(
    ("given", "ranks", "problem"),
    [
        (
            {"b": 4},
            2,
            "is not a multiple of micro_batch_size 4 x data_parallel 2 = 8. Set a multiple of 8, or change these.",
        ),
        (
            {"b": 4, "steps": 4},
            1,
            "differs from micro_batch_size 4 x gradient_accumulation_steps 4 x data_parallel 1 = 16. " + ANY_OF_FOUR,
        ),
        (
            {},
            64,
            "is not a multiple of micro_batch_size 1 x data_parallel 64 = 64. Set a multiple of 64, or change these.",
        ),
        (
            {"steps": 2},
            1,
            "is not a multiple of gradient_accumulation_steps 2 x data_parallel 1 = 2. " + OF_TWO,
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(given: dict[str, int], ranks: int, problem: str) -> None:
    """Only sizes that the user sets are named: a computed one would look like the user's."""
    names = {"b": "micro_batch_size", "steps": "gradient_accumulation_steps"}
    training = {names[name]: value for name, value in given.items()}
    with pytest.raises(InputError) as caught:
        tied(ranks, global_batch_size=33, **training)

    assert str(caught.value) == f"configuration: training.global_batch_size: global_batch_size = 33 {problem}"


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sampled_from(["micro", "steps", "both", "none"]))
def test_a_batch_is_what_its_parts_make(micro: int, steps: int, ranks: int, given: str) -> None:
    """global = micro x accumulation x ranks, whichever of the two in the middle is given."""
    training = {"global_batch_size": micro * steps * ranks}
    if given in ("micro", "both"):
        training["micro_batch_size"] = micro
    if given in ("steps", "both"):
        training["gradient_accumulation_steps"] = steps
    filled = tie_batch(training, {"data_parallel": ranks}, "")
    found = filled.get("micro_batch_size", 1), filled["gradient_accumulation_steps"]

    assert found == ((1, micro * steps) if given == "none" else (micro, steps))


# -- what is wrong is left for validation ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["x", 1.5, True, [1], {"a": 1}, -1, 0])
def test_values_of_a_wrong_type_pass_through(bad: Any) -> None:
    """Nothing is computed from them and nothing fails: the model that validates names the key and the rule."""
    assert tie_batch({"global_batch_size": bad}, {}, "") == {"global_batch_size": bad}
    assert tie_batch({"global_batch_size": 8, "micro_batch_size": bad}, {}, "")["micro_batch_size"] == bad
    assert default_training({"recipe": bad}, {})["recipe"] == bad
    assert default_parallelism({"zero_stage": bad}, {})["zero_stage"] == bad
    with pytest.raises(InputError):
        load({"model": SIZES, "training": {"global_batch_size": bad}})


def test_defaults_leave_what_they_are_given_as_it_was() -> None:
    training: dict[str, Any] = {"recipe": "zero", "global_batch_size": 8}
    parallelism: dict[str, Any] = {}
    default_training(training, {})
    default_parallelism(parallelism, training)
    tie_batch(training, parallelism, "")

    assert (training, parallelism) == ({"recipe": "zero", "global_batch_size": 8}, {})
