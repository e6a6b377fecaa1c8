"""The packages that the training step needs, looked for without importing them."""

from __future__ import annotations

import importlib.util

from memcalc.errors import Unavailable
from memcalc.extras import installation
from memcalc.spec.spec import Spec


def require(verb: str, spec: Spec) -> None:
    """Whether this Python has what the step of a run needs.

    Args:
        verb: of memcalc, which the message names.
        spec: the run.

    Raises:
        Unavailable: a package is missing.
    """
    require_torch(verb)
    if spec.training.implementation == "huggingface" and importlib.util.find_spec("transformers") is None:
        raise Unavailable(f"implementation = huggingface runs transformers' modules: {installation('hf')}")


def require_torch(verb: str) -> None:
    """Whether this Python has torch.

    Raises:
        Unavailable: it is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise Unavailable(f"{verb} runs the training step in PyTorch: {installation('torch')}")
