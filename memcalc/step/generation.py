"""Generation with transformers' modules, cut into the phases that memory is evaluated at.

Tokens are fed as transformers' `generate` does it greedily: one forward for the prompt, then one a token, of the last
position's logits an fp32 copy. Between the first and the last new token a dynamic cache only grows, and its growth is
made up for in one go: what the tokens between would leave behind.
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
from memcalc.step.attention import CUDA_BACKENDS
from memcalc.step.causal_lm import CausalLM, build_base
from memcalc.step.huggingface import one_sequence_a_row
from memcalc.step.loop import Observer
from memcalc.step.sizes import sizes_of


def placed(module: Any, device: torch.device) -> Any:
    """A model of transformers on the meta device, with memory on this one; what is tied has one."""
    module.tie_weights()
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: a tensor, kept so that no other gets it, and its like

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, torch.empty_like(tensor, device=device)
        return made[id(tensor)][1]

    module._apply(like)  # noqa: SLF001 -- as to_empty does, which forgets what is tied
    module.tie_weights()  # each name has a parameter of its own now
    return module


class GenerationRun:
    """Prompts read, and tokens made, on one device.

    Args:
        spec: with an `inference:` block, of transformers' modules and caches.
        device: any that PyTorch can compute on.
    """

    engine: str | None = None  # one rank
    optimizer: torch.optim.Optimizer | None = None  # nothing trains

    def __init__(self, spec: Spec, device: torch.device) -> None:
        assert spec.inference is not None
        self.spec = spec
        self.asked = spec.inference
        self.device = device
        self.model: CausalLM | None = None
        self.tokens: Tensor | None = None
        self.cache: Any = None

    def execute(self, steps: int, observer: Observer) -> None:  # noqa: ARG002 -- of all runs
        """Build everything, read the prompts, make the first token and the last."""
        asked = self.asked
        with torch.no_grad():
            with observer.phase("model"):
                # As from_pretrained builds it: no weight exists before it is loaded.
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
        """The kernel that is asked for; where a mask keeps flash from running, what PyTorch takes instead."""
        attention = self.asked.attention
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        choice: AbstractContextManager[None] = sdpa_kernel(
            [CUDA_BACKENDS["memory-efficient"], SDPBackend.MATH] if attention == "memory-efficient" else kernels
        )
        with one_sequence_a_row(), choice:
            yield

    def _forward(self, module: Any, tokens: Tensor) -> Tensor:
        """One forward, and the token that follows (transformers 5.23 generation/utils.py, GenerationMixin._sample)."""
        outputs = module(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits = outputs.logits[:, -1, :].to(copy=True, dtype=torch.float32)
        return torch.argmax(logits, dim=-1)[:, None]

    def _grow(self, tokens: int) -> None:
        """A dynamic cache as it is so many tokens later; a static one is as large from the start."""
        if self.asked.cache == "static" or tokens < 1:
            return
        for layer in self.cache.layers:
            window = getattr(layer, "sliding_window", None)
            if window is not None:
                layer.cumulative_length += tokens
            for name in ("keys", "values"):
                before = getattr(layer, name)
                length = before.shape[-2] + tokens
                if window is not None:  # DynamicSlidingWindowLayer.update keeps what the next token can see
                    length = max(min(length, window - 1), before.shape[-2])
                if length > before.shape[-2]:
                    shape = (*before.shape[:-2], length, before.shape[-1])
                    setattr(layer, name, torch.empty(shape, dtype=before.dtype, device=before.device))

    def sizes(self) -> tuple[int, int, int]:
        """Parameters of the model, those that are trained, and elements of its buffers."""
        return (0, 0, 0) if self.model is None else sizes_of(self.model.module)

    def held(self) -> dict[Component, list[Tensor]]:
        """The tensors that can be named now."""
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
