"""The recorded dry runs belong to the list of cases, and the documentation's tables are made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import dry_runs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GROUPS = ("scripts", "single", "compiled", "ranks")
LISTED = dry_runs.listed()


@pytest.mark.parametrize("group", GROUPS)
def test_every_record_is_of_a_case_that_is_listed_with_its_command(group: str) -> None:
    lines = (BENCHMARKS / "recordings" / "dry-runs" / f"{group}.jsonl").read_text().splitlines()
    recorded = {record["case"]: record for record in map(json.loads, lines)}
    listed = {case["case"]: case for case in LISTED[group]}

    assert len(recorded) == len(lines)
    for name, record in recorded.items():
        assert record["command"] == listed[name]["command"], name
        assert record["card"] == listed[name]["card"], name
        assert not record["good"] or record["ranks"], name


def test_programs_of_fifteen_packages_have_a_verdict() -> None:
    """The others say why: their reason is one sentence."""
    published = dry_runs.cases("scripts")
    found = published + dry_runs.drawn()
    decided = [
        case for case in found if case["record"]["good"] and case["record"]["verdict"] in {"fits", "does-not-fit"}
    ]

    assert len(decided) >= 27
    assert len({case["package"] for case in decided}) >= 15
    assert len(found) - len(decided) <= 2
    assert all(
        bool(case["record"]["doubt"] or case["record"]["failures"]) == (case not in decided) for case in published
    )
    assert all(rank["steps"] for case in decided for rank in case["record"]["ranks"])


WEIGHTS = 1_235_814_400  # of Llama-3.2-1B


@pytest.mark.parametrize(("case", "ranks", "bytes_each"), [("fsdp2-2", 2, 4), ("fsdp2-8", 8, 4), ("fsdp2-64", 64, 4)])
def test_sharded_runs_hold_no_less_than_their_shards(case: str, ranks: int, bytes_each: int) -> None:
    """fp32 weights and two moments always, and at the optimizer step gradients: 4 copies over all ranks."""
    record = next(found["record"] for found in dry_runs.cases("ranks") if found["case"] == case)

    assert record["ranks"][0]["allocated_bytes"] > 4 * bytes_each * WEIGHTS // ranks


def test_builds_of_torch_from_2_6_on_were_looked_at() -> None:
    """CUDA 12 and 13; the allocator's tests passed on each, and none of NVIDIA's libraries was there to help."""
    lines = (BENCHMARKS / "recordings" / "dry-runs" / "torch-builds.jsonl").read_text().splitlines()
    records = {record["torch"].partition("+")[0]: record for record in map(json.loads, lines)}

    assert {"2.6.0", "2.13.0"} <= records.keys()
    assert {record["cuda"].partition(".")[0] for record in records.values()} == {"12", "13"}
    for record in records.values():
        assert record["libraries_of_nvidia"] == 0
        assert record["tests"].get("passed", 0) > 0
        assert "failed" not in record["tests"]
