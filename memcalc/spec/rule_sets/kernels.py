"""Rules of kernels that replace a model's own."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.finetuning import FUSED_FAMILIES
from memcalc.spec.model_families.conversion import attends_eagerly, family_of
from memcalc.spec.model_families.files import family_named
from memcalc.spec.programs import number
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec


def _without_sdpa(spec: Spec) -> Iterator[Violation]:
    training, architecture = spec.training, spec.model.architecture
    family = family_named(str(architecture))
    package, last = family.flash_package, family.sdpa_until
    if package and training.attention == "flash" and training.attention_windows == "kernel":
        return
    release = None if training.versions is None else training.versions.transformers
    if last and release is not None and number(release) <= number(last):
        return
    remedy = "Set training.attention: eager."
    if package:
        remedy = "Set training.attention: eager; or flash, with attention_windows: kernel, for flash_attention_2."
    if last:
        remedy += f" Releases of transformers up to {last} support sdpa: --set versions.transformers={last}."
    yield Violation(
        ("training", "attention"),
        f"transformers' {architecture} does not support sdpa, but attention = {training.attention}.",
        remedy,
    )


def kernels(spec: Spec) -> Iterator[Violation]:
    """Yield violations of the rules of attention kernels, Liger's kernels, fused adapters and masks for windows."""
    training, architecture = spec.training, spec.model.architecture
    if training.attention != "eager" and attends_eagerly(architecture, training.implementation):
        yield from _without_sdpa(spec)
    if training.attention == "math":
        yield from _math(spec)
    if training.kernels == "liger" and training.implementation != "huggingface":
        yield Violation(
            ("training", "kernels"),
            f"kernels = liger replaces transformers' modules, but implementation = {training.implementation}.",
            "Set implementation: huggingface, or kernels: torch.",
        )
    fuses = training.lora is not None and training.lora.fused
    family = family_of(architecture) if architecture else ""
    if fuses and (training.implementation != "huggingface" or family not in FUSED_FAMILIES):
        yield Violation(
            ("training", "lora", "fused"),
            f"lora.fused replaces transformers' modules of {', '.join(FUSED_FAMILIES)}, but implementation = "
            f"{training.implementation} and architecture = {architecture or 'none'}.",
            "Set lora.fused: [].",
        )
    if fuses and spec.parallelism.zero_stage == 3:
        yield Violation(
            ("training", "lora", "fused"),
            "lora.fused is not modelled with zero_stage = 3: its functions do not call the modules that gather their "
            "weights.",
            "Set lora.fused: [].",
        )
    if training.repeat_kv and training.implementation == "huggingface" and family not in FUSED_FAMILIES:
        yield Violation(
            ("training", "repeat_kv"),
            f"repeat_kv = true with implementation = huggingface is modelled for {', '.join(FUSED_FAMILIES)}, not for "
            f"architecture = {architecture or 'none'}.",
            "Leave repeat_kv out.",
        )
    if training.attention_windows == "mask" and training.implementation != "huggingface":
        yield Violation(
            ("training", "attention_windows"),
            f"attention_windows = mask needs transformers' modules, but implementation = {training.implementation}.",
            "Set implementation: huggingface, or attention_windows: kernel.",
        )


def _math(spec: Spec) -> Iterator[Violation]:
    """Yield violations of the rules of PyTorch's math kernel, which transformers' and torchtitan's modules call."""
    training, model, key = spec.training, spec.model, ("training", "attention")
    if training.implementation not in ("huggingface", "torchtitan"):
        yield Violation(
            key,
            f"attention = math needs transformers' or torchtitan's modules, but implementation = "
            f"{training.implementation}.",
            "Set implementation: huggingface, or attention: eager.",
        )
    if training.dtype != "fp32":
        yield Violation(
            key,
            f"attention = math is modelled for dtype = fp32, not {training.dtype}.",
            "Set attention: flash or eager, or dtype: fp32.",
        )
    if model.num_key_value_heads == model.num_attention_heads and training.implementation == "huggingface":
        yield Violation(
            key,
            f"attention = math needs grouped heads, but num_key_value_heads = {model.num_key_value_heads}, as the "
            "query heads.",
            "Set attention: memory-efficient, which PyTorch takes for them, or eager.",
        )
