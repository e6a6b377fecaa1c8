"""Paddle's flags, their defaults by version, and the valid combinations.

Source: paddle/common/flags.cc; defaults of older versions are from Paddle's release notes: garbage collection is on
from 1.6, auto_growth is the default from 1.7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from memcalc.allocator import flags
from memcalc.allocator.sizes import MIB
from memcalc.errors import InputError

GIB = 2**30
DEFAULT_VERSION = "3.1"
AUTO_GROWTH, NAIVE_BEST_FIT = "auto_growth", "naive_best_fit"

STATIC_BY_DEFAULT_BEFORE = (2, 0)  # before this version, programs were static graphs unless they requested dygraph
COLLECTS_SINCE = (1, 6)
GROWS_SINCE = (1, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleSettings:
    """The values of Paddle's flags. Sizes in bytes; a size of 0 means that the flag is not set."""

    strategy: str = AUTO_GROWTH
    fraction: float = 0.92  # of the available memory that the first chunk takes (naive_best_fit)
    initial: int = 0  # bytes of the first chunk, overrides the fraction
    reallocate: int = 0  # bytes of every later chunk
    limit: int = 0  # bytes in total from the driver
    chunk: int = 0  # minimum size of a chunk (auto_growth)
    free_idle_chunk: bool = False
    free_when_no_cache_hit: bool = False
    small_pool: int = 0  # requests up to this size have a separate pool
    small_chunk: int = 0
    large_chunk: int = 0
    small_pre_alloc: int = 0
    large_pre_alloc: int = 0
    static_graph: bool = False  # whether the garbage collector and in-place reuse apply
    collection_threshold: int = 0  # bytes of garbage collected before they are freed; negative: no limit
    collected_fraction: float = 1.0  # fraction of the garbage's bytes, the largest first
    fast_collection: bool = True  # without waiting for kernels
    inplace: bool = True
    notes: tuple[str, ...] = ()  # flags that were accepted but have no effect


_READERS: dict[str, tuple[str, flags.Reader]] = {
    "allocator_strategy": ("strategy", flags.one_of(AUTO_GROWTH, NAIVE_BEST_FIT)),
    "fraction_of_gpu_memory_to_use": ("fraction", flags.parse_fraction),
    "initial_gpu_memory_in_mb": ("initial", flags.megabytes),
    "reallocate_gpu_memory_in_mb": ("reallocate", flags.megabytes),
    "gpu_memory_limit_mb": ("limit", flags.megabytes),
    "auto_growth_chunk_size_in_mb": ("chunk", flags.megabytes),
    "free_idle_chunk": ("free_idle_chunk", flags.boolean),
    "free_when_no_cache_hit": ("free_when_no_cache_hit", flags.boolean),
    "small_pool_size_in_mb": ("small_pool", flags.megabytes),
    "small_pool_auto_growth_chunk_size_in_mb": ("small_chunk", flags.megabytes),
    "large_pool_auto_growth_chunk_size_in_mb": ("large_chunk", flags.megabytes),
    "small_pool_pre_alloc_in_mb": ("small_pre_alloc", flags.megabytes),
    "large_pool_pre_alloc_in_mb": ("large_pre_alloc", flags.megabytes),
    "static_graph": ("static_graph", flags.boolean),
    "eager_delete_tensor_gb": ("collection_threshold", lambda name, value: _threshold(flags.number(name, value))),
    "memory_fraction_of_eager_deletion": ("collected_fraction", flags.parse_fraction),
    "fast_eager_deletion_mode": ("fast_collection", flags.boolean),
    "enable_inplace": ("inplace", flags.boolean),
}
_WITHOUT_EFFECT: dict[str, tuple[str, flags.Reader]] = {
    "gpu_allocator_retry_time": ("no other thread frees memory while one waits", flags.number),
    "alignment_size": ("CUDA devices take 256 bytes", flags.size_in_bytes),
    "enable_async_fast_gc": ("it frees the same memory on another thread", flags.boolean),
}
_COLLECTION = ("eager_delete_tensor_gb", "memory_fraction_of_eager_deletion", "fast_eager_deletion_mode")
_OF_STRATEGY = {
    NAIVE_BEST_FIT: ("fraction_of_gpu_memory_to_use", "initial_gpu_memory_in_mb", "reallocate_gpu_memory_in_mb"),
    AUTO_GROWTH: (
        "auto_growth_chunk_size_in_mb", "free_idle_chunk", "free_when_no_cache_hit", "small_pool_size_in_mb",
        "small_pool_auto_growth_chunk_size_in_mb", "large_pool_auto_growth_chunk_size_in_mb",
        "small_pool_pre_alloc_in_mb", "large_pool_pre_alloc_in_mb",
    ),
}  # fmt: skip
_OF_POOLS = tuple(name for name in _OF_STRATEGY[AUTO_GROWTH] if "pool" in name and name != "small_pool_size_in_mb")


def parse_settings(text: str, strategy: str | None = None, version: str = DEFAULT_VERSION) -> PaddleSettings:
    """Parse "FLAGS_gpu_memory_limit_mb=1024,FLAGS_eager_delete_tensor_gb=1", with or without "FLAGS_".

    Two names are not flags of Paddle: static_graph (whether the program is one), and enable_inplace, which is a field
    of its BuildStrategy.

    Args:
        text: the flags; "" for none.
        strategy: auto_growth or naive_best_fit; None: from the flags or the version's default.
        version: the Paddle version, for the defaults.

    Raises:
        InputError: for an unknown flag, an invalid value, flags that contradict each other or the strategy, or an
            invalid version.
    """
    release = parse_version(version)
    known = {name: reader for name, (_, reader) in (_READERS | _WITHOUT_EFFECT).items()}
    given = flags.read_flags(text, known, "Paddle", "FLAGS_")
    default = AUTO_GROWTH if release >= GROWS_SINCE else NAIVE_BEST_FIT
    if strategy and given.get("allocator_strategy", strategy) != strategy:
        raise InputError(
            f"allocator_strategy is {given['allocator_strategy']}, but the requested allocator is {strategy}.",
            "Name one of them.",
        )
    settings = PaddleSettings(
        strategy=strategy or default,
        static_graph=release < STATIC_BY_DEFAULT_BEFORE or any(name in given for name in _static(given)),
        collection_threshold=0 if release >= COLLECTS_SINCE else -1,
    )
    changes: dict[str, Any] = {_READERS[name][0]: value for name, value in given.items() if name in _READERS}
    settings = replace(settings, **changes)
    _check(given, settings)
    return replace(settings, notes=tuple(_notes(given, settings)))


def parse_version(text: str) -> tuple[int, int]:
    """Return "2.6.1" as (2, 6).

    Raises:
        InputError: for text that is not a version of Paddle.
    """
    match = re.match(r"(\d{1,9})\.(\d{1,9})(?:\D|$)", text)
    if match is None or not 1 <= int(match[1]) <= 3:
        raise InputError(f"{text!r} is not a version of Paddle.", "Name one from 1.0 to 3.x.")
    return int(match[1]), int(match[2])


def _threshold(gb: float) -> int:
    return -1 if gb < 0 else int(gb * GIB)


def _static(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the flags that apply to static graphs only, so that giving one implies a static graph."""
    return (*_COLLECTION, "enable_inplace") if given.get("static_graph", True) else ()


def _check(given: dict[str, Any], settings: PaddleSettings) -> None:
    """Raise InputError for flags that contradict each other."""
    if given.get("static_graph") is False:
        for name in (*_COLLECTION, "enable_inplace"):
            if name in given:
                raise InputError(
                    f"{name} is about static graphs, but static_graph is false.",
                    "A dynamic graph frees a tensor with its last reference. Remove one of the two.",
                )
    if settings.limit and max(settings.initial, settings.reallocate) > settings.limit:
        raise InputError(
            f"gpu_memory_limit_mb is {settings.limit // MIB}, less than the chunk of "
            f"{max(settings.initial, settings.reallocate) // MIB} MiB that is allocated first.",
            "Raise the limit, or lower initial_gpu_memory_in_mb and reallocate_gpu_memory_in_mb.",
        )
    if not settings.small_pool:
        for name in _OF_POOLS:
            if name in given:
                raise InputError(
                    f"{name} is given without small_pool_size_in_mb.",
                    f"Set small_pool_size_in_mb, which makes two pools, or remove {name}.",
                )
    if settings.small_pool and "auto_growth_chunk_size_in_mb" in given:
        raise InputError(
            "auto_growth_chunk_size_in_mb is ignored when small_pool_size_in_mb is set.",
            "Set small_pool_auto_growth_chunk_size_in_mb and large_pool_auto_growth_chunk_size_in_mb.",
        )


def _notes(given: dict[str, Any], settings: PaddleSettings) -> list[str]:
    """Return notes on flags that were accepted but have no effect."""
    notes = [f"{name} has no effect: {why}" for name, (why, _) in _WITHOUT_EFFECT.items() if name in given]
    other = NAIVE_BEST_FIT if settings.strategy == AUTO_GROWTH else AUTO_GROWTH
    notes += [f"{name} has no effect: it is a flag of {other}" for name in _OF_STRATEGY[other] if name in given]
    return notes
