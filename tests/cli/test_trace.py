"""`memcalc trace`, small: what it prints, and the files that it makes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from memcalc.api import load
from memcalc.cli.trace_output import results_to_compare
from memcalc.events import read_events, timeline
from memcalc.report.tables.comparison import source_label
from tests.schemas import validate_result

pytest.importorskip("torch")

TINY = ["gpt2", "--set", "num_layers=2", "--set", "s=64", "--set", "vocab_size=512", "--steps", "2"]


def test_the_screen_has_all_that_a_run_can_tell(run) -> None:
    code, out, err = run("trace", *TINY, "--gpu", "a100-40gb", "--units", "MiB", "--compare")

    assert (code, err) == (0, "")
    for title in (
        "FITS: ",
        "At the peak: ",
        "Memory over the run: MiB allocated (letters) and reserved (-).",
        "Phase log: allocated, MiB",
        "Largest at the peak, in ",
        "Reserved memory at the peak, MiB: ",
        "Differences: estimate less fake.",
    ):
        assert title in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_on_the_cpu_there_is_no_allocator(run) -> None:
    out = run("trace", *TINY, "--semantics", "cpu").out

    assert "Phase log: requested" in out
    assert "Reserved memory" not in out


def test_json_is_the_document_with_the_estimate_inside(run) -> None:
    document = json.loads(run("trace", *TINY, "--format", "json", "--compare").out)
    estimate = document.pop("estimate")

    for each in (document, estimate):
        validate_result(each)
    assert (document["source"], document["device"], estimate["source"]) == ("trace", "fake:cuda", "estimate")
    assert sum(document["components"].values()) == document["peak"]["allocated_bytes"]


def test_a_trace_on_the_null_device_has_one_on_fake_tensors_beside_it() -> None:
    """Where that can be: DistributedDataParallel runs on the null device alone."""
    sizes = ("num_layers=1", "s=64", "vocab_size=512")

    both = results_to_compare(load("gpt2", *sizes, gpu="a100-40gb"), "null", 1, "")
    assert [source_label(result) for result in both] == ["estimate", "fake"]
    assert [source_label(result) for result in results_to_compare(load("gpt2", *sizes), "fake", 1, "")] == ["estimate"]
    ranks = load("gpt2", *sizes, "data_parallel=2", "recipe=pure", gpu="a100-40gb")
    assert [source_label(result) for result in results_to_compare(ranks, "null", 1, "")] == ["estimate"]


def test_pytorchs_cuda_build_without_its_libraries_has_the_estimate_alone_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def import_torch() -> None:
        raise ImportError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr("memcalc.step.skip_compiler.without_compiler", import_torch)

    both = results_to_compare(load("gpt2", "num_layers=1", "s=64", gpu="a100-40gb"), "null", 1, "")
    assert [source_label(result) for result in both] == ["estimate"]


def test_markdown_has_the_same_tables(run) -> None:
    out = run("trace", *TINY, "--format", "markdown", "--compare").out

    for title in ("### Phase log: allocated, GiB", "### Largest at the peak, in ", "### Phases", "estimate GiB"):
        assert title in out


def test_files_of_every_kind(run, tmp_path: Path) -> None:
    """All of them tell of the same events and the same peak."""
    pytest.importorskip("matplotlib")
    names = {"plot": ["run.png", "run.svg", "run.html"], "export": ["run.pickle", "run.json", "run.jsonl"]}
    options = [word for option, files in names.items() for name in files for word in (f"--{option}", tmp_path / name)]
    code, out, _ = run("trace", *TINY, "--format", "json", *map(str, options))
    peak = json.loads(out)["peak"]["allocated_bytes"]
    with (tmp_path / "run.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    chrome = json.loads((tmp_path / "run.json").read_text())
    counters = [event["args"] for event in chrome["traceEvents"] if event["name"] == "bytes by component"]
    events = list(read_events(tmp_path / "run.jsonl"))

    assert code == 0
    assert all((tmp_path / name).stat().st_size > 0 for files in names.values() for name in files)
    assert max(sum(counter.values()) for counter in counters) == peak
    assert 0 < peak - timeline(events).peak_bytes < 0.1 * peak  # what blocks add
    assert (
        sum(entry["action"] == "alloc" for entry in snapshot["device_traces"][0]) == chrome["otherData"]["allocations"]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--plot", "run.gif"], 2, "error: run.gif ends in '.gif'. The suffix decides what is written: .png, .svg, .html, .json."),
        (["--export", "run"], 2, "error: run has no suffix. The suffix decides what is written: .pickle, .json, .jsonl."),
        (["--plot", "nowhere/run.html"], 2, "error: nowhere/run.html: no directory nowhere. Create it first, or"),
        (["--semantics", "cpu", "--export", "run.pickle"], 2, "error: run.pickle: a memory snapshot records the CUDA"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_written(
    arguments: list[str], code: int, message: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("trace", *TINY, *arguments)

    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith(message)
    assert list(tmp_path.iterdir()) == []
