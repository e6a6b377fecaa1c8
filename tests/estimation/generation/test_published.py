"""Caches of keys and values as papers print them, and as their arithmetic says."""

import pytest

import memcalc
from memcalc.ledger.textbook import kv_cache_bytes, latent_cache_bytes


def a_token(source: str, *overrides: str) -> int:
    """Bytes of the cache of one token, in every layer together."""
    result = memcalc.estimate(source, *(overrides or ("inference.batch_size=1",)))
    assert result.generation is not None
    return result.generation.bytes_per_token


# A key and a value, of h_kv heads that are d_h wide, in l layers, of 2 bytes each; and as it was published.
PUBLISHED = {
    # NVIDIA, Mastering LLM Techniques: Inference Optimization (developer.nvidia.com/blog, November 2023), the section on
    # the cache: "with a Llama 2 7B model in 16-bit precision and a batch size of 1, the size of the KV cache will be
    # 1 * 4096 * 2 * 32 * 4096 * 2 bytes, which is ~2 GB"; of one of these 4096 tokens
    "llama-2-7b": (2 * 32 * 32 * 128 * 2, 1 * 4096 * 2 * 32 * 4096 * 2 // 4096),
    # DeepSeek-AI 2025, Insights into DeepSeek-V3 (arXiv 2505.09343), table 1, "KV Cache Per Token" in BF16: 516.096 KB,
    # 327.680 KB and 70.272 KB
    "llama-3.1-405b": (2 * 126 * 8 * 128 * 2, 516_096),
    "qwen2.5-72b": (2 * 80 * 8 * 128 * 2, 327_680),
    "deepseek-v3": (61 * (512 + 64) * 2, 70_272),
}

# Nobody's figures, but the same arithmetic: with grouped heads, and with one key/value head for all (falcon-7b).
ARITHMETIC = {
    "llama-2-13b": 2 * 40 * 40 * 128 * 2,
    "llama-3-8b": 2 * 32 * 8 * 128 * 2,
    "llama-3-70b": 2 * 80 * 8 * 128 * 2,
    "falcon-7b": 2 * 32 * 1 * 64 * 2,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_token_takes_what_was_published(preset: str) -> None:
    arithmetic, published = PUBLISHED[preset]

    assert a_token(preset) == arithmetic == published


@pytest.mark.parametrize("preset", ARITHMETIC)
def test_a_token_takes_what_its_heads_say(preset: str) -> None:
    assert a_token(preset) == ARITHMETIC[preset]


def test_opt_13b_as_in_the_paper_of_paged_attention() -> None:
    """Kwon et al. (arXiv 2309.06180) section 3: "the KV cache of a single token demands 800 KB of space, calculated as 2
    (key and value vectors) × 5120 (hidden state size) × 40 (number of layers) × 2 (bytes per FP16)", and "as much as
    1.6 GB" for a request of 2048 tokens.
    """
    opt = {
        "name": "opt-13b",
        "model": {"architecture": "opt", "l": 40, "d": 5120, "h": 40, "V": 50272, "max_position_embeddings": 2048},
        "inference": {"dtype": "fp16", "cache": "paged", "context_length": 2048},
    }
    result = memcalc.estimate(opt)
    assert result.generation is not None

    assert result.generation.bytes_per_token == 2 * 5120 * 40 * 2 == 800 * 1024
    assert result.generation.bytes_per_sequence == 2048 * 819_200 == 1_677_721_600
    # Figure 1, left: "Parameters (26GB, 65%)" of an A100 with 40 GB.
    weights = sum(row.bytes for row in result.ledger.rows if row.component == "weights")
    assert weights == pytest.approx(26e9, rel=0.015)


def test_textbook_forms_agree_with_the_ledger() -> None:
    assert a_token("llama-3-8b") == kv_cache_bytes(32, 8, 128, 1)
    assert a_token("deepseek-v3") == latent_cache_bytes(61, 512, 64, 1)
    assert a_token("llama-3-8b", "inference.cache=paged", "inference.kv_cache_dtype=fp8") == 131_072 // 2
