"""Rules of fine-tuning: which blocks require each other, and which modules and precisions are valid."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.finetuning import HEAD, adaptable_modules, adapted_modules, none_of_these
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE


def finetuning(spec: Spec) -> Iterator[Violation]:
    """Yield violations of the rules of the blocks `lora` and `qlora`."""
    training = spec.training
    for name, ways in (("lora", ("lora", "qlora")), ("qlora", ("qlora",))):
        if getattr(training, name) is not None and training.finetune not in ways:
            yield Violation(
                ("training", name),
                f"the block {name} is set, but finetune = {training.finetune}.",
                f"Set finetune: {name}, or remove the block.",
            )
    if training.lora is not None:
        yield from _modules(spec)
        yield from _magnitudes(spec)
        yield from _targets(spec)
        yield from _precisions(spec)
        yield from _parallel(spec)


def _modules(spec: Spec) -> Iterator[Violation]:
    training = spec.training
    if training.lora is None or training.lora.implementation != "litgpt":
        return
    if training.implementation != "plain" or spec.model.mla is not None:
        yield Violation(
            ("training", "lora", "implementation"),
            "lora.implementation = litgpt does not support "
            + ("latent attention." if spec.model.mla is not None else f"implementation = {training.implementation}."),
            "Set lora.implementation: peft, or implementation: plain.",
        )


def _magnitudes(spec: Spec) -> Iterator[Violation]:
    training = spec.training
    if training.lora is None or not training.lora.dora:
        return
    needs = {
        "implementation: plain": (training.implementation == "plain", f"implementation = {training.implementation}"),
        "lora.implementation: peft": (training.lora.implementation == "peft", "lora.implementation = litgpt"),
        "fake_quantization: none": (training.fake_quantization == "none", "fake quantization"),
        "tensor_parallel: 1": (spec.parallelism.tensor_parallel == 1, "tensor parallelism"),
    }
    for remedy, (is_met, found) in needs.items():
        if not is_met:
            yield Violation(
                ("training", "lora", "dora"),
                f"lora.dora = true is not modelled with {found}.",
                f"Set lora.dora: false, or {remedy}.",
            )


def _targets(spec: Spec) -> Iterator[Violation]:
    lora, model, training = spec.training.lora, spec.model, spec.training
    assert lora is not None
    if model.transformers_config is not None:
        return  # its layers are known when it is built
    adapted = adapted_modules(lora, model, training.implementation)
    if not adapted:
        there = adaptable_modules(model, training.implementation, lora.implementation)
        yield Violation(("training", "lora", "target_modules"), *none_of_these(lora.target_modules, there))
    calls_head = training.loss not in TOKENWISE or (training.loss == "chunked" and not training.loss_recompute)
    if HEAD in adapted and not calls_head:
        yield Violation(
            ("training", "lora", "target_modules"),
            f"target_modules names {HEAD}, but loss = {training.loss} does not call the LM head.",
            f"Set loss: materialized or chunked, or leave {HEAD} out.",
        )


def _precisions(spec: Spec) -> Iterator[Violation]:
    lora, recipe = spec.training.lora, spec.training.recipe
    assert lora is not None
    # zero.Init keeps the dtypes of parameters that are made after it (DeepSpeed 0.19 runtime/engine.py,
    # _cast_module_mixed_precision).
    keeps_dtypes = spec.parallelism.engine == "deepspeed" and spec.parallelism.zero_stage == 3
    if lora.adapter_dtype == "fp32" and recipe.startswith("mixed") and not keeps_dtypes:
        yield Violation(
            ("training", "lora", "adapter_dtype"),
            f"adapter_dtype = fp32, but recipe {recipe} stores fp32 master weights of 16-bit weights.",
            "Set adapter_dtype: compute, or recipe: pure.",
        )
    if lora.adapter_dtype == "bf16" and (recipe.startswith("mixed") or spec.training.dtype == "fp16"):
        yield Violation(
            ("training", "lora", "adapter_dtype"),
            "adapter_dtype = bf16 is for adapters of a step in fp32 or bf16 without master weights.",
            "Set adapter_dtype: compute.",
        )
    if lora.base_dtype == "fp32" and recipe not in ("fp32", "amp"):
        yield Violation(
            ("training", "lora", "base_dtype"),
            f"base_dtype = fp32, but recipe {recipe} computes in {spec.training.dtype} without autocast.",
            "Set recipe: amp, which casts, or base_dtype: compute.",
        )


def _parallel(spec: Spec) -> Iterator[Violation]:
    training, parallelism = spec.training, spec.parallelism
    if training.implementation not in ("plain", "huggingface"):
        yield Violation(
            ("training", "implementation"),
            f"finetune = {training.finetune} is not modelled with implementation = {training.implementation}.",
            "Set implementation: plain or huggingface.",
        )
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(parallelism, name) > 1:
            yield Violation(
                ("parallelism", name),
                f"{name} = {getattr(parallelism, name)} is not modelled with finetune = {training.finetune}.",
                f"Set {name}: 1, and use data_parallel instead.",
            )
