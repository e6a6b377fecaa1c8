"""The options of TensorFlow's GPU allocator.

Source: tensorflow/core/protobuf/config.proto: GPUOptions; common_runtime/gpu/gpu_process_state.cc and
gpu_bfc_allocator.cc for the environment variables; gpu_device.cc: MinSystemMemory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memcalc.allocator import flags
from memcalc.allocator.sizes import MIB
from memcalc.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowSettings:
    """The values of GPUOptions and the environment variables."""

    allow_growth: bool = False  # whether regions are allocated on demand
    memory_fraction: float | None = None  # of the device's memory; None: all available memory minus a reserve
    fragmentation_fraction: float = 0.0  # of the limit: the largest remainder that is not split off; 0: 128 MiB
    garbage_collection: bool = True  # whether free regions are freed to the driver before an out-of-memory error


_READERS: dict[str, tuple[str, flags.Reader]] = {
    "allow_growth": ("allow_growth", flags.boolean),
    "TF_FORCE_GPU_ALLOW_GROWTH": ("allow_growth", flags.boolean),
    "per_process_gpu_memory_fraction": ("memory_fraction", flags.parse_fraction),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ("memory_fraction", flags.parse_fraction),
    "fragmentation_fraction": ("fragmentation_fraction", flags.parse_fraction),
    "garbage_collection": ("garbage_collection", flags.boolean),
    "TF_ENABLE_GPU_GARBAGE_COLLECTION": ("garbage_collection", flags.boolean),
}


def parse_settings(text: str) -> TensorFlowSettings:
    """Parse "allow_growth=true,per_process_gpu_memory_fraction=0.5", under the options' or the variables' names.

    Raises:
        InputError: for an unknown option, an invalid value, or two names of one option with different values.
    """
    given = flags.read_flags(text, {name: reader for name, (_, reader) in _READERS.items()}, "TensorFlow")
    changes: dict[str, Any] = {}
    for name, value in given.items():
        field = _READERS[name][0]
        if changes.get(field, value) != value:
            raise InputError(f"{name} is {value}, but another name of the same option sets {changes[field]}.")
        changes[field] = value
    if changes.get("memory_fraction") == 0:  # the default of the proto: not set
        changes["memory_fraction"] = None
    return TensorFlowSettings(**changes)


def reserve(available: int, capability_major: int | None) -> int:
    """Return the bytes left to the system if no fraction is set.

    Args:
        available: free bytes of the device.
        capability_major: its major compute capability; None if unknown: assumed to be the newest.
    """
    if available < 2048 * MIB:
        return 225 * MIB
    if capability_major is None:
        return 1800 * MIB
    for most, size in ((6, 500), (7, 1050), (8, 1536)):
        if capability_major <= most:
            return size * MIB
    return 1800 * MIB
