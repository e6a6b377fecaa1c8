"""A run of a pipeline stage: its schedule orders the passes of several micro-batches."""

from __future__ import annotations

from abc import abstractmethod

from memcalc.simulation.simulated_run import SimulatedRun


class ScheduledRun(SimulatedRun):
    """Recorder of a run in which a schedule orders forward, loss and backward of a step's micro-batches."""

    number = ""  # of the step

    def _run(self, phase: str) -> None:
        kind, _, number = phase.rpartition("_")
        if kind == "forward":
            self.number = number
            self._play_schedule()
            self.requests.begin(phase)
        elif kind not in ("loss", "backward"):
            super()._run(phase)

    @abstractmethod
    def _play_schedule(self) -> None:
        """Run the passes of all micro-batches of the step."""
