"""Random runs of every engine and implementation are estimated and judged, and their rows sum to the total."""

from __future__ import annotations

import random

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.spec.recipes import RECIPES
from memcalc.spec.spec import Spec

MODELS = ("llama-3-8b", "llama-2-7b", "llama-3.2-1b", "qwen3-8b", "gpt2-medium", "mixtral-8x7b", "qwen3-30b-a3b")
# The training step, and the ranks: one of each.
STEPS = (
    "implementation=plain",
    "implementation=huggingface",
    "implementation=torchtitan",
    "implementation=torchtitan dtype=fp32",
    "implementation=megatron",
    "implementation=plain finetune=lora",
    "implementation=huggingface finetune=qlora",
    "framework=torchtune implementation=plain finetune=qlora recipe=pure",
)
ENGINES = (
    "engine=ddp",
    "engine=fsdp1 zero_stage=3",
    "engine=fsdp2 zero_stage=2",
    "engine=fsdp2 zero_stage=3",
    "engine=deepspeed zero_stage=1",
    "engine=deepspeed zero_stage=2",
    "engine=deepspeed zero_stage=3",
    "engine=megatron zero_stage=1",
)
VERDICTS = ("fits", "does-not-fit", "unknown")


def drawn(lot: random.Random) -> Spec | None:
    """Return a small model on random ranks; None: these settings do not go together."""
    tensor = lot.choice([1, 1, 1, 2, 4])
    words = [
        *lot.choice(STEPS).split(),
        *lot.choice(ENGINES).split(),
        f"num_layers={lot.choice([2, 4, 6])}",
        f"s={lot.choice([64, 256, 1024])}",
        f"b={lot.choice([1, 2, 3])}",
        f"data_parallel={lot.choice([1, 2, 4])}",
        f"tensor_parallel={tensor}",
        f"context_parallel={lot.choice([1, 1, 1, 2, 4])}",
        f"recompute={lot.choice(['none', 'full', 'selective', 'every-2'])}",
        f"gradient_accumulation_steps={lot.choice([1, 2, 5])}",
    ]
    if tensor > 1:
        words += ["sequence_parallel=true", f"loss={lot.choice(['vocab-parallel', 'materialized'])}"]
    optional = {
        f"recipe={lot.choice([*RECIPES])}": 0.4,
        f"optimizer={lot.choice(['sgd', 'adam', 'adam-8bit', 'adafactor', 'muon'])}": 0.3,
        "tie_word_embeddings=false": 0.5,
        "gradient_clipping=1.0": 0.2,
        f"bucket_cap_mb={lot.choice([1, 100])}": 0.2,
        "evaluation_batch_size=3": 0.1,
        f"expert_parallel={lot.choice([2, 4])}": 0.15,
    }
    words += [word for word, share in optional.items() if lot.random() < share]
    try:
        return memcalc.load(lot.choice(MODELS), *words, gpu=lot.choice(["h100-80gb", "rtx4090", "t4"]))
    except InputError:
        return None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 16))])
def test_runs_are_judged(seed: int) -> None:
    """Whatever they are: only a configuration that is rejected has no answer."""
    lot = random.Random(seed)
    valid = [spec for _ in range(1500) if (spec := drawn(lot)) is not None][:50]
    assert len(valid) >= 40
    for spec in valid:
        result = memcalc.estimate(spec)
        for ledger in (result.ledger, result.replayed.ledger):
            phase = ledger.peak_phase
            assert sum(row.bytes for row in ledger.rows if phase in row.phases) == ledger.totals[phase], spec
        assert result.verdict in VERDICTS, spec
