"""The fewest cards, the smallest card, the least recomputation: one less does not do."""

import pytest

import memcalc
from memcalc.search.layouts import Space
from memcalc.search.minima import fewest_gpus, node_counts, resident_bytes
from memcalc.search.ranking import rank
from memcalc.spec.hardware.gpus import all_gpus, find_gpu
from memcalc.spec.hardware.interconnect import system_of


@pytest.mark.parametrize(
    ("name", "overrides", "card", "expected"),
    [
        ("gpt2", ("recipe=amp",), "t4", 1),
        ("llama-3-8b", ("recipe=mixed-16",), "h100-80gb", None),
        ("llama-3.2-1b", ("implementation=huggingface",), "rtx-3090", None),
    ],
)
def test_with_one_gpu_less_no_layout_fits(
    name: str, overrides: tuple[str, ...], card: str, expected: int | None
) -> None:
    answer = memcalc.fit(name, *overrides, gpu=card, minimize="gpus")
    found, system = answer.fewest, system_of(find_gpu(card))

    assert found is not None
    assert expected in (None, found)
    assert answer.best
    assert all(best.result.fits for best in answer.best)
    spec = memcalc.load(name, *overrides, gpu=card)
    for fewer in range(1, found):
        space = Space(spec, fewer, system.node, fewer * spec.training.micro_batch_size)
        assert not rank(space, system, spec).fitting


def test_the_last_number_is_tried() -> None:
    """Six are enough and five are not: where six are the most, it is the last number that says so."""
    run = ("llama-3-8b", "implementation=megatron")

    for most in (6, 7, 16, 64):
        found = memcalc.fit(*run, gpu="a100-40gb", minimize="gpus", gpus=most)
        assert (found.fewest, found.verdict) == (6, "fits")
        assert found.may_be_fewer  # on 5, in a layout that is not replayed
    none = memcalc.fit(*run, gpu="a100-40gb", minimize="gpus", gpus=5)
    assert (none.fewest, none.verdict) == (None, "unknown")
    assert memcalc.fit(*run, gpu="a100-40gb", minimize="gpus", gpus=2).verdict == "does-not-fit"


@pytest.mark.long
def test_none_is_skipped() -> None:
    """Splits that fail with more replicas are not estimated again; every number has the answer of all its layouts."""
    card = find_gpu("l4")
    spec, system = memcalc.load("llama-3.2-3b", "recipe=mixed-16", gpu="l4"), system_of(card)
    fitting = [
        gpus
        for gpus in node_counts(system.node, 24)
        if rank(Space(spec, gpus, system.node, gpus), system, spec).fitting
    ]

    for most in (1, 2, 3, 5, 8, 24):
        expected = min((gpus for gpus in fitting if gpus <= most), default=None)
        assert fewest_gpus(spec, card, system, None, frozenset(), most).gpus == expected


def test_what_stays_is_held_at_least_once() -> None:
    """gpt2's 124,439,808 parameters in mixed-16: 2 + 4 + 4 + 4 bytes each."""
    spec = memcalc.load("gpt2", "recipe=mixed-16", "data_parallel=8", "zero_stage=3")

    assert resident_bytes(spec) == pytest.approx(14 * 124_439_808, rel=0.001)


def test_numbers_of_gpus() -> None:
    assert list(node_counts(4, 20)) == [1, 2, 3, 4, 8, 12, 16, 20]
    assert list(node_counts(8, 20)) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    assert list(node_counts(8, 6)) == [1, 2, 3, 4, 5, 6]


def test_the_smallest_gpu() -> None:
    answer = memcalc.fit("llama-3.2-1b", "dtype=fp16", "attention=eager", gpu="t4", minimize="gpu_kind")
    assert answer.smallest is not None
    smallest = answer.smallest.gpu
    nvidia = [card for card in all_gpus() if card.vendor == "nvidia"]

    assert [sized.gpu.name for sized in answer.gpu_verdicts if sized.lacks] == []
    assert {sized.gpu.name for sized in answer.gpu_verdicts} == {card.name for card in nvidia}
    for card in nvidia:
        fits = memcalc.estimate("llama-3.2-1b", "dtype=fp16", "attention=eager", gpu=card.name).fits
        if card.usable_bytes < smallest.usable_bytes:
            assert not fits
    assert memcalc.estimate("llama-3.2-1b", "dtype=fp16", "attention=eager", gpu=smallest.name).fits


def test_a_gpu_that_lacks_what_the_run_needs() -> None:
    """A V100's memory is enough, but it has no bf16 units and no flash attention; another maker's card is not asked."""
    answer = memcalc.fit("llama-3.2-1b", "recipe=pure", gpu="h100-80gb", minimize="gpu_kind")
    passed_over = {sized.gpu.name: sized.lacks for sized in answer.gpu_verdicts if sized.verdict.answer == "unknown"}

    assert passed_over["v100-16gb"] == "no bf16 matrix units; no flash attention"
    assert answer.smallest is not None
    assert (answer.smallest.gpu.compute_capability or (0, 0)) >= (8, 0)
    amd = memcalc.fit("llama-3.2-1b", "recipe=pure", gpu="mi300x", minimize="gpu_kind")
    assert {sized.gpu.vendor for sized in amd.gpu_verdicts} == {"amd"}


@pytest.mark.parametrize("spread", [("s=4096",), ("s=3072", "pipeline_parallel=2", "gradient_accumulation_steps=4")])
def test_the_fewest_layers_to_recompute(spread: tuple[str, ...]) -> None:
    run = ("recipe=pure", "b=4", "loss=chunked", *spread)
    found = memcalc.fit("llama-3.2-1b", *run, gpu="rtx-3090", minimize="recompute").least_recompute

    assert found is not None
    assert isinstance(found.recompute, tuple)
    assert memcalc.estimate("llama-3.2-1b", *run, f"recompute={list(found.recompute)}", gpu="rtx-3090").fits
    stages = 2 if len(spread) > 1 else 1
    per_stage = 16 // stages
    one_less = [layer for layer in found.recompute if layer % per_stage < found.layers - 1]
    assert len(one_less) == len(found.recompute) - stages
    assert not memcalc.estimate("llama-3.2-1b", *run, f"recompute={one_less}", gpu="rtx-3090").fits


def test_attention_alone_where_that_is_enough() -> None:
    run = ("attention=eager", "recipe=amp", "b=8")
    found = memcalc.fit("gpt2", *run, gpu="t4", minimize="recompute").least_recompute

    assert found is not None
    assert found.recompute == "selective"
    assert not memcalc.estimate("gpt2", *run, gpu="t4").fits
    assert memcalc.estimate("gpt2", *run, "recompute=selective", gpu="t4").fits


def test_nothing_to_recompute() -> None:
    """Where all layers recomputed are not enough: tests/search/test_nearest.py."""
    none = memcalc.fit("gpt2", gpu="h100-80gb", minimize="recompute").least_recompute

    assert none is not None
    assert none.recompute == "none"
