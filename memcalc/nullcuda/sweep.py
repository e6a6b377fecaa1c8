"""A command at several micro-batch sizes: the largest that fits its GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Unpack

from memcalc.errors import InputError
from memcalc.nullcuda.dry_run import run
from memcalc.nullcuda.options import Options
from memcalc.nullcuda.result import DONE, OUT_OF_MEMORY, STOPPED, DryRun
from memcalc.spec.hardware.gpus import GpuSpec, find_gpu
from memcalc.units import largest_that_fits

LARGEST = 1 << 16  # micro-batch; a command that still fits then ignores the flag

Progress = Callable[[int, DryRun], None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A command at several micro-batch sizes."""

    flag: str  # the option of the command that sets the size
    gpu: GpuSpec  # the GPU
    runs: tuple[tuple[int, DryRun], ...]  # size and result of each run, smallest size first

    @property
    def largest(self) -> int | None:
        """The largest tried size that fits; None: none fits."""
        return max((size for size, found in self.runs if fits(found)), default=None)

    @property
    def failed(self) -> DryRun | None:
        """The run that ended for another reason than memory, if any."""
        return next((found for _, found in self.runs if found.outcome not in {DONE, STOPPED, OUT_OF_MEMORY}), None)


def sweep(
    command: Sequence[str],
    gpu: str,
    flag: str,
    *,
    sizes: Sequence[int] = (),
    gpus: int = 1,
    timeout: float | None = None,
    stdout: int | IO[str] | None = None,
    progress: Progress = lambda *_: None,
    **options: Unpack[Options],
) -> Sweep:
    """Run a command at several micro-batch sizes, or search for the largest that fits.

        memcalc.nullcuda.sweep([sys.executable, "train.py"], "h100-80gb", "--batch-size", steps=2).largest

    Args:
        command: as for `run`.
        gpu: as for `run`.
        flag: the command's option for the size, e.g. "--batch-size", or "train.batch_size" for `train.batch_size=8`.
            Its value in the command is replaced; if it is absent, it is appended.
        sizes: sizes to run; (): powers of two until one does not fit, then bisection.
        gpus: as for `run`.
        timeout: seconds for each run.
        stdout: as for `run`.
        progress: called after each run with its size and result.
        options: see `memcalc.nullcuda.options.Options`.

    Raises:
        InputError: the GPU or the command does not exist, or a size is invalid.
        Unavailable: a requirement of the null device is missing.
    """
    if any(size < 1 for size in sizes):
        raise InputError(f"micro-batch sizes {list(sizes)}: each must be 1 or more.", "", "--micro-batches")
    found: dict[int, DryRun] = {}

    def fits_at(size: int) -> bool:
        words = with_micro_batch(command, flag, size)
        found[size] = run(words, gpu, gpus=gpus, timeout=timeout, stdout=stdout, **options)
        progress(size, found[size])
        return fits(found[size])

    if sizes:
        for size in sorted(set(sizes)):
            fits_at(size)
    else:
        largest_that_fits(fits_at, LARGEST)
    return Sweep(flag, find_gpu(gpu), tuple(sorted(found.items())))


def fits(found: DryRun) -> bool:
    """Return whether a run completed and fits the GPU."""
    return found.outcome in {DONE, STOPPED} and bool(found.fits)


def with_micro_batch(command: Sequence[str], flag: str, size: int) -> tuple[str, ...]:
    """Return the command with the flag set to a size, in the form in which the command has it."""
    words = list(command)
    for place, word in enumerate(words):
        if word.startswith(f"{flag}="):
            words[place] = f"{flag}={size}"
            return tuple(words)
        if word == flag and place + 1 < len(words):
            words[place + 1] = str(size)
            return tuple(words)
    return (*words, flag, str(size)) if flag.startswith("-") else (*words, f"{flag}={size}")
