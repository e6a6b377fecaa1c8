"""The seam to the estimate: the same verdict, from fewer stages and fewer replays."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

import memcalc
from memcalc.layout.stages import stages_that_matter
from memcalc.ledger.verdict import holding_memory
from memcalc.search.variants import is_hopeless, varied, violated_rule
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import is_expected_to_fit, judge
from tests.properties.specs import Config, configs, examples

CARD = find_gpu("a100-80gb")


def as_estimated(spec: Spec) -> None:
    """The answer of the whole estimate; its bytes, unless the lower bound alone was beyond the GPU."""
    found, whole = judge(spec), memcalc.estimate(spec)

    assert found.answer == whole.verdict
    if found.device_bytes is None:
        assert is_hopeless(spec) or holding_memory(whole.limits)
        assert found.limit_bytes < found.needed_bytes <= (whole.headline.device_bytes or 0)
    else:
        assert found.device_bytes == whole.headline.device_bytes
    assert whole.decision is not None
    assert is_expected_to_fit(spec) == whole.decision.expected
    assert not (is_hopeless(spec) and is_expected_to_fit(spec))


@examples(25)
@given(configs(adapters=True), st.sampled_from(["t4", CARD.name]))
def test_as_the_estimate_has_it(config: Config, card: str) -> None:
    as_estimated(memcalc.load(config, gpu=card))


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
    assume(violated_rule(spec) is None)

    as_estimated(spec)


def test_stages_alike_are_sized_once() -> None:
    """96 layers on 16 stages: the first, the fullest of 14 in between, the last."""
    spec = memcalc.load("gpt3", "pipeline_parallel=16")

    assert [stage.index for stage in stages_that_matter(spec)] == [0, 1, 15]
