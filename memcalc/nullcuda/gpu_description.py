"""A GPU of the table in the format of the device library: one environment variable of figures."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.spec.hardware.gpus import GpuSpec, find_gpu


class Capability(NamedTuple):
    """Limits of a compute capability: CUDA C++ Programming Guide, "Technical Specifications"."""

    shared_block_kib: int  # largest shared memory per block, opt-in
    shared_sm_kib: int  # per multiprocessor
    blocks: int  # most resident blocks per multiprocessor


CAPABILITIES = {
    (6, 1): Capability(48, 96, 32),
    (7, 0): Capability(96, 96, 32),
    (7, 5): Capability(64, 64, 16),
    (8, 0): Capability(163, 164, 32),
    (8, 6): Capability(99, 100, 16),
    (8, 9): Capability(99, 100, 24),
    (9, 0): Capability(227, 228, 32),
    (10, 0): Capability(227, 228, 32),
    (10, 3): Capability(227, 228, 32),
    (12, 0): Capability(99, 100, 24),
}

# NCCL's buffers, device memory outside the PyTorch allocator: the upper ends of published per-process figures, as in
# estimates (memcalc/estimation/outside_allocator.py; a test compares both).
NCCL_FIRST_BYTES = 1536 * 2**20
NCCL_FURTHER_BYTES = 2048 * 2**20

MOST_GPUS = 64  # per process, as in src/device.c


def find_null_gpu(name: str) -> GpuSpec:
    """Return the GPU of that name.

    Raises:
        InputError: it is unknown, not a CUDA GPU, or its number of multiprocessors is uncertain.
    """
    gpu = find_gpu(name)
    if gpu.compute_capability not in CAPABILITIES:
        raise InputError(f"{gpu.label} is not an NVIDIA GPU, so it has no null device.", "Choose an NVIDIA GPU.")
    if gpu.multiprocessors is None or gpu.max_threads_per_multiprocessor is None:
        raise InputError(
            f"the number of multiprocessors of {gpu.label} is uncertain, and temporaries depend on this number.",
            "Choose another GPU of its compute capability, e.g. b200.",
        )
    return gpu


def properties(gpu: GpuSpec, gpus: int, *, delayed_events: bool = False) -> str:
    """Return the GPU's figures in the format of src/device.c. Bytes."""
    assert gpu.compute_capability is not None
    major, minor = gpu.compute_capability
    capability = CAPABILITIES[gpu.compute_capability]
    figures = {
        "major": major,
        "minor": minor,
        "multiprocessors": gpu.multiprocessors,
        "threads": gpu.max_threads_per_multiprocessor,
        "blocks": capability.blocks,
        "shared_block": capability.shared_block_kib * 2**10,
        "shared_sm": capability.shared_sm_kib * 2**10,
        "l2": gpu.l2_bytes or 0,
        "memory": gpu.usable_bytes,
        "reserve": gpu.context_bytes,
        "nccl_first": NCCL_FIRST_BYTES,
        "nccl_further": NCCL_FURTHER_BYTES,
        "delayed": int(delayed_events),
        "gpus": gpus,
        "name": gpu.device_name,  # last, because it contains blanks
    }
    return " ".join(f"{name}={value}" for name, value in figures.items())
