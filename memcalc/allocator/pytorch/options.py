"""The options of PYTORCH_CUDA_ALLOC_CONF, and the version that introduced each.

Source: torch c10/cuda/CUDAAllocatorConfig.cpp (to 2.9), c10/core/AllocatorConfig.cpp and CUDAAllocatorConfig.cpp
(since).
"""

from __future__ import annotations

from memcalc.allocator.pytorch.versions import OLDEST, Version
from memcalc.errors import InputError

# The minor version of torch 2 that introduced the option; OLDEST for options of the oldest version modelled.
SINCE: dict[str, int] = {
    "backend": OLDEST,
    "max_split_size_mb": OLDEST,
    "max_non_split_rounding_mb": OLDEST,
    "garbage_collection_threshold": OLDEST,
    "roundup_power2_divisions": OLDEST,
    "expandable_segments": OLDEST,
    "release_lock_on_cudamalloc": OLDEST,
    "pinned_use_cuda_host_register": OLDEST,
    "pinned_num_register_threads": OLDEST,
    "pinned_use_background_threads": OLDEST,
    "graph_capture_record_stream_reuse": 9,
    "per_process_memory_fraction": 10,
    "pinned_reserve_segment_size_mb": 10,
    "large_segment_size_mb": 11,
    "throw_on_cudamalloc_oom": 12,
    "pinned_max_round_threshold_mb": 13,
    "pinned_max_cached_size_mb": 13,
}

# Options that PyTorch accepts and checks, but that have no effect on device memory without captured graphs.
WITHOUT_EFFECT = {
    "release_lock_on_cudamalloc": "it only lets other threads run during cudaMalloc",
    "graph_capture_record_stream_reuse": "reuse during graph capture is not modelled",
    "pinned_use_cuda_host_register": "it is about host memory",
    "pinned_num_register_threads": "it is about host memory",
    "pinned_use_background_threads": "it is about host memory",
    "pinned_reserve_segment_size_mb": "it is about host memory",
    "pinned_max_round_threshold_mb": "it is about host memory",
    "pinned_max_cached_size_mb": "it is about host memory",
}


def known_options(version: Version) -> tuple[str, ...]:
    """Return the options that a version accepts, in order of introduction."""
    return tuple(name for name, since in SINCE.items() if since <= version.minor)


def check_known(name: str, version: Version) -> None:
    """Reject an option that a version does not know, as PyTorch does.

    Raises:
        InputError: with the known options.
    """
    since = SINCE.get(name)
    if since is not None and since <= version.minor:
        return
    history = "" if since is None else f" torch 2.{since} added the option."
    raise InputError(
        f"torch {version} has no allocator option {name!r}.{history}",
        f"Choose from {', '.join(known_options(version))}.",
    )
