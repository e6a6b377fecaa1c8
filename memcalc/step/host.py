"""Where what is offloaded lies, and what offloads the activations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from memcalc.spec.spec import Spec

# With its index: whoever names it so means memory that counts, also where that of the device is only played.
HOST = torch.device("cpu", 0)


def saving(spec: Spec) -> AbstractContextManager[None]:
    """To be entered around the model's forward: PyTorch's own hooks, if what it saves is the host's.

    Every tensor that an operator saves is copied, parameters among them; what two operators save, twice.
    """
    kind = spec.training.offload_activations
    if kind == "none":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=kind == "pinned")
