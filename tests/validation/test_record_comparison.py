"""Traces compared with records that were measured before: nothing is measured again, nothing traced twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.api import compare_records
from memcalc.documents.measure import records_document
from memcalc.errors import InputError
from memcalc.measuring.job import Job
from memcalc.measuring.measure import measured
from memcalc.measuring.records import RECORDS
from memcalc.measuring.run_process import answer
from memcalc.validation.record_comparison import operator_differences
from memcalc.validation.summary import errors_of

SIZES = ("l=1", "d=32", "h=2", "V=64", "s=8", "recipe=fp32", "dtype=fp32", "attention=eager", "dropout=0")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run on the CPU, in this process."""
    events = str(tmp_path_factory.mktemp("run") / "events.jsonl")
    job = Job(memcalc.load("gpt2", *SIZES, "optimizer=sgd"), 2, "cpu", "", events)
    command = "memcalc measure gpt2 --set l=1 --steps 2"
    return measured(job, json.loads(json.dumps(answer(job))), command).to_record()


def file_of(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "records.jsonl"
    for each in records:
        RECORDS.append((each,), path)
    return path


def test_a_trace_is_the_measured_run_and_is_made_once(record: dict[str, Any], tmp_path: Path) -> None:
    records = file_of(tmp_path, record)
    first, second = (compare_records(records, "fake") for _ in range(2))
    (run,) = first.of("fake")

    assert (first.fresh, second.fresh) == (1, 0)
    assert len(list(RECORDS.read(tmp_path / "records-traces.jsonl"))) == 1
    assert [run.line for run in second.of("fake")] == [run.line]
    assert run.predicted.ledger.peak_bytes == run.measured.ledger.peak_bytes
    assert {each.name: each.exact for each in errors_of([run])}["allocated"] == 1
    assert operator_differences(run) == []
    assert records_document(second)["traces"][0]["misses"] == []


def test_a_miss_is_reported_with_its_operator(record: dict[str, Any], tmp_path: Path) -> None:
    """Had the run held 100 bytes more, in products, the trace would be 100 bytes under."""
    other = json.loads(json.dumps(record))
    peak = max(other["phases"], key=lambda phase: phase["peak_allocated_bytes"])
    peak["peak_allocated_bytes"] += 100
    peak["components"]["temporaries"] = peak["components"].get("temporaries", 0) + 100
    other["operators"]["aten.mm"] = other["operators"].get("aten.mm", 0) + 100
    compared = compare_records(file_of(tmp_path, other), "fake")
    (document,) = records_document(compared)["traces"]

    assert document["misses"] == [{"run": "gpt2 l=1", "bytes": -100, "operators": {"aten.mm": -100}}]
    assert document["errors"][0]["under"] == 1


def test_runs_that_died_are_counted_by_what_the_trace_says(record: dict[str, Any], tmp_path: Path) -> None:
    """On a T4, which 12·16384² parameters of 16 bytes, 51 GB, do not fit, and a small model does."""
    large = memcalc.load("gpt2", *SIZES, "d=16384", "h=64").model_dump(mode="json")
    device = {"kind": "cuda", "identifier": "cuda:0", "name": "Tesla T4", "total_bytes": 15_634_661_376}
    dead = record | {"device": device, "outcome": "out of memory"}
    compared = compare_records(file_of(tmp_path, dead, dead | {"spec": large}), "fake")

    assert compared.predicted_failures("fake") == (1, 2)
    assert compared.of("fake") == []


def test_untraceable_runs_are_reported_and_the_others_continue(record: dict[str, Any], tmp_path: Path) -> None:
    compared = compare_records(file_of(tmp_path, record), "null", "fake")

    assert compared.missing == (("null: gpt2 l=1", "a null device simulates CUDA, but the run was on a CPU."),)
    assert len(compared.of("fake")) == 1


def test_missing_records(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl: the file does not exist or has no records\. Name a file"):
        compare_records(tmp_path / "none.jsonl", "fake")
