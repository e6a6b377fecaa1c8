"""transformers' causal LMs at their default sizes; benchmarks/families.py runs them all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
pytest.importorskip("transformers")

from benchmarks.families import trace_family  # noqa: E402
from tools.families import records  # noqa: E402

QUICK = ("gpt2", "openai-gpt", "gemma3_text")  # of the quickest: dense, without a cache, with a sliding window
OTHERS = tuple(record["family"] for record in records() if "parameters" in record and record["family"] not in QUICK)
TO_REACH = 165


def check(name: str) -> None:
    """A family ends as it was recorded, with as many parameters, and the same peak if it traces."""
    known: dict[str, Any] = {record["family"]: record for record in records()}
    if name not in known:
        pytest.skip("the recorded version of transformers does not know it")
    found = trace_family(name)

    assert found["outcome"] == known[name]["outcome"], found.get("reason")
    assert found["parameters"] == known[name]["parameters"]
    assert found.get("peak_bytes") == known[name].get("peak_bytes")


@pytest.mark.parametrize("name", QUICK)
def test_three_families_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_family_that_instantiates_as_recorded(name: str) -> None:
    check(name)


def test_enough_families_trace() -> None:
    """A minimum number of the families that instantiate is traced; docs/reports/families.md shows the records."""
    outcomes = [record["outcome"] for record in records()]

    assert outcomes.count("traced") >= TO_REACH
    assert all(record["reason"] for record in records() if record["outcome"] != "traced")


def test_each_record_is_one_line_of_json_in_order() -> None:
    for path in (ROOT / "benchmarks" / "recordings" / "families").glob("*.jsonl"):
        names = [json.loads(line)["family"] for line in path.read_text().splitlines()]
        assert names == sorted(set(names))
