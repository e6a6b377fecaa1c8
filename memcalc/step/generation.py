"""Generation with the modules of transformers, in the phases at which memory is evaluated.

Tokens are fed as in greedy `generate` of transformers: one forward for the prompt, then one per token, with an fp32
copy of the last position's logits. Between the first and the last new token a dynamic cache only grows. That growth
is allocated in one step instead of running the tokens between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from memcalc.ledger.component import Component
from memcalc.spec.spec import Spec
from memcalc.step.causal_lm import CausalLM, build_base
from memcalc.step.huggingface import one_sequence_a_row
from memcalc.step.loop import Observer
from memcalc.step.reference.attention import CUDA_BACKENDS


def placed(module: Any, device: torch.device) -> Any:
    """Allocate a transformers model from the meta device on this device; tied weights share one tensor."""
    module.tie_weights()
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the original stays referenced, so its id is unique

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, torch.empty_like(tensor, device=device)
        return made[id(tensor)][1]

    module._apply(like)  # noqa: SLF001 -- as in to_empty, which does not keep weights tied
    module.tie_weights()  # each name has a separate parameter now
    return module


class GenerationRun:
    """Prefill of prompts and generation of tokens on one device.

    Args:
        spec: a run with an `inference:` block, with modules and caches of transformers.
        device: any device that PyTorch can compute on.
    """

    engine: str | None = None  # one rank
    optimizer: torch.optim.Optimizer | None = None  # no training

    def __init__(self, spec: Spec, device: torch.device) -> None:
        assert spec.inference is not None
        self.spec = spec
        self.asked = spec.inference
        self.device = device
        self.model: CausalLM | None = None
        self.tokens: Tensor | None = None
        self.cache: Any = None

    def execute(self, steps: int, observer: Observer) -> None:  # noqa: ARG002 -- the signature of all runs
        """Build everything, prefill the prompts, and generate the first and the last token."""
        asked = self.asked
        with torch.no_grad():
            with observer.phase("model"):
                # from_pretrained also builds on the meta device and allocates weights when they are loaded.
                self.model = build_base(self.spec, torch.device("meta"), self.device)
                module = placed(self.model.module, self.device).eval()
            with observer.phase("input"):
                self.tokens = torch.zeros(asked.batch_size, asked.prompt_length, dtype=torch.long, device=self.device)
                self.cache = self._new_cache(module.config)
            with self._surroundings():
                with observer.phase("prefill"):
                    following = self._forward(module, self.tokens)
                with observer.phase("decode_1"):
                    following = self._forward(module, following)
                if asked.new_tokens > 1:
                    with observer.phase("decode_last"):
                        self._grow(asked.new_tokens - 2)
                    with observer.phase("decode_last"):
                        self._forward(module, following)

    def _new_cache(self, config: Any) -> Any:
        if self.asked.cache == "static":
            return transformers.StaticCache(config=config, max_cache_len=self.asked.context_length)
        return transformers.DynamicCache(config=config)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Restrict attention to the requested kernel; if a mask rules out flash, to PyTorch's alternative."""
        attention = self.asked.attention
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        choice: AbstractContextManager[None] = sdpa_kernel(
            [CUDA_BACKENDS["memory-efficient"], SDPBackend.MATH] if attention == "memory-efficient" else kernels
        )
        with one_sequence_a_row(), choice:
            yield

    def _forward(self, module: Any, tokens: Tensor) -> Tensor:
        """Run forward and return the next token (transformers 5.23 generation/utils.py, GenerationMixin._sample)."""
        outputs = module(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32)
        return torch.argmax(logits, dim=-1)[:, None]

    def _grow(self, tokens: int) -> None:
        """Grow a dynamic cache by a number of tokens; a static cache has its full size from the start."""
        if self.asked.cache == "static" or tokens < 1:
            return
        for layer in self.cache.layers:
            window = getattr(layer, "sliding_window", None)
            if window is not None:
                layer.cumulative_length += tokens
            for name in ("keys", "values"):
                before = getattr(layer, name)
                length = before.shape[-2] + tokens
                if window is not None:  # DynamicSlidingWindowLayer.update keeps the tokens that the next one attends to
                    length = max(min(length, window - 1), before.shape[-2])
                if length > before.shape[-2]:
                    shape = (*before.shape[:-2], length, before.shape[-1])
                    setattr(layer, name, torch.empty(shape, dtype=before.dtype, device=before.device))

    def tensors_by_component(self) -> dict[Component, list[Tensor]]:
        """Return the tensors of known component, by component."""
        found: dict[Component, list[Tensor]] = {}
        if self.model is not None:
            module = self.model.module
            found[Component.WEIGHTS] = [*module.parameters(), *module.buffers()]
        if self.tokens is not None:
            found[Component.INPUTS] = [self.tokens]
        if self.cache is not None:
            kept = (getattr(layer, name, None) for layer in self.cache.layers for name in ("keys", "values"))
            found[Component.KV_CACHE] = [tensor for tensor in kept if isinstance(tensor, Tensor)]
        return found
