"""Layers split by PyTorch's DTensor over ranks that are not there: what one rank holds, row by row."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.cli.app import main
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger

B, S, D, LAYERS, V = 2, 64, 128, 2, 512
SIZES = (f"l={LAYERS}", f"d={D}", "h=8", "num_key_value_heads=4", "head_dim=16", f"b={B}", f"s={S}", f"V={V}")
LLAMA = ("llama-3.2-1b", *SIZES, "intermediate_size=256", "recipe=pure")
GPT = ("gpt2", *SIZES[:3], *SIZES[5:], "recipe=mixed-20", "attention=eager", "training.dropout=0.1")
QWEN = ("qwen3-8b", *SIZES, "intermediate_size=256", "recipe=amp", "gradient_clipping=1")
SPLIT, SEQUENCE, APART = "tensor_parallel=2", "sequence_parallel=true", "loss=vocab-parallel"
SHARDED = ("engine=fsdp2", "zero_stage=3", "data_parallel=4")
STATES = (Component.WEIGHTS, Component.MASTER_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE)


def traced(*run: str, **options: Any) -> Ledger:
    return memcalc.trace(*run, steps=2, **options).result.ledger


@pytest.mark.parametrize(
    "run",
    [
        (*LLAMA, SPLIT, SEQUENCE, APART, *SHARDED),
        *(
            pytest.param(run, marks=pytest.mark.long)
            for run in (
                (*LLAMA, SPLIT),
                (*LLAMA, "tensor_parallel=4", SEQUENCE, "recompute=full"),
                (*LLAMA, SPLIT, SEQUENCE, "V=511"),  # rank 0 has the larger part
                (*GPT, SPLIT, SEQUENCE),
                (*GPT, SPLIT, "engine=fsdp2", "zero_stage=2", "data_parallel=2"),
                (*QWEN, SPLIT, SEQUENCE, *SHARDED, "data_parallel_replicate=2"),
            )
        ),
        pytest.param(
            (*QWEN, SPLIT, SEQUENCE, APART),
            marks=(
                pytest.mark.long,
                pytest.mark.xfail(strict=True, reason="131,072 bytes, V/t·d in fp32, count as gradients twice"),
            ),
        ),
    ],
    ids=" ".join,
)
def test_a_ranks_states_are_the_estimates(run: tuple[str, ...]) -> None:
    """Parameters that are split, those that every rank has, and FSDP2's shards of both."""
    held = traced(*run).components("optimizer_step_2")
    expected = memcalc.estimate(memcalc.load(*run)).ledger.components("optimizer_step_2")

    assert {state: held.get(state, 0) for state in STATES} == {state: expected.get(state, 0) for state in STATES}


def test_gathered_inputs_wait_for_backward_and_other_collectives_do_not() -> None:
    """Both norms' outputs are gathered, b·s·d of 2 bytes each; partial sums of an output are reduced, and gone."""
    ledger = traced(*LLAMA, SPLIT, SEQUENCE)
    gathered = [row for row in ledger.rows if "forward_2" in row.phases and row.module.startswith("layers.*.")]
    kept = {(row.module, row.tensor, row.count): row.bytes for row in gathered if row.tensor.endswith("cat")}

    assert kept == {(f"layers.*.{part}", "aten.cat", LAYERS): LAYERS * 2 * B * S * D for part in ("attention", "mlp")}
    assert ledger.components("forward_2")[Component.COMMUNICATION_BUFFERS] > 0


@pytest.mark.parametrize(
    ("ranks", "sequence"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.long), pytest.param(4, True, marks=pytest.mark.long)],
)
def test_what_dtensor_keeps_beyond_megatrons_formulas(ranks: int, sequence: bool) -> None:
    """Gathered inputs of attention, MLP and head whole, where Megatron keeps a part of each; and all logits."""
    run = (*LLAMA, f"tensor_parallel={ranks}", f"sequence_parallel={sequence}")
    kept = traced(*run).components("loss_2")
    result = memcalc.estimate(memcalc.load(*run))
    expected = result.ledger.components("loss_2")

    inputs = 2 * B * S * D * (ranks - 1) // ranks if sequence else 0
    # Cosines and sines of 16 bf16 each a position, and each kernel's seed and offset: temporaries in the estimate.
    named_otherwise = 2 * 2 * S * 16 + LAYERS * (16 + 8)
    more = kept[Component.ACTIVATIONS] - expected[Component.ACTIVATIONS] - named_otherwise
    assert more == LAYERS * 2 * inputs
    # Logits of 2 bytes, their fp32 copy and its logarithms of 4 each; the loss and its weight, 4 bytes each.
    logits = (2 + 4 + 4) * B * S * V * (ranks - 1) // ranks
    assert kept[Component.LOGITS_AND_LOSS] - expected[Component.LOGITS_AND_LOSS] == logits + inputs + 8
    assert any("DTensor" in line for line in result.not_modelled)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("num_key_value_heads=1",), "its 1 key/value heads are split evenly, or not at all"),
        (("data_parallel=2",), "DistributedDataParallel takes no parameters that are split: set engine fsdp2"),
        (("position_embedding=alibi", "attention=eager"), "ALiBi's slopes differ from head to head"),
        (("embedding_size=64",), "embeddings of their own width have no place in the plan"),
        (("qk_norm=true", "qk_norm_width=all-heads"), "a norm of queries and keys over all-heads spans the ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=f"tensor_parallel = 2 cannot be run: .*{message}"):
        memcalc.trace(*LLAMA, SPLIT, *given)


def test_experts_are_not_split() -> None:
    with pytest.raises(InputError, match="tensor_parallel = 2 cannot be run: routed experts are not split"):
        memcalc.trace("mixtral-8x7b", "l=1", SPLIT)


def test_the_world_is_groups_of_ranks_that_split_layers(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [word for override in (*LLAMA[1:], SPLIT) for word in ("--set", override)]

    assert main(["trace", LLAMA[0], *overrides, "--world-size", "5"]) == 2
    assert "--world-size 5 is no multiple of tensor_parallel = 2" in capsys.readouterr().err
