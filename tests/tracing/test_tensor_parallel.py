"""Layers split by PyTorch's DTensor over simulated ranks: the memory of one rank, row by row."""

from __future__ import annotations

import re
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
    found: Ledger = memcalc.trace(*run, steps=2, **options).result.ledger
    return found


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
                (*QWEN, SPLIT, SEQUENCE, APART),
            )
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


def test_a_tables_gradient_is_whole_on_every_rank_unless_it_is_tied() -> None:
    """V·d where the rank's rows are V/t·d: with fp32 gradients 4·512·128 = 262,144 bytes, not 131,072."""
    run = (*QWEN, SPLIT, SEQUENCE, APART)
    for ledger in (traced(*run), memcalc.estimate(memcalc.load(*run)).ledger):
        tables = {
            row.bytes
            for row in ledger.rows
            if row.component is Component.GRADIENTS and row.module == "embed_tokens" and "zero_grad_2" in row.phases
        }
        assert tables == {4 * V * D}


SIZED = ("l=2", "d=512", "h=8", "head_dim=64", "s=512")
FAMILIES = {
    "gpt": ("gpt2", "l=2", "d=512", "h=8", "s=512", "V=8000", "training.dropout=0.1"),
    "llama": ("llama-3.2-1b", *SIZED, "num_key_value_heads=4", "intermediate_size=2048", "V=8192"),
    "qwen": ("qwen3-8b", *SIZED, "num_key_value_heads=8", "intermediate_size=2048", "V=8000"),
}
FSDP, HSDP = ("engine=fsdp2", "zero_stage=3", "data_parallel=4"), ("data_parallel=8", "data_parallel_replicate=2")


@pytest.mark.parametrize(
    ("family", "run"),
    [
        ("llama", ("recipe=pure", "b=2", "tensor_parallel=2", SEQUENCE)),
        *(
            pytest.param(family, run, marks=pytest.mark.long)
            for family in FAMILIES
            for run in (
                ("recipe=amp", "b=1", "tensor_parallel=4", SEQUENCE, APART),
                ("recipe=pure", "b=2", "tensor_parallel=2", "recompute=full"),
                ("recipe=mixed-18", "b=2", "tensor_parallel=4", SEQUENCE),
                ("recipe=pure", "b=2", "tensor_parallel=2", SEQUENCE, APART, "gradient_clipping=1", *FSDP),
                ("recipe=amp", "b=1", "tensor_parallel=4", APART, *FSDP, *HSDP),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_dtensor_holds_byte_by_byte(family: str, run: tuple[str, ...]) -> None:
    """What tensors ask for, at the peaks of loss and backward; in forward, but for what checkpoints name.

    The loss itself and its weight, 4 bytes each, are the trace's alone. What the allocator rounds up is left out: unsplit
    block remainders depend on the order of all blocks before.
    """
    traces = traced(*FAMILIES[family], *run)
    expected = memcalc.estimate(memcalc.load(*FAMILIES[family], *run)).ledger
    phases = ("loss_2", "backward_2", "optimizer_step_2") if "recompute=full" in run else STEADY

    for phase in phases:
        difference = requested(expected, phase) - requested(traces, phase)
        assert abs(difference) <= 4096, phase


STEADY = ("forward_2", "loss_2", "backward_2", "optimizer_step_2")


def requested(ledger: Ledger, phase: str) -> int:
    """Requested bytes at the peak of a phase."""
    return ledger.totals[phase] - ledger.components(phase).get(Component.BLOCK_ROUNDING, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("num_key_value_heads=1",), "2 ranks cannot split 1 key/value heads evenly"),
        (("data_parallel=2",), "DistributedDataParallel does not support sharded parameters (engine fsdp2"),
        (("position_embedding=alibi", "attention=eager"), "ALiBi's slopes differ from head to head"),
        (("embedding_size=64",), "the plan has no embedding_size"),
        (("qk_norm=true", "qk_norm_width=all-heads"), "a norm of queries and keys over all-heads needs all ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=f"tensor_parallel = 2 cannot be run: .*{re.escape(message)}"):
        memcalc.trace(*LLAMA, SPLIT, *given)


def test_experts_are_not_split() -> None:
    with pytest.raises(InputError, match="tensor_parallel = 2 cannot be run: the plan does not split routed experts"):
        memcalc.trace("mixtral-8x7b", "l=1", SPLIT)


def test_the_world_is_groups_of_ranks_that_split_layers(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [word for override in (*LLAMA[1:], SPLIT) for word in ("--set", override)]

    assert main(["trace", LLAMA[0], *overrides, "--world-size", "5"]) == 2
    assert "--world-size 5 is not a multiple of tensor_parallel = 2" in capsys.readouterr().err
