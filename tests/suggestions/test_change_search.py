"""Changes that fit do fit; pairs are of what is not enough alone, and milder ones would not do."""

from functools import cache

import pytest

import memcalc
from memcalc.api.sources import run_of
from memcalc.ledger.result import Result
from memcalc.search.variants import is_hopeless
from memcalc.spec.spec import Spec
from memcalc.suggestions.candidates import MORE_GPUS, OTHER_RESULT, RESULTS, SAME, ChangeCandidate, candidates
from memcalc.suggestions.change_search import MOST_PAIRS, ChangeSearch, SuggestedChange
from memcalc.suggestions.run_overrides import written_out
from memcalc.verdict.judge import judge
from tests.thinning import quick_every

RUNS = [
    ("gpt2-large", ("l=12", "b=24", "recipe=amp", "attention=eager"), "rtx-4090"),
    ("llama-3-8b", ("b=3", "recipe=pure"), "h100-80gb"),
    ("llama-3-8b", ("data_parallel=8", "recipe=mixed-16", "s=8192"), "a100-40gb"),
    ("gpt2-large", ("l=12", "tensor_parallel=2", "b=48"), "v100-16gb"),
    ("llama-3-8b", ("implementation=huggingface",), "l4"),  # adapters move the recipe that is taken by default
]


def by_verdict(result: Result) -> tuple[int, bool | None]:
    found = judge(result.spec)
    return found.needed_bytes, found.fits


@cache
def finder(name: str, overrides: tuple[str, ...], card: str) -> ChangeSearch:
    spec = memcalc.load(name, *overrides, gpu=card)

    return ChangeSearch(
        run_of(name, *overrides, gpu=card, verb="fit"),
        candidates(spec),
        memcalc.estimate(spec).ledger.peak_bytes,
        by_verdict,
        is_hopeless,
    )


@cache
def pairs(name: str, overrides: tuple[str, ...], card: str) -> list[SuggestedChange]:
    return finder(name, overrides, card).pairs()


@pytest.mark.parametrize(("name", "overrides", "card"), quick_every(len(RUNS), RUNS, unpack=True))
def test_each_is_what_the_estimate_says(name: str, overrides: tuple[str, ...], card: str) -> None:
    """Written after the run's own --set, each gives the run that was estimated."""
    found = finder(name, overrides, card)
    before = memcalc.estimate(name, *overrides, gpu=card)

    assert not before.fits
    for change in [*found.singles(), *pairs(name, overrides, card)]:
        after = memcalc.estimate(name, *overrides, *change.overrides, gpu=card)
        assert change.allocated == after.ledger.peak_bytes
        assert change.saved == before.ledger.peak_bytes - after.ledger.peak_bytes
        assert change.saved > 0 or change.levers == ("allocator settings",)
        # A bound is enough for what does not fit.
        assert change.needed == after.headline.device_bytes or (
            change.fits is False and change.needed < (after.headline.device_bytes or 0)
        )
        assert change.fits == after.fits
        assert change.spec == after.spec
        assert change.result in RESULTS


@pytest.mark.parametrize(("name", "overrides", "card"), quick_every(len(RUNS), RUNS, unpack=True))
def test_neither_half_of_a_pair_is_enough(name: str, overrides: tuple[str, ...], card: str) -> None:
    found = finder(name, overrides, card)
    enough = {change.levers[0] for change in found.singles() if change.fits}

    for pair in pairs(name, overrides, card):
        assert len(pair.levers) == 2
        assert enough.isdisjoint(pair.levers)


def test_of_one_lever_the_mildest() -> None:
    """Of micro-batches 4, 2 and 1 the largest that fits; of two, four and eight times the GPUs the fewest."""
    spec = ("gpt2-xl", "b=8", "recipe=pure", "recompute=full", "loss=chunked")
    found = finder(spec[0], ("b=64", *spec[2:]), "rtx-3090")
    (change,) = [change for change in found.singles() if change.levers == ("smaller micro-batch",)]
    size = change.spec.training.micro_batch_size

    assert change.fits
    assert not memcalc.estimate(
        spec[0], *spec[2:], f"b={2 * size}", "gradient_accumulation_steps=2", gpu="rtx-3090"
    ).fits


@pytest.mark.parametrize(("name", "overrides", "card"), quick_every(len(RUNS), RUNS, unpack=True))
def test_the_same_result_means_the_same_sequences_a_step(name: str, overrides: tuple[str, ...], card: str) -> None:
    found = finder(name, overrides, card)
    before = sequences(memcalc.load(name, *overrides, gpu=card))

    for change in [*found.singles(), *pairs(name, overrides, card)]:
        assert change.result == OTHER_RESULT or sequences(change.spec) == before


def sequences(spec: Spec) -> int:
    training = spec.training
    return training.micro_batch_size * training.gradient_accumulation_steps * spec.parallelism.data_parallel


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (("b=4",), ["data_parallel=2 micro_batch_size=2", "data_parallel=4 micro_batch_size=1"]),
        (
            ("b=2", "gradient_accumulation_steps=6"),
            [
                "data_parallel=2 gradient_accumulation_steps=3",  # 2 · 3 · 2 = 12 sequences
                "data_parallel=4 micro_batch_size=1 gradient_accumulation_steps=3",  # 4 replicas of 3: 2 does not divide
            ],
        ),
        (
            ("b=1", "global_batch_size=4"),
            ["data_parallel=2 gradient_accumulation_steps=2", "data_parallel=4 gradient_accumulation_steps=1"],
        ),
    ],
)
def test_more_replicas_take_over_what_there_is(batch: tuple[str, ...], expected: list[str]) -> None:
    offered = [change for change in candidates(memcalc.load("gpt2", *batch)) if change.lever == "shard over more GPUs"]
    same = [change for change in offered if change.result == MORE_GPUS]
    dealt = [" ".join(text.partition(".")[2] for text in change.overrides) for change in same]

    assert [words.replace(" zero_stage=3 engine=fsdp2", "") for words in dealt] == expected
    assert len(same) < len(offered)  # 8 replicas cannot share them: a larger batch, another result
    assert "8 times as many sequences per step" in offered[-1].cost
    assert offered[-1].result == OTHER_RESULT


def test_every_kind_of_pair_is_listed() -> None:
    """Without more GPUs, adapters over recomputed layers are listed, regardless of how many layouts also fit."""
    found = pairs("llama-3-70b", (), "a100-80gb")

    for kind in RESULTS:
        assert len([change for change in found if change.result == kind]) <= MOST_PAIRS
    assert {change.result for change in found} >= {MORE_GPUS, OTHER_RESULT}
    assert ("recompute all", "train adapters") in {change.levers for change in found}


def test_only_a_single_gpu_is_multiplied_twice() -> None:
    """8 x 8 times 64 GPUs are no answer; 8 x 8 GPUs may be one for 70B."""
    splits = {"tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel"}

    def multiplied(card: str, *overrides: str) -> set[int]:
        found = pairs("llama-3-70b", overrides, card)
        more = [change for change in found if change.result == MORE_GPUS]
        return {sum(word.partition("=")[0].partition(".")[2] in splits for word in change.overrides) for change in more}

    assert 2 not in multiplied("h100-80gb", "data_parallel=64")
    assert 2 in multiplied("a100-80gb")


def test_offload_is_not_the_only_way_to_shard_more() -> None:
    """All on the host fits alone; so does what is sharded as much, with layers recomputed, at less time."""
    run = ("llama-3-70b", ("data_parallel=64",), "h100-80gb")

    assert any(change.levers == ("offload",) and change.fits for change in finder(*run).singles())
    assert ("recompute all", "shard more") in {change.levers for change in pairs(*run)}


@pytest.mark.parametrize(("name", "overrides", "card"), quick_every(len(RUNS), RUNS, unpack=True))
def test_no_lever_twice_in_a_kind(name: str, overrides: tuple[str, ...], card: str) -> None:
    found = pairs(name, overrides, card)
    for kind in RESULTS:
        levers = [lever for change in found if change.result in {kind, SAME} for lever in change.levers]
        assert len(levers) == len(set(levers))


def test_a_milder_pair_where_the_strongest_cannot_be() -> None:
    """DeepSpeed has no ZeRO 3 with a pipeline; ZeRO 1 with it fits."""
    spec = memcalc.load(
        "llama-2-13b", "recipe=mixed-16", "data_parallel=2", "engine=deepspeed", "zero_stage=0", gpu="a100-80gb"
    )
    shard = [ChangeCandidate("shard", (f"zero_stage={stage}",), "", SAME) for stage in (1, 3)]
    split = [ChangeCandidate("split", ("pipeline_parallel=4",), "", MORE_GPUS)]

    (pair,) = ChangeSearch(written_out(spec), [*shard, *split], 0, by_verdict).pairs()
    assert pair.spec.parallelism.zero_stage == 1
    assert pair.fits


@pytest.mark.parametrize(
    ("name", "overrides", "card", "expected"),
    [
        ("llama-3-8b", ("implementation=megatron", "data_parallel=8"), "h200", {"zero_stage": 1, "engine": "megatron"}),
        (
            "mixtral-8x7b",
            ("implementation=megatron", "data_parallel=64"),
            "h100-80gb",
            {"zero_stage": 1, "engine": "megatron", "expert_parallel": 8},
        ),
        pytest.param(
            "llama-3-8b",
            ("data_parallel=8", "zero_stage=2", "b=2", "gradient_accumulation_steps=4"),
            "l4",
            {"zero_stage": 3, "engine": "fsdp2", "offload": "all"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_changes_that_shard_over_the_existing_ranks(
    name: str, overrides: tuple[str, ...], card: str, expected: dict[str, object]
) -> None:
    """Megatron-Core's distributed optimizer from plain DDP; all on the host from where DeepSpeed shards gradients."""
    found = finder(name, overrides, card)
    same = [
        change for change in [*found.singles(), *pairs(name, overrides, card)] if change.fits and change.result == SAME
    ]

    assert any(
        all(getattr(change.spec.parallelism, field) == value for field, value in expected.items()) for change in same
    )


def test_pairs_are_judged_in_the_order_of_their_price() -> None:
    """The first pair of a kind needs fewer verdicts than all pairs of it."""
    name, overrides, card = RUNS[0]
    spec = memcalc.load(name, *overrides, gpu=card)
    judged: list[Spec] = []

    def counted(result: Result) -> tuple[int, bool | None]:
        judged.append(result.spec)
        return by_verdict(result)

    lazy = ChangeSearch(run_of(name, *overrides, gpu=card, verb="fit"), candidates(spec), 0, counted, is_hopeless)
    enough = {candidate.lever for candidate, change in lazy._possible if change.fits}
    levers = [
        [candidate for candidate, _ in lazy._possible if candidate.lever == lever]
        for lever in {candidate.lever: None for candidate, _ in lazy._possible}
        if lever not in enough
    ]
    counts: list[tuple[int, int]] = []  # judged for the first pair, and for all
    for result in RESULTS:
        before = len(judged)
        first, begun = next(lazy._of_kind(result, levers, set(), more_gpus_twice=True), None), len(judged)
        every = [*lazy._of_kind(result, levers, set(), more_gpus_twice=True)]
        prices = [lazy._price(change) for change in every]
        assert prices == sorted(prices)
        assert first == (every[0] if every else None)
        counts.append((begun - before, len(judged) - begun))
    some, all_of_them = map(sum, zip(*counts, strict=True))
    assert some < all_of_them
