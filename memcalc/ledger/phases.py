"""The phases of a training run, in order; the ledger has one peak for each."""

from __future__ import annotations

SETUP_PHASES = ("model", "optimizer", "input")
STEP_PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer_step")


def phase_names(steps: int) -> tuple[str, ...]:
    """Return all phases of a run of `steps` optimizer steps.

    They are "model", "optimizer", "input", "zero_grad_1", ..., "optimizer_step_<steps>".
    """
    return SETUP_PHASES + tuple(f"{phase}_{step}" for step in range(1, steps + 1) for phase in STEP_PHASES)
