"""The phase of a training step in which a traceback occurred, from its frames."""

from __future__ import annotations

from collections.abc import Iterable

# The innermost frame with a phase decides: a loss is computed inside forward, a weight is gathered inside backward.
# Files and functions of PyTorch, transformers, accelerate and DeepSpeed.
_FILES = (
    ("torch/optim/", "optimizer_step"),
    ("torch/autograd/", "backward"),
    ("torch/nn/modules/loss.py", "loss"),
    ("loss_utils.py", "loss"),
    ("torch/utils/checkpoint.py", "forward"),
)
_FUNCTIONS = {
    "cross_entropy": "loss",
    "log_softmax": "loss",
    "ForCausalLMLoss": "loss",
    "backward": "backward",
    "step": "optimizer_step",
    "_apply": "model",
    "load_state_dict": "model",
    "from_pretrained": "model",
    "forward": "forward",
    "_call_impl": "forward",
}
_OUTERMOST = ("backward", "optimizer_step")  # recomputation runs forward inside backward


def phase_of(frames: Iterable[tuple[str, str]]) -> str:
    """Return "forward", "loss", "backward", "optimizer_step" or "model"; "" if the frames do not show the phase.

    Args:
        frames: file and function of each frame, outermost first.
    """
    phases = [phase for phase in (_phase(*frame) for frame in frames) if phase]
    for phase in phases:
        if phase in _OUTERMOST:
            return phase
    return phases[-1] if phases else ""


def _phase(file: str, function: str) -> str:
    path = file.replace("\\", "/")
    for part, phase in _FILES:
        if part in path:
            return phase
    return _FUNCTIONS.get(function, "")
