"""Rules of quantization-aware training: the modules and layouts that are modelled with it."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.finetuning import base_dtype
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path

KEY: Path = ("training", "fake_quantization")


def fake_quantization(spec: Spec) -> Iterator[Violation]:
    """Yield violations of these rules."""
    training, model, parallelism = spec.training, spec.model, spec.parallelism
    if training.fake_quantization == "none":
        return
    implementation, by_range = training.implementation, training.fake_quantization == "int8-int4-by-range"
    theirs = implementation == "huggingface"
    narrow = (parallelism.fsdp.param_dtype or base_dtype(training)) != "fp32"
    calls_tied_head = theirs and model.tie_word_embeddings and training.loss not in ("fused", "tiled")
    needs = {
        "implementation: plain or huggingface": (
            implementation in ("plain", "huggingface"),
            f"implementation = {implementation}",
        ),
        "finetune: full": (training.finetune == "full" or not theirs, f"finetune = {training.finetune}"),
        "finetune: full or lora": (training.finetune != "qlora", "finetune = qlora"),
        "fake_quantization: int8-int4": (narrow or not by_range, "fp32 weights"),
        "loss: fused": (not calls_tied_head, "a tied LM head that is called"),
        "fp8: none": (training.fp8 == "none", f"fp8 = {training.fp8}"),
        "tensor_parallel: 1": (parallelism.tensor_parallel == 1, f"tensor_parallel = {parallelism.tensor_parallel}"),
        "an engine other than deepspeed": (parallelism.engine != "deepspeed", "engine = deepspeed"),
    }
    for remedy, (is_met, found) in needs.items():
        if not is_met:
            yield _unsupported(spec, found, f"Set {remedy}, or fake_quantization: none.")
    others = {
        "experts": model.moe is not None,
        "latent attention": model.mla is not None,
        "linear attention": model.linear_attention is not None,
        "Mamba's layers": model.mamba is not None,
    }
    for what in (each for each, is_there in others.items() if is_there):
        yield _unsupported(spec, what, "Set fake_quantization: none.")


def _unsupported(spec: Spec, found: str, remedy: str) -> Violation:
    return Violation(
        KEY, f"fake_quantization = {spec.training.fake_quantization} is not modelled with {found}.", remedy
    )
