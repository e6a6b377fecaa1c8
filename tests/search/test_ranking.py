"""The ranking against every choice sized one by one; and a published layout among those that fit."""

import pytest

import memcalc
from memcalc.search.costs import costs_of
from memcalc.search.layouts import Space
from memcalc.search.ranking import best_of, chosen, micro_batches, rank, recompute_choices
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.hardware.interconnect import system_of
from memcalc.verdict.judge import judge, judge_by_records
from memcalc.verdict.needs import allocated_bytes, recorded_need

NOTHING: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("name", "overrides", "gpus", "gpu", "every"),
    [
        pytest.param("gpt2-xl", ("attention=eager", "b=2"), 4, "rtx-4090", 3, marks=pytest.mark.long),
        ("llama-3.2-1b", ("l=4", "s=8192"), 4, "rtx-4090", 6),  # with layouts of each engine
        pytest.param("llama-3.2-1b", ("s=8192",), 4, "l40s", 3, marks=pytest.mark.long),
        pytest.param("granite-3.0-1b-a400m", ("b=4",), 4, "rtx-4090", 3, marks=pytest.mark.long),
        ("gpt2-large", ("b=4",), 1, "rtx-4090", 1),
    ],
)
def test_pruning_loses_nothing(name: str, overrides: tuple[str, ...], gpus: int, gpu: str, every: int) -> None:
    """Of every so many layouts, the cheapest choice of all that fit, each an estimate of its own."""
    card = find_gpu(gpu)
    spec = memcalc.load(name, *overrides, gpu=card.name)
    system = system_of(card)
    space = Space(spec, gpus, system.node, 2 * gpus)
    expected = {}
    for layout in list(space.layouts())[::every]:
        runs = [
            chosen(layout, recompute, size)
            for recompute in recompute_choices(spec, NOTHING)
            for size in micro_batches(spec, layout, NOTHING)
        ]
        fitting = [costs_of(run, system).total for run in runs if memcalc.estimate(run).fits]
        if fitting:
            expected[layout.spec.parallelism] = min(fitting)
    found = {ranked.spec.parallelism: ranked for ranked in rank(space, system, spec).fitting}

    assert expected
    for spread, seconds in expected.items():
        assert found[spread].costs.total == pytest.approx(seconds)
        result = memcalc.estimate(found[spread].spec)
        assert result.fits
        assert result.headline.device_bytes == found[spread].device_bytes
        assert costs_of(result.spec, system) == pytest.approx(found[spread].costs)


def test_layouts_that_cost_more_than_the_shown_ones_change_nothing_that_is_shown() -> None:
    """The cheapest two splits are those of a search that replays all layouts; the others fit by recorded runs."""
    card = find_gpu("rtx-4090")
    spec = memcalc.load("gpt2-large", "l=18", "b=4", gpu=card.name)
    system = system_of(card)
    space = Space(spec, 2, system.node, 4)
    everything, cheapest = rank(space, system, spec), rank(space, system, spec, top=2)

    shown = best_of(cheapest, 2)
    assert [found.result.spec for found in shown] == [found.result.spec for found in best_of(everything, 2)]
    assert [found.result.headline.device_bytes for found in shown] == [
        found.device_bytes for found in everything.fitting if any(found.spec == best.result.spec for best in shown)
    ]
    totals = [found.costs.total for found in cheapest.fitting]
    assert totals == sorted(totals)
    assert len(totals) > len(shown)  # more layouts fit than are shown
    assert len(totals) <= len(everything.fitting) <= len(totals) + cheapest.undecided


def test_above_the_estimate_from_recorded_runs_a_replay_decides() -> None:
    """A full GPU frees cached blocks: the run reserves less than such runs did, and fits."""
    card = find_gpu("a100-40gb")
    spec = memcalc.load("llama-3-8b", "recipe=mixed-16", gpu=card.name)
    layouts = Space(spec, 5, system_of(card).node, 5).layouts()
    sharded = next(layout for layout in layouts if layout.spec.parallelism.zero_stage == 3)
    run = chosen(sharded, "full", 1)

    assert recorded_need(run, card, allocated_bytes(run, card)).device_bytes > card.usable_bytes
    assert judge_by_records(run).answer == "unknown"
    assert judge(run).answer == "fits"


# Megatron-LM's defaults, which the published runs used: fp32 main gradients, a loss over shards of the vocabulary.
MEGATRON = ("implementation=megatron", "recipe=mixed-18", "loss=vocab-parallel", "optimizer_implementation=fused")


@pytest.mark.long
def test_the_published_layout_of_gpt3_is_found() -> None:
    """Korthikanti et al., arXiv 2205.05198, table 3: 175B with tensor 8, pipeline 8, 3 chunks a stage, micro-batch 1."""
    answer = memcalc.fit("gpt3", *MEGATRON, gpu="a100-80gb", gpus=1024)
    assert answer.ranking is not None
    published = [
        found
        for found in answer.ranking.fitting
        if (found.spec.parallelism.tensor_parallel, found.spec.parallelism.pipeline_parallel) == (8, 8)
        and found.spec.parallelism.sequence_parallel
        and found.spec.parallelism.virtual_stages == 3
    ]

    assert published
    assert all(memcalc.estimate(found.spec).fits for found in published)
    totals = [found.costs.total for found in answer.ranking.fitting]
    assert totals == sorted(totals)
    assert published[0].costs.total < 1.1 * totals[0]


def test_selective_recomputation_is_for_kernels_that_keep_maps() -> None:
    assert recompute_choices(memcalc.load("gpt2", "attention=eager"), NOTHING) == ["none", "selective", "full"]
    assert recompute_choices(memcalc.load("gpt2"), NOTHING) == ["none", "full"]
    assert recompute_choices(memcalc.load("gpt2", "recompute=every-2"), NOTHING) == ["none", "every-2", "full"]
    assert recompute_choices(memcalc.load("gpt2"), frozenset({"recompute"})) == ["none"]
