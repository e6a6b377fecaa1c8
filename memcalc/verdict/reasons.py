"""The reason for a run's peak, and the cheapest single change that would make it fit."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.errors import InputError
from memcalc.estimation.host_memory import host_rows
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import Result
from memcalc.ledger.row_drafts import PHASES
from memcalc.spec.hardware.interconnect import system_of
from memcalc.spec.spec import Spec
from memcalc.suggestions.candidates import SAME, candidates
from memcalc.suggestions.run_overrides import UserRun, written_out
from memcalc.verdict.judge import fits

WORTH_SAYING = 0.1  # fraction of the peak: smaller temporaries are not reported


class Remedy(NamedTuple):
    """A change that makes a run fit.

    Args:
        overrides: as --set takes them.
        device_bytes: device memory of a GPU with the change.
        cost: in time or money.
        host_bytes: host memory of a rank.
        node_host_bytes: host memory of all ranks of a node.
    """

    overrides: tuple[str, ...]
    device_bytes: int
    cost: str
    host_bytes: int
    node_host_bytes: int


class Reason(NamedTuple):
    """The reason for the peak. Bytes.

    Args:
        phase: of the peak.
        largest: the largest components at the peak.
        lists: temporaries of the optimizer's foreach update, if they are a large part of the peak; otherwise 0.
        fragmented: reserved memory beyond the peak, if only that makes the run exceed its GPU; otherwise 0.
        remedy: the cheapest single change that keeps the result of training and makes the run fit.
    """

    phase: str
    largest: tuple[tuple[Component, int], ...]
    lists: int
    fragmented: int
    remedy: Remedy | None


def reason_of(result: Result) -> Reason:
    """Return the reason for a training run's verdict, with a remedy if the run does not or may not fit."""
    ledger, spec, verdict = result.ledger, result.spec, result.decision
    parts = ledger.components(ledger.peak_phase)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    temporaries = parts.get(Component.TEMPORARIES, 0)
    in_lists = spec.training.optimizer_implementation == "foreach" and ledger.peak_phase.startswith("optimizer_step")
    lists = temporaries if in_lists and temporaries >= WORTH_SAYING * ledger.peak_bytes else 0
    fragmented = 0
    if verdict is not None and (result.headroom_bytes or 0) < 0:
        outside = result.headline.outside
        around = outside.device_context + outside.communication_library
        fragmented = outside.cached_segments if ledger.peak_bytes + around <= verdict.limit_bytes else 0
    wanted = verdict is not None and verdict.answer != "fits" and not verdict.unmodelled
    return Reason(
        ledger.peak_phase, tuple(ordered[:2]), lists, fragmented, remedy_of(written_out(spec)) if wanted else None
    )


def remedy_of(run: UserRun, limit: int | None = None) -> Remedy | None:
    """Return the cheapest single change with which a run fits; None if none that keeps the training result does.

    Args:
        run: the run.
        limit: bytes of a GPU that it may use; None: the usable memory of its GPU.
    """
    for candidate in candidates(run.spec):
        if candidate.result != SAME:
            continue
        try:
            changed = run.changed(candidate.overrides)
            verdict = fits(changed, limit)
        except InputError:
            continue
        if verdict is not None and verdict.device_bytes is not None:
            return Remedy(candidate.overrides, verdict.device_bytes, candidate.cost, *host_bytes(changed))
    return None


def host_bytes(spec: Spec) -> tuple[int, int]:
    """Return the peak host memory of a rank, and of all ranks of a node, in bytes."""
    gpu = spec.gpu
    held = max(
        (Ledger((rows,), PHASES).peak_bytes for stage in stages_of(spec) if (rows := host_rows(spec, stage))), default=0
    )
    node = 1 if gpu is None else min(system_of(gpu).node, spec.parallelism.ranks)
    return held, held * node
