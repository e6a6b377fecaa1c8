"""Rules of generation: valid combinations of caches, dtypes and parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.errors import InputError
from memcalc.spec.finetuning import OWN_LINEAR
from memcalc.spec.model_families.conversion import attends_eagerly
from memcalc.spec.model_families.files import family_named
from memcalc.spec.model_families.transformers_fallback import fallback_family
from memcalc.spec.rule_sets.violations import Violation, shown
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path

# Fields of training steps, each with its neutral value.
OF_TRAINING = {
    "zero_stage": 0,
    "context_parallel": 1,
    "sequence_parallel": False,
    "data_parallel_replicate": 1,
    "virtual_stages": 1,
    "schedule": "1f1b",
    "offload": "none",
    "offload_pin_memory": False,
}


def inference(spec: Spec) -> Iterator[Violation]:
    """Yield violations of these rules."""
    asked = spec.inference
    if asked is None:
        return
    if spec.model.transformers_config is not None:
        yield Violation(
            ("inference",),
            f"memcalc has no formulas for inference of {fallback_family(spec.model)}.",
            "Dry-run its generation script: `memcalc dry-run --gpu GPU -- python script.py`.",
        )
    positions = spec.model.max_position_embeddings
    if spec.model.position_embedding == "learned" and asked.context_length > positions:
        yield Violation(
            ("inference", "context_length"),
            f"context_length = {asked.context_length} (prompt {asked.prompt_length} + new tokens {asked.new_tokens}) "
            f"is longer than the {positions} learned positions.",
            f"Set context_length: {positions} or less, or raise model.max_position_embeddings.",
        )
    architecture = spec.model.architecture
    if asked.attention != "eager" and attends_eagerly(architecture, asked.implementation):
        package = family_named(str(architecture)).flash_package
        if asked.attention != "flash" or not package:
            yield Violation(
                ("inference", "attention"),
                f"transformers' {architecture} does not support sdpa, but attention = {asked.attention}.",
                "Set attention: eager; or flash, for flash_attention_2." if package else "Set attention: eager.",
            )
    yield from _cache(spec)
    yield from _spread(spec)
    yield from _quantized(spec)


def _cache(spec: Spec) -> Iterator[Violation]:
    asked = spec.inference
    assert asked is not None
    if asked.cache == "paged":
        for field, value in (("implementation", "plain"), ("attention", "flash")):
            if (given := getattr(asked, field)) != value:
                yield Violation(
                    ("inference", field),
                    f"cache = paged needs {field} = {value}, not {given}: the paged kernel reads keys and values block "
                    "by block.",
                    f"Set {field}: {value}, or cache: dynamic.",
                )
        return
    if asked.block_size is not None:
        yield Violation(
            ("inference", "block_size"),
            f"block_size = {asked.block_size} needs cache = paged: cache = {asked.cache} has no blocks.",
            "Set cache: paged, or leave block_size out.",
        )
    if asked.kv_cache_dtype != "compute":
        yield Violation(
            ("inference", "kv_cache_dtype"),
            f"kv_cache_dtype = {asked.kv_cache_dtype} needs cache = paged: cache = {asked.cache} has the dtype of the "
            "model's keys and values.",
            "Set cache: paged, or kv_cache_dtype: compute.",
        )
    if asked.prefill_chunk is not None and asked.prefill_chunk < asked.prompt_length:
        yield Violation(
            ("inference", "prefill_chunk"),
            f"prefill_chunk = {asked.prefill_chunk} is not modelled with cache = {asked.cache}: later chunks of the "
            "prompt need a mask, which selects other kernels.",
            "Set cache: paged, or leave prefill_chunk out.",
        )


def _spread(spec: Spec) -> Iterator[Violation]:
    asked, parallelism = spec.inference, spec.parallelism
    assert asked is not None
    for field, neutral in OF_TRAINING.items():
        if (value := getattr(parallelism, field)) != neutral:
            yield Violation(
                ("parallelism", field),
                f"{field} = {shown(value)} is a training field, but inference: is set.",
                f"Leave {field} out; inference has tensor_parallel, pipeline_parallel and expert_parallel.",
            )
    if asked.implementation == "huggingface" and parallelism.tensor_parallel > 1:
        yield Violation(
            ("parallelism", "tensor_parallel"),
            f"tensor_parallel = {parallelism.tensor_parallel} is not modelled with transformers' modules.",
            "Set tensor_parallel: 1, or inference.implementation: plain.",
        )
    if asked.quantization != "none" and parallelism.tensor_parallel > 1:
        yield Violation(
            ("inference", "quantization"),
            f"quantization = {asked.quantization} is not modelled with tensor_parallel = "
            f"{parallelism.tensor_parallel}: bitsandbytes packs only whole weight matrices.",
            "Set tensor_parallel: 1, or quantization: none.",
        )


def _quantized(spec: Spec) -> Iterator[Violation]:
    asked, architecture = spec.inference, spec.model.architecture
    assert asked is not None
    if asked.compute_dtype is not None and asked.quantization == "none":
        yield Violation(
            ("inference", "compute_dtype"),
            f"compute_dtype = {asked.compute_dtype} is that of 4-bit layers, but quantization = none.",
            "Set dtype, or quantization: nf4 or fp4.",
        )
    if asked.quantization != "none" and asked.implementation == "huggingface" and architecture in OWN_LINEAR:
        yield Violation(
            ("inference", "quantization"),
            f"quantization = {asked.quantization} has no effect on {architecture}: transformers replaces layers of the "
            "class nn.Linear alone, and this family has a class of its own.",
            "Set quantization: none.",
        )


def of_training(spec: Spec, verb: str) -> Spec:
    """Return the run, for commands that support training only.

    Raises:
        InputError: the configuration has an inference: block.
    """
    if spec.inference is not None:
        raise InputError(
            f"{verb} supports training only, but this configuration has an inference: block.",
            REMEDIES.get(verb, "Use `memcalc estimate`, or remove the inference: block."),
            "inference",
        )
    return spec


REMEDIES = {
    "fit": "`memcalc estimate --gpu GPU` lists the largest batch and the longest context that fit.",
    "measure": "`memcalc dry-run --gpu GPU -- python script.py` dry-runs a script that generates.",
    "trace --device null": "Leave --device out, or dry-run a script: `memcalc dry-run --gpu GPU -- python script.py`.",
}


LEFT_ASIDE = "The training: block has no effect, because inference: is set."


def refuse_training_fields(overridden: dict[Path, str]) -> None:
    """Reject training fields that were set on the command line.

    Raises:
        InputError: there is one.
    """
    from memcalc.spec.inference import InferenceSpec

    names = {"micro_batch_size": "batch_size", "sequence_length": "prompt_length"}
    for path, where in overridden.items():
        if path[0] == "training":
            name = str(path[-1])
            own = names.get(name, name)
            remedy = (
                f"Set inference.{own} instead."
                if own in InferenceSpec.model_fields
                else f"Remove {name}: generation trains nothing."
            )
            raise InputError(f"{name} is a training field, but inference: is set.", remedy, where)
