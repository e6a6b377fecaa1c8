"""What a dry run found: each process's peaks on each card, as PyTorch's own allocator counted them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memcalc.spec.cards import Card, all_cards

DONE, STOPPED, OUT_OF_MEMORY = "done", "stopped after the steps asked for", "out of memory"
TIMED_OUT, INTERRUPTED, FAILED = "timed out", "interrupted", "failed"

NOT_MODELLED = (
    "device memory of the context and loaded kernels is a stated default, and NCCL's buffers are a rule",
    "kernels compute nothing: what depends on values read back from the device may go another way on a real one",
    "cuDNN's attention is switched off: on Hopper and Blackwell flash stands for it, with 256 bytes less inside",
    "convolutions run without cuDNN's workspace; what cuSOLVER, cuSPARSE and cuFFT compute is refused",
    "processes that share a card do not see each other's memory",
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process held on one card at its highest. Bytes.

    Args:
        process: its number.
        rank: among the ranks of the run; None: it is not part of one.
        device: number of the card in its process.
        allocated_bytes: by tensors, in the allocator's blocks.
        reserved_bytes: by the caching allocator.
        device_bytes: all of it: reserved, context and loaded kernels, communication library, other libraries.
        communication_bytes: of these, NCCL's.
        retries: how often the allocator had to give back its cache to go on.
        ooms: how many requests failed.
    """

    process: int
    rank: int | None
    device: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    communication_bytes: int
    retries: int
    ooms: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one line of the program had on a card at the peak."""

    process: int
    device: int
    where: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Process:
    """One Python process of the command that imported torch.

    Args:
        number: its process id.
        rank: among the ranks of the run; None: it is not part of one.
        arguments: sys.argv.
        torch: version.
        steps: optimizer steps it took.
        failure: type and message of the exception that ended it, if one did.
        usages: its cards.
        allocations: the largest at each card's peak, if they were recorded.
        reads: values that it read back from the device: copies to the host.
        small_reads: of these, the ones small enough to be looked at rather than stored.
        unmodelled: functions of libraries that it called and that the device refused.
        masks: how many it selected by; each was taken as full.
    """

    number: int
    rank: int | None
    arguments: tuple[str, ...]
    torch: str
    steps: int
    failure: tuple[str, str] | None
    usages: tuple[Usage, ...]
    allocations: tuple[Allocation, ...]
    reads: int
    small_reads: int
    unmodelled: tuple[str, ...]
    masks: int = 0

    @property
    def died_of_memory(self) -> bool:
        """Whether an out-of-memory error ended it; also one that was passed on to a parent process."""
        if self.failure is not None:
            kind, message = self.failure
            return kind == "OutOfMemoryError" or "CUDA out of memory" in message
        return False

    @property
    def ran_out(self) -> bool:
        """Whether a request ever failed, whatever the program made of it."""
        return any(usage.ooms for usage in self.usages)


@dataclass(frozen=True, slots=True)
class DryRun:
    """A command that ran on the null device.

    Args:
        command: what was run.
        card: on which card.
        gpus: how many of it.
        outcome: how it ended.
        exit_code: the command's own; 128 + n if signal n ended it.
        seconds: how long it ran.
        processes: those that used a card, in order of rank.
        lost: processes whose last report could not be written, because the disk was full.
    """

    command: tuple[str, ...]
    card: Card
    gpus: int
    outcome: str
    exit_code: int
    seconds: float
    processes: tuple[Process, ...]
    lost: int = 0

    @property
    def usages(self) -> tuple[Usage, ...]:
        """Every process's cards."""
        return tuple(usage for process in self.processes for usage in process.usages)

    @property
    def peak(self) -> Usage | None:
        """The card that held most; None if none was used."""
        return max(self.usages, key=lambda usage: usage.device_bytes, default=None)

    @property
    def allocated_bytes(self) -> int:
        """Most that tensors held on one card."""
        return max((usage.allocated_bytes for usage in self.usages), default=0)

    @property
    def reserved_bytes(self) -> int:
        """Most that the caching allocator held on one card."""
        return max((usage.reserved_bytes for usage in self.usages), default=0)

    @property
    def device_bytes(self) -> int:
        """Most that one card held in all."""
        return max((usage.device_bytes for usage in self.usages), default=0)

    @property
    def fits(self) -> bool | None:
        """Whether the card is large enough; None if the command did not use one."""
        if self.outcome == OUT_OF_MEMORY:
            return False
        return None if self.peak is None else self.device_bytes <= self.card.usable_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """What the fullest card has to spare; None if the command did not use one, or if it ran out."""
        return None if not self.fits else self.card.usable_bytes - self.device_bytes

    @property
    def would_fit(self) -> tuple[Card, ...]:
        """Cards of the table with room for what was held here, smallest first.

        On another card the same step may hold a little more or less: workspaces and kernels differ.
        """
        if not self.fits:
            return ()
        cards = [card for card in all_cards() if card.vendor == "nvidia" and card.usable_bytes >= self.device_bytes]
        return tuple(sorted(cards, key=lambda card: card.usable_bytes))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before one believes the figures."""
        found = []
        if not self.processes:
            found.append("no process of the command used the GPU through PyTorch: nothing was measured")
        small = sum(process.small_reads for process in self.processes)
        if small:
            found.append(
                f"values were read back from the device {times(small)}: what kernels should have computed is 0 here, "
                "so where the program decides by it, it may go another way than on a real card"
            )
        masks = sum(process.masks for process in self.processes)
        if masks:
            found.append(f"elements were selected by a mask {times(masks)}: each mask was taken to select all of them")
        retries = sum(usage.retries for usage in self.usages)
        if retries:
            found.append(f"the allocator gave back its cache {times(retries)} to go on: that costs time")
        ooms = sum(usage.ooms for usage in self.usages)
        if ooms and self.outcome != OUT_OF_MEMORY:
            found.append(
                f"the card's memory ran out {times(ooms)}, and the program went on: the figures are of all of it"
            )
        unmodelled = sorted({name for process in self.processes for name in process.unmodelled})
        if unmodelled:
            found.append(f"called, and refused by the null device: {', '.join(unmodelled)}")
        by_card: dict[int, set[int]] = {}
        for usage in self.usages:
            by_card.setdefault(usage.device, set()).add(usage.process)
        shared = sorted(device for device, processes in by_card.items() if len(processes) > 1)
        if shared:
            cards = ", ".join(f"cuda:{device}" for device in shared)
            found.append(f"several processes used {cards}: each was judged as if it had the card to itself")
        return tuple(found)


def times(number: int) -> str:
    """ "once", "2 times"."""
    return "once" if number == 1 else f"{number:,} times"


def process_from_report(report: Mapping[str, Any]) -> Process:
    """A report of memcalc/nullcuda/hook/memcalc_watch.py."""
    number, rank = report["pid"], report["ranks"].get("rank")
    counts = report["counts"]
    usages = []
    for device, peaks in sorted(report["devices"].items(), key=lambda item: int(item[0])):
        if peaks["reserved_bytes"] or peaks["ooms"]:
            usages.append(
                Usage(
                    process=number,
                    rank=rank,
                    device=int(device),
                    allocated_bytes=peaks["allocated_bytes"],
                    reserved_bytes=peaks["reserved_bytes"],
                    device_bytes=peaks["device_bytes"],
                    communication_bytes=counts["communicator_bytes"],
                    retries=peaks["retries"],
                    ooms=peaks["ooms"],
                )
            )
    return Process(
        number=number,
        rank=rank,
        arguments=tuple(report["arguments"]),
        torch=report["torch"],
        steps=report["steps"],
        failure=None if report["failure"] is None else (report["failure"][0], report["failure"][1]),
        usages=tuple(usages),
        allocations=tuple(Allocation(process=number, **allocation) for allocation in report["allocations"]),
        reads=counts["reads"],
        small_reads=counts["small_reads"],
        unmodelled=tuple(report["unmodelled"]),
        masks=report["masks"],
    )
