"""Layers of pipeline stages that are recomputed."""

from __future__ import annotations

import pytest

from memcalc.api import load
from memcalc.layout.stages import recomputed_layers, stages_of

# 8 layers and the two ends in 4 chunks of 3, 3, 2 and 2: layers 0 and 1; 2, 3 and 4; 5 and 6; 7.
CHUNKS = ("num_layers=8", "pipeline_parallel=2", "schedule=interleaved", "virtual_stages=2", "recompute=every-2")
ENDS = "pipeline_split=layers-and-ends"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [[{1}, {5}], [{3}, {7}]]),
        # the first rank counts layers 0, 1, 5 and 6; the second one 2, 3, 4 and 7
        (("framework=torchtitan",), [[{1}, {6}], [{3}, {7}]]),
    ],
)
def test_torchtitan_counts_the_layers_of_a_rank(words: tuple[str, ...], expected: list[list[set[int]]]) -> None:
    spec = load("llama-3.2-1b", *CHUNKS, ENDS, "b=1", "gradient_accumulation_steps=4", *words)

    assert [[recomputed_layers(spec, chunk) for chunk in stage.chunks] for stage in stages_of(spec)] == expected
