"""Parameters that FSDP2 gathers: their dtypes, and their bytes on every rank."""

from __future__ import annotations

from math import prod

from memcalc.layout.local_parameters import LocalParameter
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.state_options import StateOptions


def gathered_dtype(parameter: LocalParameter, options: StateOptions) -> str:
    """Return a parameter's all-gather dtype: uint8 for torchao's FP8 weights, else the policy's, else its own."""
    if is_narrow(parameter, options):
        return "uint8"
    packed = parameter.dtype == "uint8"  # 4-bit weights, which no policy casts
    return parameter.dtype if packed else options.fsdp.gathered or parameter.dtype or options.base


def is_narrow(parameter: LocalParameter, options: StateOptions) -> bool:
    """Return whether a weight is gathered in FP8 (torchao's fsdp_pre_all_gather)."""
    if options.fsdp.float8_gather is None or parameter.tensor != "weight" or len(parameter.shape) != len(("out", "in")):
        return False
    return not parameter.module.startswith("embed") and options.fsdp.float8_gather.converts(parameter.module)


def shard_elements(parameter: LocalParameter, options: StateOptions) -> int:
    """Return the elements of a rank's shard: rows are rounded up, and padded on the last ranks."""
    return prod(options.spread(2).shape(parameter))


def gathered_bytes(parameter: LocalParameter, options: StateOptions) -> int:
    """Return the bytes of a gathered parameter, with the padding of its shards."""
    ranks = options.spread(2).over(parameter)
    return shard_elements(parameter, options) * DTYPE_BYTES[gathered_dtype(parameter, options)] * ranks
