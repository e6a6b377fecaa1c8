"""Origin of a run: its program, how its file was read, and what the file leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.spec.limits import Limit

if TYPE_CHECKING:
    from memcalc.spec.spec import Spec


class Assumption(NamedTuple):
    """An open choice that affects the peak: neither a file, the command line nor a named framework decides it."""

    field: str  # memcalc's field that decides it, such as "training.framework"
    choice: str  # the open choice, as a noun phrase: "the program that runs the file"
    taken: str  # the assumed candidate: the one with the largest peak
    otherwise: str  # the candidate with the smallest peak
    moved_bytes: int  # difference of their allocated peaks per GPU
    peak_bytes: int  # allocated peak with the assumed candidate

    @property
    def setting(self) -> str:
        """The field's name for --set: "framework", "versions.trl"."""
        return self.field.partition(".")[2]

    @property
    def share(self) -> float:
        """Decrease of the peak with the other candidate, as a fraction of the assumed peak."""
        return self.moved_bytes / self.peak_bytes if self.peak_bytes else 0.0


class OtherCandidates(NamedTuple):
    """The runs that a file also describes: of each open choice, the largest run with each candidate not assumed."""

    of: tuple[Any, ...]  # the blocks of the run that is assumed; a run with changed blocks has other candidates
    specs: tuple[Spec, ...]


class Origin(NamedTuple):
    """Information on a run other than its fields."""

    program: str = ""  # the program and version of the run, for a headline; "": a configuration of memcalc's own
    notes: tuple[str, ...] = ()  # how another framework's file was read, for the reader of a result
    limits: tuple[Limit, ...] = ()  # requests of another framework's file that the estimate does not model
    assumptions: tuple[Assumption, ...] = ()  # open choices, the largest difference first
    others: OtherCandidates | None = None  # the runs with other answers to open choices

    def joined(self, later: Origin) -> Origin:
        """Return both origins combined, this one's notes and limits first; the later one's program takes precedence."""
        return Origin(
            later.program or self.program,
            (*self.notes, *later.notes),
            (*self.limits, *later.limits),
            (*self.assumptions, *later.assumptions),
            self.others or later.others,
        )
