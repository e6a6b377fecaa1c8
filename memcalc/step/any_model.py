"""Any class of transformers that a config.json names under `architectures`, built with random weights.

The batch is made from the configuration (`model_inputs.py`) or given by the user. Forward computes the loss, as in
transformers' Trainer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from memcalc.spec.model_families.transformers_fallback import DIFFUSERS, architecture_of
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec
from memcalc.step.causal_lm import CausalLM
from memcalc.step.dtypes import weight_dtype
from memcalc.step.huggingface import foreign_config, one_sequence_a_row, switch_recompute
from memcalc.step.model_inputs import batch_for
from memcalc.step.module_run import default_loss
from memcalc.step.reference.attention import CPU_BACKENDS
from memcalc.step.unsupported import stopped

# PyTorch's preferred backends, in its order; a mask or a dtype can rule out flash.
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def build_any(spec: Spec, place: torch.device, device: torch.device) -> CausalLM:
    """Return the class that the spec's config.json names, with weights on `place`, to be run on `device`.

    Raises:
        InputError: the code of transformers fails, or it does not support the requested settings.
    """
    training, text = spec.training, spec.model.transformers_config
    assert text is not None
    if DIFFUSERS in json.loads(text):
        from memcalc.step.diffusion import build_diffusion

        return build_diffusion(spec, place, device)
    config = foreign_config(spec.model)
    kind = getattr(transformers, architecture_of(text) or "")
    # Without attn_implementation transformers uses sdpa if the class supports it.
    kernel = {"attn_implementation": "eager"} if training.attention == "eager" else {}
    with place:
        try:
            module = kind._from_config(config, dtype=weight_dtype(training), **kernel)  # noqa: SLF001 -- as AutoModel.from_config
        except Exception as error:
            raise stopped(spec, error) from error
    module.train()
    switch_recompute(module, spec)

    def loss(output: Any, _: Tensor) -> Tensor:
        return default_loss(output)

    return CausalLM(
        module,
        lambda batch: module(**batch),
        loss,
        partial(attention_backends, training, device),
        batch=lambda: batch_for(module, training, weight_dtype(training)),
    )


@contextmanager
def attention_backends(training: TrainingSpec, device: torch.device) -> Iterator[None]:
    """Restrict the attention backends of PyTorch; flash comes first if nothing rules it out."""
    backends = FUSED[1:] if training.attention == "memory-efficient" else FUSED
    kernels = sdpa_kernel(backends if device.type == "cuda" else CPU_BACKENDS)
    with one_sequence_a_row(), nullcontext() if training.attention == "eager" else kernels:
        yield
