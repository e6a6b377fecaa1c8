"""Replays compared with recorded runs of benchmarks/field_runs.py: models of every family, and seldom set fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.verdict_runs import loaded
from memcalc.spec.spec import Spec
from memcalc.validation.predictions import under
from tests.thinning import quick_every
from tools.recorded_errors import Recorded, compared, differs_without_values, is_claimed

FOLDER = Path(__file__).parents[2] / "benchmarks" / "recordings" / "fields"
CHUNKS = 0.006  # of linear attention and Mamba-2, with loops over chunks that are written as one operator
# Files, cases by number, and the most that these differ from what was recorded. What is not modelled to the byte:
# bf16 autocast over fp16 weights, many chunks of which torch.chunk makes fewer, Qwen3-VL's RoPE of three positions,
# norms of a vision tower in fp32, and small tables of ERNIE's experts.
KNOWN: dict[str, dict[int, float]] = {
    "adapters-3": {12: 0.008, 15: 0.005},
    "fields-1": {15: 0.001, 28: 0.008, 34: 0.014, 38: 0.002},
    "models-1": {64: 0.001, 94: 0.003, 95: 0.001},
    "held-out-fields-20261402": {3: 0.0001, 6: 0.0004},
    "further": {11: 0.011},
    "held-out-qlora-compute-dtype-20261130": {2: 0.0003, 6: 0.0037},
    "held-out-misses-20261501": {3: 0.0002, 4: 0.0007, 10: 0.038, 36: 0.001, 38: 0.025},
}


class Run(NamedTuple):
    """A recorded run."""

    file: str
    number: int  # of its line in the file, from 0
    case: str
    spec: Spec
    allocated: int
    reserved: int


def runs() -> list[Run]:
    """Runs that ended, as their recorder did: `recordings/fields/*.jsonl`."""
    found: list[Run] = []
    for path in sorted(FOLDER.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            record = json.loads(line)
            if record["outcome"] == "done":
                spec = under(loaded(record["case"]), record["versions"]["torch"])
                sizes = record["allocated_bytes"], record["reserved_bytes"]
                found.append(Run(path.stem, number, record["case"], spec, *sizes))
    return found


def most(run: Run) -> float:
    """Return the most that the replay may differ, as a fraction."""
    model = run.spec.model
    own = CHUNKS if model.linear_attention is not None or model.mamba is not None else 0.0
    return KNOWN.get(run.file, {}).get(run.number, own)


CLAIMED = [run for run in runs() if is_claimed(run.spec) and not differs_without_values(run.spec)]


@pytest.mark.parametrize("run", quick_every(25, CLAIMED), ids=lambda run: f"{run.file} {run.number}")
def test_reserved_memory_is_the_recorded(run: Run) -> None:
    found = compared(Recorded(run.case, "", run.spec, run.allocated, run.reserved))

    assert found.estimated is not None
    assert abs(found.error) <= most(run), run.case


def test_runs_of_every_family_are_there() -> None:
    families = {(run.spec.model.architecture, run.spec.training.implementation) for run in CLAIMED}

    assert len(CLAIMED) >= 150
    assert len(families) >= 85
