"""The seam to the estimate: the same bytes, from fewer stages."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import memcalc
from memcalc.estimation.stages import stages_that_matter
from memcalc.fitting.peaks import device_bytes
from memcalc.fitting.varying import broken_rule, varied
from memcalc.spec.cards import find_card
from tests.properties.specs import Config, configs, examples

CARD = find_card("a100-80gb")


@examples(25)
@given(configs(adapters=True))
def test_as_the_estimate_has_it(config: Config) -> None:
    spec = memcalc.load(config, gpu=CARD.name)

    assert device_bytes(spec, CARD) == memcalc.estimate(spec).headline.device_bytes


@examples(25)
@given(
    st.sampled_from(["llama-3.2-1b", "deepseek-v2-lite", "llama-4-scout", "gpt-oss-20b"]),
    st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 1), ("dualpipe", 1)]),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from(["none", "full", "every-3", (0, 1, 4), (0, (2, 3, 4))]),
    st.sampled_from([1, 8]),
)
def test_with_every_schedule(name: str, schedule: tuple[str, int], stages: int, recompute: Any, steps: int) -> None:
    """Layers that do not divide, experts here and there, patterns of recomputation: other stages are fullest."""
    spread = {"pipeline_parallel": stages, "schedule": schedule[0], "virtual_stages": schedule[1]}
    training = {"recompute": recompute, "gradient_accumulation_steps": steps}
    spec = varied(memcalc.load(name, gpu=CARD.name), parallelism=spread, training=training)
    assume(broken_rule(spec) is None)

    assert device_bytes(spec, CARD) == memcalc.estimate(spec).headline.device_bytes


def test_stages_alike_are_sized_once() -> None:
    """96 layers on 16 stages: the first, the fullest of 14 in between, the last."""
    spec = memcalc.load("gpt3", "pipeline_parallel=16")

    assert [stage.index for stage in stages_that_matter(spec)] == [0, 1, 15]


def test_past_the_limit_it_stops_above_it() -> None:
    spec = memcalc.load("gpt3", "pipeline_parallel=16", gpu=CARD.name)
    whole = device_bytes(spec, CARD)

    assert CARD.usable_bytes < device_bytes(spec, CARD, limit=CARD.usable_bytes) <= whole


@pytest.mark.parametrize("limit", [0, 10**15])
def test_the_limit_changes_no_answer_below_it(limit: int) -> None:
    spec = memcalc.load("gpt2", "pipeline_parallel=4", gpu=CARD.name)
    whole = device_bytes(spec, CARD)

    assert (device_bytes(spec, CARD, limit=limit) > limit) == (whole > limit)
