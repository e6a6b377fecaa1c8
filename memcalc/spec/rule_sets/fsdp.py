"""Rules of FSDP2's mixed-precision policy and units (`parallelism.fsdp`)."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.recipes import RECIPES
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path


def policy(spec: Spec) -> Iterator[Violation]:
    """Yield violations:

    a policy needs fully_shard, its param_dtype is the compute dtype, and shards have no second copy.
    """
    training, parallelism, fsdp = spec.training, spec.parallelism, spec.parallelism.fsdp
    if fsdp.is_default:
        return
    key: Path = ("parallelism", "fsdp")
    if parallelism.engine != "fsdp2":
        if training.implementation != "torchtitan":  # that implementation's own rule reports it
            yield Violation(
                key,
                f"fsdp is set, but engine = {parallelism.engine}, which has no such options.",
                "Set engine: fsdp2, or leave fsdp out.",
            )
        return
    if fsdp.param_dtype not in (None, training.dtype):
        yield Violation(
            (*key, "param_dtype"),
            f"param_dtype = {fsdp.param_dtype}, but dtype = {training.dtype}: modules compute in what FSDP2 gathers.",
            f"Set param_dtype: {training.dtype}, or dtype: {fsdp.param_dtype}.",
        )
    if fsdp.output_dtype not in (None, training.dtype):
        yield Violation(
            (*key, "output_dtype"),
            f"output_dtype = {fsdp.output_dtype}, but modules compute in {training.dtype}: "
            "such casts are not modelled.",
            f"Set output_dtype: {training.dtype}, or leave it out.",
        )
    if fsdp.param_dtype is not None and RECIPES[training.recipe].master is not None:
        yield Violation(
            ("training", "recipe"),
            f"recipe = {training.recipe} has fp32 master weights, but under fsdp.param_dtype the shards are these.",
            "Set recipe: fp32 (no autocast) or amp (autocast as well), or leave param_dtype out.",
        )
    if fsdp.gradient_sync == "last" and parallelism.offload != "none":
        yield Violation(
            (*key, "gradient_sync"),
            f"gradient_sync = last with offload = {parallelism.offload} is not modelled.",
            "Set gradient_sync: each, or offload: none.",
        )
