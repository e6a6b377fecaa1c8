"""The inference block: what it fills in, what it refuses, in whole sentences; and windows in families' configs."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.loading import load
from memcalc.spec.model_families.conversion import read_hf_config
from memcalc.spec.model_families.inverse import write_hf_config


def block(preset: str = "llama-3-8b", **fields: Any) -> InferenceSpec:
    found = load({"preset": preset, "inference": fields}).inference
    assert found is not None
    return found


def sizes(found: InferenceSpec) -> tuple[int, int, int]:
    return found.prompt_length, found.new_tokens, found.context_length


def refusal(preset: str = "llama-3-8b", *, parallelism: dict[str, Any] | None = None, **fields: Any) -> str:
    with pytest.raises(InputError) as raised:
        load({"preset": preset, "inference": fields or {"batch_size": 1}, "parallelism": parallelism or {}})
    return str(raised.value)


def test_an_empty_block_asks_for_inference_and_null_does_not() -> None:
    assert block() == block(batch_size=1)
    assert load({"preset": "llama-3-8b", "inference": None}).inference is None


def test_prompt_new_tokens_and_context_follow_from_each_other() -> None:
    assert sizes(block()) == (1920, 128, 2048)
    assert sizes(block(context_length=8192)) == (8064, 128, 8192)
    assert sizes(block(prompt_length=100)) == (100, 128, 228)
    assert sizes(block(prompt_length=100, context_length=150)) == (100, 50, 150)
    assert sizes(block(context_length=10)) == (5, 5, 10)
    assert sizes(block("gpt2")) == (896, 128, 1024)


def test_modules_follow_the_cache() -> None:
    assert block().implementation == "huggingface"
    assert block(cache="paged").implementation == "plain"
    assert block(cache="paged").block == 16
    assert block().block == 1


def test_its_forward_uses_the_terms_of_training() -> None:
    spec = load({"preset": "llama-3-8b", "inference": {"batch_size": 3, "prompt_length": 70, "dtype": "fp16"}})

    assert (spec.training.micro_batch_size, spec.training.sequence_length, spec.training.dtype) == (3, 70, "fp16")


def test_a_resolved_run_can_be_read_again() -> None:
    spec = load({"preset": "llama-3-8b", "inference": {"batch_size": 3}})

    assert load(spec.model_dump()) == spec
    assert load(load({"preset": "gpt2"}).model_dump()).inference is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more than the context": (
        {"prompt_length": 100, "new_tokens": 10, "context_length": 50},
        (
            "configuration: inference.context_length: context_length = 50 with new_tokens = 10 and prompt_length = "
            "100. The "
            "context is the prompt and the new tokens: leave one of the three out to have it computed."
        ),
    ),
    "no prompt": (
        {"new_tokens": 10, "context_length": 10},
        (
            "configuration: inference.context_length: context_length = 10 with new_tokens = 10 leaves no token for the "
            "prompt. The context is the prompt and the new tokens: leave one of the three out to have it computed."
        ),
    ),
    "blocks of what has none": (
        {"block_size": 16},
        (
            "configuration: inference.block_size: block_size = 16 needs cache = paged: cache = dynamic has no blocks. "
            "Set cache: paged, or leave block_size out."
        ),
    ),
    "a cache that is not converted": (
        {"kv_cache_dtype": "fp8", "cache": "static"},
        (
            "configuration: inference.kv_cache_dtype: kv_cache_dtype = fp8 needs cache = paged: cache = static has the "
            "dtype of the model's keys and values. Set cache: paged, or kv_cache_dtype: compute."
        ),
    ),
    "pieces of a prompt": (
        {"prefill_chunk": 10},
        (
            "configuration: inference.prefill_chunk: prefill_chunk = 10 is not modelled with cache = dynamic: later "
            "chunks of the prompt need a mask, which selects other kernels. Set cache: paged, or leave prefill_chunk "
            "out."
        ),
    ),
    "modules that know no blocks": (
        {"cache": "paged", "implementation": "huggingface"},
        (
            "configuration: inference.implementation: cache = paged needs implementation = plain, not huggingface: the "
            "paged kernel reads keys and values block by block. Set implementation: plain, or cache: dynamic."
        ),
    ),
    "an unknown key": (
        {"batchsize": 4},
        "configuration: inference.batchsize: unknown field 'batchsize' in inference. Did you mean batch_size?",
    ),
    "a size of no kind": (
        {"batch_size": "many"},
        (
            "configuration: inference.batch_size: batch_size = 'many' is not a whole number. Write digits only, such "
            "as 8."
        ),
    ),
    "a prompt of no kind": (
        {"prompt_length": "long"},
        (
            "configuration: inference.prompt_length: prompt_length = 'long' is not a whole number. Write digits only, "
            "such as 8."
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    fields, message = REFUSED[name]

    assert refusal(**fields) == message


def test_a_context_ends_with_learned_positions() -> None:
    assert refusal("gpt2", context_length=1025) == (
        "configuration: inference.context_length: context_length = 1025 (prompt 897 + new tokens 128) is longer than "
        "the 1024 learned positions. Set context_length: 1024 or less, or raise model.max_position_embeddings."
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("zero_stage", 3), ("context_parallel", 2), ("sequence_parallel", True), ("schedule", "gpipe")],
)
def test_what_only_training_has_is_refused(field: str, value: object) -> None:
    message = refusal(parallelism={field: value})

    assert message == (
        f"configuration: parallelism.{field}: {field} = {str(value).lower()} is a training field, but inference: is "
        f"set. Leave {field} out; inference has tensor_parallel, pipeline_parallel and expert_parallel."
    )


def test_splits_that_are_not_modelled() -> None:
    split = {"tensor_parallel": 2}

    assert (
        "configuration: parallelism.tensor_parallel: tensor_parallel = 2 is not modelled with transformers' modules. "
        "Set tensor_parallel: 1, or inference.implementation: plain." in refusal(parallelism=split)
    )
    assert "bitsandbytes packs only whole weight matrices" in refusal(
        parallelism=split, cache="paged", quantization="nf4", batch_size=1
    )


def test_a_dtype_of_4_bit_layers_needs_4_bit_layers() -> None:
    assert "compute_dtype = fp32 is that of 4-bit layers, but quantization = none." in refusal(compute_dtype="fp32")
    with pytest.raises(InputError, match=r"quantization = nf4 has no effect on falcon: .* Set quantization: none\.$"):
        memcalc.load("falcon-7b", "inference.quantization=nf4")


def test_4_bit_layers_multiply_in_fp32_by_default() -> None:
    for fields, dtype in (((), "fp32"), (("compute_dtype=fp16",), "fp16"), (("cache=paged",), "bf16")):
        words = [f"inference.{field}" for field in ("quantization=nf4", *fields)]
        inference = memcalc.load("llama-3-8b", *words).inference
        assert inference is not None
        assert inference.matmul_dtype == dtype


def test_fields_of_training_name_their_counterpart() -> None:
    with pytest.raises(
        InputError, match=r"^--set: micro_batch_size is a training field, .* Set inference\.batch_size instead\.$"
    ):
        memcalc.load("llama-3-8b", "inference.batch_size=1", "b=4")
    with pytest.raises(
        InputError, match=r"^--set: optimizer is a training field, .* Remove optimizer: generation trains nothing\.$"
    ):
        memcalc.load("llama-3-8b", "inference.batch_size=1", "optimizer=lion")


def test_a_training_block_next_to_inference_is_ignored_with_a_note() -> None:
    spec = load({"preset": "gpt3", "inference": {"batch_size": 1}})

    assert spec.origin.notes == ("The training: block has no effect, because inference: is set.",)
    assert load({"preset": "gpt2", "inference": {"batch_size": 1}}).origin.notes == ()


VERBS = {
    "trace --device null": lambda: memcalc.trace("gpt2", "inference.batch_size=1", device="null"),
    "measure": lambda: memcalc.measure("gpt2", "inference.batch_size=1", device="cpu"),
    "fit": lambda: memcalc.fit("gpt2", "inference.batch_size=1", gpu="l4"),
    "recompute": lambda: memcalc.recompute("gpt2", "inference.batch_size=1", gpu="l4"),
    "replay": lambda: memcalc.replay("gpt2", "inference.batch_size=1"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_of_training_refuse(verb: str) -> None:
    with pytest.raises(InputError, match=f"^inference: {verb} supports training only, but this configuration has"):
        VERBS[verb]()


def test_a_sweep_says_why_nothing_is_valid() -> None:
    table = memcalc.sweep("gpt2", {"tensor_parallel": [1, 2]}, "inference.batch_size=1")

    assert not table.valid.any()
    assert "sweep supports training only" in table.reason(0)


WINDOWS: dict[str, tuple[dict[str, Any], tuple[int, int, tuple[int, ...]]]] = {
    "gemma2": ({}, (4096, 2, ())),
    "gemma3_text": ({"sliding_window": 512}, (512, 6, ())),
    "gpt_oss": ({}, (128, 2, ())),
    "cohere2": ({"sliding_window_pattern": 2}, (4096, 2, ())),
    "mistral": ({"sliding_window": None}, (0, 0, ())),
    "starcoder2": ({"sliding_window": 4096}, (4096, 0, ())),
    "exaone4": ({"sliding_window_pattern": "LLLG"}, (4096, 4, ())),
    "olmo3": ({"layer_types": ["sliding_attention", "full_attention"] * 2}, (4096, 2, ())),
    "olmo3 ": ({"layer_types": ["full_attention", "sliding_attention"] * 2}, (4096, 0, (0, 2))),
    "llama": ({}, (0, 0, ())),
}


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_of_a_config(family: str) -> None:
    keys, expected = WINDOWS[family]
    config = {"model_type": family.strip(), "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"vocab_size": 100, "num_key_value_heads": 2, "intermediate_size": 128, **keys}
    spec = load({"model": read_hf_config(config, "config.json"), "training": {"sequence_length": 8}})
    model = spec.model

    assert (model.sliding_window, model.full_attention_interval, model.full_attention_layers) == expected
    again = load({"model": read_hf_config(write_hf_config(model), "config.json"), "training": {"sequence_length": 8}})
    assert again.model == model


def test_which_layers_have_a_window() -> None:
    model = memcalc.load("gemma-3-1b").model

    assert [layer for layer in range(26) if not model.has_window(layer)] == [5, 11, 17, 23]
    assert all(memcalc.load("mistral-7b").model.has_window(layer) for layer in range(32))
    assert not memcalc.load("llama-3-8b").model.has_window(0)


def test_a_list_of_layers_that_is_none_is_refused() -> None:
    config = {"model_type": "gemma2", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(InputError, match=r"layer_types = 3 is not a list of words\."):
        read_hf_config(config | {"vocab_size": 100, "layer_types": 3}, "config.json")


def test_a_bare_name_never_asks_for_inference() -> None:
    """Who writes batch_size means a training step."""
    training = memcalc.load("gpt2", "batch_size=4")
    assert (training.inference, training.training.micro_batch_size) == (None, 4)
    assert memcalc.load("gpt2", "dtype=fp16").inference is None
