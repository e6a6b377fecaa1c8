"""Device of offloaded tensors, and the hook that offloads activations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from memcalc.spec.spec import Spec

# The index marks memory that counts, even where device memory is emulated on the CPU.
HOST = torch.device("cpu", 0)


def saving(spec: Spec) -> AbstractContextManager[None]:
    """Return the context of the model's forward: PyTorch's save_on_cpu hooks if activations are offloaded.

    Every tensor that an operator saves is copied, including parameters; a tensor that two operators save, twice.
    """
    kind = spec.training.offload_activations
    if kind == "none":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=kind == "pinned")
