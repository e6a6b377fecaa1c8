"""The registry of allocators: by name, each created from its settings as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from memcalc.allocator import ideal
from memcalc.allocator.base import BlockAllocator
from memcalc.allocator.driver import Driver
from memcalc.allocator.paddle import settings as paddle
from memcalc.allocator.paddle.auto_growth import AutoGrowthAllocator
from memcalc.allocator.paddle.naive_best_fit import NaiveBestFitAllocator
from memcalc.allocator.pytorch import settings as pytorch
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.versions import DEFAULT_VERSION, parse_version
from memcalc.allocator.tensorflow import settings as tensorflow
from memcalc.allocator.tensorflow.bfc import BfcAllocator
from memcalc.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorDevice:
    """The device that an allocator works on."""

    capacity: int | None = None  # bytes; None for a device that never runs out of memory
    used: int = 0  # bytes in use from the start: CUDA context, other processes
    capability_major: int | None = None  # major compute capability; None: unknown

    def driver(self) -> Driver:
        """Return a driver with nothing allocated."""
        return Driver(self.capacity, self.used)


class NewAllocator(NamedTuple):
    """An allocator that has allocated nothing, and what its settings mean for the stream that it replays."""

    allocator: BlockAllocator
    notes: tuple[str, ...] = ()  # settings that have no effect
    paddle: paddle.PaddleSettings | None = (
        None  # flags for garbage collection and in-place reuse, which transform the stream
    )


_FLAGS = re.compile(r"(?:^|[,\s])FLAGS_\w")  # Paddle flags as users write them


def policy_of(policy: str, config: str, version: str | None = None) -> str:
    """Return the allocator's name; if `config` holds Paddle flags, the allocator that they select.

    Args:
        policy: a name in POLICIES; "pytorch" is the default.
        config: its settings.
        version: the framework's version; None for the newest one known.

    Raises:
        InputError: for flags that Paddle rejects.
    """
    if policy != "pytorch" or not _FLAGS.search(config):
        return policy
    settings = paddle.parse_settings(config, None, version or paddle.DEFAULT_VERSION)
    return f"paddle-{settings.strategy.replace('_', '-')}"


Maker = Callable[[str, str | None, AllocatorDevice, float | None], NewAllocator]


def make(
    policy: str, config: str, version: str | None, device: AllocatorDevice, memory_fraction: float | None = None
) -> NewAllocator:
    """Create an allocator.

    Args:
        policy: a name in POLICIES.
        config: its settings in the framework's syntax.
        version: the framework's version; None for the newest one known.
        device: the device it works on.
        memory_fraction: as in torch.cuda.set_per_process_memory_fraction; PyTorch only.

    Raises:
        InputError: for an unknown allocator, or settings that it rejects.
    """
    if policy not in POLICIES:
        raise InputError(f"{policy!r} is not an allocator.", f"Choose {', '.join(POLICIES)}.")
    if memory_fraction is not None and policy != "pytorch":
        raise InputError(
            f"a memory fraction needs the PyTorch allocator, but the allocator is {policy}.",
            "Set gpu_memory_limit_mb for Paddle, per_process_gpu_memory_fraction for TensorFlow.",
        )
    return POLICIES[policy](config, version, device, memory_fraction)


def _pytorch(config: str, version: str | None, device: AllocatorDevice, memory_fraction: float | None) -> NewAllocator:
    release = parse_version(version or DEFAULT_VERSION)
    settings = pytorch.parse_settings(config, release, memory_fraction)
    return NewAllocator(CachingAllocator(settings, release, device.driver()), settings.notes)


def _auto_growth(config: str, version: str | None, device: AllocatorDevice, _: float | None) -> NewAllocator:
    settings = paddle.parse_settings(config, paddle.AUTO_GROWTH, version or paddle.DEFAULT_VERSION)
    return NewAllocator(AutoGrowthAllocator(settings, device.driver()), settings.notes, settings)


def _naive_best_fit(config: str, version: str | None, device: AllocatorDevice, _: float | None) -> NewAllocator:
    settings = paddle.parse_settings(config, paddle.NAIVE_BEST_FIT, version or paddle.DEFAULT_VERSION)
    if device.capacity is None and settings.fraction and not (settings.initial and settings.reallocate):
        _needs_capacity("naive_best_fit reserves a fraction of the GPU's memory")
    return NewAllocator(NaiveBestFitAllocator(settings, device.driver()), settings.notes, settings)


def _tensorflow(config: str, version: str | None, device: AllocatorDevice, _: float | None) -> NewAllocator:
    _without_version("tensorflow", version)
    settings = tensorflow.parse_settings(config)
    if device.capacity is None and not settings.allow_growth:
        _needs_capacity("TensorFlow reserves the GPU's memory at the first allocation unless allow_growth is set")
    return NewAllocator(BfcAllocator(settings, device.driver(), device.capability_major))


def _ideal(config: str, version: str | None, device: AllocatorDevice, _: float | None) -> NewAllocator:
    _without_version("ideal", version)
    return NewAllocator(ideal.IdealAllocator(ideal.parse_settings(config), device.driver()))


def _needs_capacity(why: str) -> None:
    raise InputError(f"{why}, and no GPU is given.", "Name one with --gpu.")


def _without_version(policy: str, version: str | None) -> None:
    if version is not None:
        raise InputError(
            f"version = {version} has no effect: the rules of {policy} are the same in all versions.",
            "Leave the version out.",
        )


POLICIES: dict[str, Maker] = {
    "pytorch": _pytorch,
    "paddle-auto-growth": _auto_growth,
    "paddle-naive-best-fit": _naive_best_fit,
    "tensorflow": _tensorflow,
    "ideal": _ideal,
}
