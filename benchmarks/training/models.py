"""Models of the runs: Hugging Face's modules, from configs of published sizes, on the device or wherever asked."""

from __future__ import annotations

import torch
import transformers

# huggingface.co/openai-community/gpt2, huggingface.co/meta-llama/Llama-3.2-1B, and eight layers of Llama-65B's
CONFIGS = {
    "gpt2": transformers.GPT2Config(),
    "llama": transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "wide": transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=22016,
        num_hidden_layers=8,
        num_attention_heads=64,
        max_position_embeddings=2048,
    ),
}
SIZES = {"gpt2": (8, 1024), "llama": (1, 2048), "wide": (1, 2048)}  # micro-batch, tokens


def make(kind: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.nn.Module:
    """The model, with random weights."""
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    torch.set_default_dtype(torch.float32)
    return model.train()


def blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Its layers."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def tokens(kind: str, micro_batch: int | None = None) -> torch.Tensor:
    """Inputs, which are labels too."""
    b, s = SIZES[kind]
    return torch.randint(32000, (micro_batch or b, s), device="cuda")
