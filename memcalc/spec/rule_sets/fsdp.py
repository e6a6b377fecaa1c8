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
                f"the block fsdp needs engine = fsdp2, but engine = {parallelism.engine}.",
                "Set engine: fsdp2, or leave fsdp out.",
            )
        return
    if fsdp.param_dtype not in (None, training.dtype):
        yield Violation(
            (*key, "param_dtype"),
            f"param_dtype = {fsdp.param_dtype} is not dtype = {training.dtype}: modules compute in the dtype that "
            "FSDP2 gathers.",
            f"Set param_dtype: {training.dtype}, or dtype: {fsdp.param_dtype}.",
        )
    if fsdp.output_dtype not in (None, training.dtype):
        yield Violation(
            (*key, "output_dtype"),
            f"output_dtype = {fsdp.output_dtype} is not dtype = {training.dtype}: casts of outputs are not modelled.",
            f"Set output_dtype: {training.dtype}, or leave output_dtype out.",
        )
    if fsdp.param_dtype is not None and RECIPES[training.recipe].master is not None:
        yield Violation(
            ("training", "recipe"),
            f"recipe = {training.recipe} adds fp32 master weights, but with fsdp.param_dtype the shards are the "
            "masters.",
            "Set recipe: fp32 (no autocast) or amp (autocast as well), or leave param_dtype out.",
        )
    if fsdp.gradient_sync == "last" and parallelism.offload != "none":
        yield Violation(
            (*key, "gradient_sync"),
            f"gradient_sync = last is not modelled with offload = {parallelism.offload}.",
            "Set gradient_sync: each, or offload: none.",
        )
