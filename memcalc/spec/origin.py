"""Where a run comes from: whose program it is, how its file was read, and what the file leaves open."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.limits import Limit


class Assumption(NamedTuple):
    """Something that neither a file, nor the command line, nor a named framework settles, and that moves the peak.

    Args:
        field: our field that settles it, such as "training.framework".
        what: what is open, as a noun phrase: "the program that runs the file".
        taken: the candidate that is counted, which is the one with the largest peak.
        otherwise: the candidate with the smallest peak.
        moved_bytes: the difference of their allocated peaks per GPU.
        peak_bytes: the allocated peak with the candidate that is counted.
    """

    field: str
    what: str
    taken: str
    otherwise: str
    moved_bytes: int
    peak_bytes: int

    @property
    def setting(self) -> str:
        """The name of the field that settles it, as --set takes it: "framework", "versions.trl"."""
        return self.field.partition(".")[2]

    @property
    def share(self) -> float:
        """How much smaller the peak would be otherwise, as a fraction of the peak that is counted."""
        return self.moved_bytes / self.peak_bytes if self.peak_bytes else 0.0


class Origin(NamedTuple):
    """What is known of a run beside its fields.

    Args:
        program: the program and version whose run this is, as a headline names it; "": our own description of a run.
        notes: what was said while it was read, for the reader of a result: how another framework's file was understood.
        limits: what another framework's file asks for and the estimate does not model.
        assumptions: what the file leaves open, the largest difference first.
    """

    program: str = ""
    notes: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    assumptions: tuple[Assumption, ...] = ()

    def joined(self, later: Origin) -> Origin:
        """Both, this one's notes and limits first; the program of the later one where it names one."""
        return Origin(
            later.program or self.program,
            (*self.notes, *later.notes),
            (*self.limits, *later.limits),
            (*self.assumptions, *later.assumptions),
        )
