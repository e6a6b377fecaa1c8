"""In which part of a training step a traceback was, as far as its frames tell."""

from __future__ import annotations

from collections.abc import Iterable

# The innermost telling frame decides: a loss is computed inside forward, a gathered weight inside backward.
# Words of files and functions of PyTorch, transformers, accelerate and DeepSpeed.
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
_OUTERMOST = ("backward", "optimizer_step")  # forward runs inside backward where it is recomputed


def phase_of(frames: Iterable[tuple[str, str]]) -> str:
    """ "forward", "loss", "backward", "optimizer_step" or "model"; "" where the frames do not tell.

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
