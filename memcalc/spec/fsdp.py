"""Arguments of FSDP1 and FSDP2: mixed-precision policy, units, prefetch, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from memcalc.spec.model import ConfigBlock

Precision = Literal["fp32", "bf16", "fp16"]
Wrap = Literal["layers", "layers-and-ends", "layers-and-trained", "model", "size"]
GradientSync = Literal["each", "last"]
Prefetch = Literal["pre", "post", "none"]
WeightsFrom = Literal["meta", "host", "first-rank"]


class FsdpSpec(ConfigBlock):
    """Options of FSDP2 (fully_shard, MixedPrecisionPolicy) and FSDP1 (FullyShardedDataParallel, MixedPrecision)."""

    param_dtype: Precision | None = Field(
        None, description="dtype in which parameters are gathered, and modules compute; default: that of the shards"
    )
    reduce_dtype: Precision | None = Field(
        None, description="dtype in which gradients are reduced; default: param_dtype, else that of the gradients"
    )
    output_dtype: Precision | None = Field(
        None, description="dtype to which outputs of units are cast, the compute dtype; default: no cast"
    )
    wrap: Wrap = Field(
        "layers",
        description="FSDP units: layers (the root has the rest) | layers-and-ends (the embedding is a unit, and so are "
        "final norm and LM head together, which stay gathered until their backward; tied, all three are one; FSDP2) | "
        "layers-and-trained (with adapters, each module that trains is a unit: PEFT's policy; FSDP1) | "
        "model (the model is one unit; FSDP1) | size (modules of least_unit_parameters or more, of which layers are "
        "counted: if these are smaller, the model is one unit; FSDP1)",
    )
    least_unit_parameters: int = Field(
        100_000_000, ge=0, description="wrap: size: parameters from which on a module is a unit"
    )
    reshard_root: bool = Field(
        False,
        description="FSDP2: whether the root, too, is resharded after forward, which PyTorch does from 2.8 on if "
        "reshard_after_forward=True is given for it (torchtune); default: it stays gathered until its backward",
    )
    gradient_sync: GradientSync = Field(
        "each",
        description="micro-batches after which gradients are reduced: each | last (no_sync, and always in a "
        "pipeline: until then they are summed unsharded, in reduce_dtype; under FSDP1 in param_dtype)",
    )
    weights_from: WeightsFrom = Field(
        "meta",
        description="FSDP2: where weights are before they are sharded: meta (nowhere: shards alone are allocated) | "
        "host (in host memory: fully_shard moves each unit whole to the GPU) | first-rank (in the first rank's host "
        "memory: each weight is broadcast whole, as with Accelerate's cpu_ram_efficient_loading)",
    )
    keeps_unsharded_weights: bool = Field(
        False,
        description="FSDP2 of a 4-bit base, which is loaded on the GPU: whether its unsharded weights stay until all "
        "units are sharded (Accelerate)",
    )
    use_orig_params: bool = Field(
        False,
        description="FSDP1: whether the optimizer updates a rank's part of each parameter, instead of one flat tensor "
        "per unit",
    )
    load_dtype: Precision | None = Field(
        None,
        description="FSDP1: dtype in which weights are loaded and flattened, before the shards are cast to fp32; "
        "default: that of the shards",
    )
    forward_prefetch: bool = Field(
        False, description="FSDP1: whether forward gathers the next unit before this one runs, from the second batch on"
    )
    backward_prefetch: Prefetch = Field(
        "pre",
        description="FSDP1: when backward gathers the next unit: pre (before this unit's gradients) | post (after "
        "them) | none (when it is needed)",
    )

    @property
    def is_default(self) -> bool:
        """Whether no field is set."""
        return self == DEFAULT


DEFAULT = FsdpSpec()


def default_policy(fsdp: Any, dtype: object) -> Any:
    """Return the block with torchtitan's policy; validation rejects a block of a wrong type.

    torchtitan at ba2469780, torchtitan/parallelisms/parallelize_llama.py, apply_fsdp: bf16 parameters, fp32 reduction.
    """
    if not isinstance(fsdp, Mapping):
        return fsdp
    return {"param_dtype": dtype if isinstance(dtype, str) else "bf16", "reduce_dtype": "fp32"} | dict(fsdp)


def computes_in(parallelism: Any) -> object:
    """Return the compute dtype that a policy sets; None: it sets none, or has a wrong type."""
    fsdp = parallelism.get("fsdp") if isinstance(parallelism, Mapping) else None
    return fsdp.get("param_dtype") if isinstance(fsdp, Mapping) else None
