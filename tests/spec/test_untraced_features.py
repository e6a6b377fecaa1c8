"""What memcalc's own step leaves out of a run."""

from __future__ import annotations

import memcalc
from memcalc.spec.untraced_features import not_run


def test_emptying_the_cache_is_left_out_and_makes_no_lower_bound() -> None:
    """Without it a step reserves as much or more, so a trace is not too low."""
    (found,) = not_run(memcalc.load("gpt2", "implementation=huggingface", "empty_cache_steps=1"))

    assert "empty_cache" in found.feature
    assert not found.holds_memory


def test_pairs_and_an_evaluation_hold_memory_that_a_trace_lacks() -> None:
    found = not_run(memcalc.load("gpt2", "implementation=huggingface", "pairs=true", "evaluation_batch_size=4"))

    assert [each.feature for each in found] == ["the second sequence of each pair", "evaluation during training"]
    assert all(each.holds_memory for each in found)
