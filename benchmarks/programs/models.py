"""The models that programs are drawn from: their configs are memcalc's catalogue's (benchmarks/programs/data.py)."""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    """A model of the hub.

    Args:
        hub_id: ORG/NAME.
        longest: tokens of a sequence that programs here give it.
        tokens: of a micro-batch, at most: logits of a large vocabulary fill a GPU soon.
        billions: of parameters; the host holds them while they are loaded, once a rank.
        since: the first release of transformers that has it.
    """

    hub_id: str
    longest: int
    tokens: int
    billions: float
    since: tuple[int, int] = (4, 0)


# Small enough to be trained in full on one GPU.
SMALL = (
    Model("Qwen/Qwen2.5-0.5B", 4096, 8192, 0.5),
    Model("Qwen/Qwen3-0.6B", 4096, 8192, 0.6, (4, 51)),
    Model("meta-llama/Llama-3.2-1B", 8192, 8192, 1.2),
    Model("HuggingFaceTB/SmolLM2-135M", 8192, 16384, 0.1),
    Model("HuggingFaceTB/SmolLM2-360M", 4096, 16384, 0.4),
    Model("openai-community/gpt2", 1024, 16384, 0.1),
    Model("EleutherAI/pythia-410m", 2048, 8192, 0.4),
    Model("google/gemma-2-2b", 4096, 4096, 2.6),
    Model("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 2048, 8192, 1.1),
    Model("Qwen/Qwen2.5-1.5B", 4096, 8192, 1.5),
)
# For adapters, and for shards.
LARGE = (
    Model("meta-llama/Llama-3.1-8B", 8192, 8192, 8),
    Model("Qwen/Qwen2.5-7B", 4096, 4096, 7.6),
    Model("mistralai/Mistral-7B-v0.1", 4096, 8192, 7.2),
    Model("meta-llama/Llama-3.2-3B", 4096, 8192, 3.2),
    Model("Qwen/Qwen3-4B", 4096, 4096, 4, (4, 51)),
)
