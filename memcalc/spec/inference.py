"""The inference block: generation in place of a training step, and its forward pass as a training block."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.errors import InputError
from memcalc.spec.model import ConfigBlock, Count, Size
from memcalc.spec.model_families.conversion import attends_eagerly
from memcalc.spec.recipes import Dtype
from memcalc.spec.training import Attention, TorchVersion

Cache = Literal["dynamic", "static", "paged"]
CacheDtype = Literal["compute", "fp8"]
Quantization = Literal["none", "nf4", "fp4"]

Program = Literal["generate", "loop"]

DEFAULT_CONTEXT = 2048  # tokens, if the model's positions allow them
DEFAULT_NEW_TOKENS = 128
DEFAULT_BLOCK = 16  # default of vLLM's block_size (vllm/config/cache.py)


class InferenceSpec(ConfigBlock):
    """Generation: prefill of a prompt, then decoding of tokens one at a time, with a KV cache."""

    batch_size: Size = Field(1, description="sequences at once, in each replica")
    prompt_length: Size = Field(description="tokens of each prompt; default: context_length - new_tokens")
    new_tokens: Count = Field(DEFAULT_NEW_TOKENS, description="tokens to generate, one per forward")
    context_length: Size = Field(
        description="tokens a sequence has in the cache at the end; default: prompt_length + new_tokens, else "
        "min(2048, max_position_embeddings)"
    )
    dtype: Dtype = Field("bf16", description="dtype of weights and activations")
    quantization: Quantization = Field("none", description="4-bit linear layers: none | nf4 | fp4 (bitsandbytes)")
    compute_dtype: Dtype | None = Field(
        None,
        description="dtype in which 4-bit layers multiply (bnb_4bit_compute_dtype); default: fp32, as in transformers' "
        "BitsAndBytesConfig; with a paged cache as dtype",
    )
    cache: Cache = Field(
        "dynamic", description="dynamic (grows by copying) | static (one size, transformers) | paged (blocks, vLLM)"
    )
    kv_cache_dtype: CacheDtype = Field(
        "compute", description="dtype of keys and values: compute (as dtype) | fp8 (paged)"
    )
    block_size: Size | None = Field(None, description="tokens of a block of a paged cache; default: 16")
    prefill_chunk: Size | None = Field(None, description="tokens of the prompt in one forward; default: all of it")
    implementation: Literal["plain", "huggingface"] = Field(
        description="implementation of the modules; default: plain for a paged cache, else huggingface"
    )
    program: Program = Field(
        "generate",
        description="generate of transformers, which keeps positions and the scores of the last token, or a loop that "
        "feeds tokens to the model",
    )
    attention: Attention = Field(
        description="attention kernel: eager, or the one that PyTorch's sdpa prefers; it takes another one where its "
        "arguments rule that out; default: as for training of the family, flash for most"
    )
    torch_version: TorchVersion = Field("v2.13", description="PyTorch version: workspaces, fused norms")

    @property
    def matmul_dtype(self) -> Dtype:
        """Dtype in which 4-bit layers multiply (transformers 5.23 utils/quantization_config.py, BitsAndBytesConfig)."""
        return self.compute_dtype or (self.dtype if self.cache == "paged" else "fp32")

    @property
    def block(self) -> int:
        """Tokens per block of a paged cache; 1 for other caches."""
        return (self.block_size or DEFAULT_BLOCK) if self.cache == "paged" else 1

    @property
    def chunk(self) -> int:
        """Most tokens of a prompt in one forward."""
        return min(self.prefill_chunk or self.prompt_length, self.prompt_length)


def default_inference(inference: dict[str, Any], model: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the block with its derived defaults; validation rejects values of a wrong type.

    Raises:
        InputError: prompt, new tokens and context are given and inconsistent.
    """
    filled = dict(inference)
    filled.setdefault("implementation", "plain" if filled.get("cache") == "paged" else "huggingface")
    positions = model.get("max_position_embeddings", DEFAULT_CONTEXT)
    prompt, made, context = (filled.get(name) for name in ("prompt_length", "new_tokens", "context_length"))
    if not all(value is None or type(value) is int for value in (prompt, made, context, positions)):
        filled.setdefault("prompt_length", 1)
        filled.setdefault("context_length", 1)
        return filled
    if made is None:
        made = _new_tokens(prompt, context, positions)
    if prompt is None:
        prompt = (context or min(DEFAULT_CONTEXT, positions)) - made
    if context is None:
        context = prompt + made
    if prompt < 1 or prompt + made != context:
        raise InputError(
            f"context_length = {context} with new_tokens = {made}"
            + (f" and prompt_length = {prompt}." if prompt > 0 else " leaves no token for the prompt."),
            "The context is the prompt and the new tokens: leave one of the three out to have it computed.",
            where,
        )
    return filled | {"prompt_length": prompt, "new_tokens": made, "context_length": context}


def _new_tokens(prompt: int | None, context: int | None, positions: int) -> int:
    """Return the new tokens that the context leaves; at most the default if the prompt is omitted."""
    if prompt is not None and context is not None:
        return max(context - prompt, 0)
    if prompt is not None:
        return DEFAULT_NEW_TOKENS
    return min(DEFAULT_NEW_TOKENS, (context or positions) // 2)


def forward_of(inference: dict[str, Any]) -> dict[str, Any]:
    """Return the forward pass as a training block: its sizes, dtypes and kernels; nothing is trained."""
    dtype = inference.get("dtype", "bf16")
    chunk, prompt = inference.get("prefill_chunk"), inference["prompt_length"]
    return {
        "micro_batch_size": inference.get("batch_size", 1),
        "sequence_length": min(chunk, prompt) if type(chunk) is int and type(prompt) is int else prompt,
        "dtype": dtype,
        "recipe": "fp32" if dtype == "fp32" else "pure",
        "implementation": inference["implementation"],
        **({} if inference.get("attention") is None else {"attention": inference["attention"]}),
        "torch_version": inference.get("torch_version", "v2.13"),
        "dropout": 0.0,
        "optimizer": "sgd",
    }


def attention_of_generation(training: dict[str, Any], model: dict[str, Any]) -> str:
    """Return the default attention kernel: that of a training step, unless this counts eager attention for sdpa."""
    kernel = str(training.get("attention", "flash"))
    alone = attends_eagerly(model.get("architecture"), training["implementation"])
    return "flash" if kernel == "eager" and not alone else kernel
