"""`memcalc replay` from the outside: whole screens, the document, pictures, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from memcalc.events import Event, EventType, write_events
from memcalc.ledger.component import Component

SNAPSHOT = Path(__file__).parents[1] / "snapshots" / "recorded" / "training-2.13.0.pickle.gz"
MIB = 2**20


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small run on two streams, with components and phases, that leaves a hole."""
    monkeypatch.chdir(tmp_path)
    weights, activations = Component.WEIGHTS, Component.ACTIVATIONS
    write_events(
        "run.jsonl",
        [
            Event(EventType.PHASE, phase="model"),
            Event(EventType.ALLOC, 1, 30 * MIB, component=weights, line="train.py:3"),
            Event(EventType.PHASE, phase="forward_1"),
            Event(EventType.ALLOC, 2, 12 * MIB, component=activations, line="train.py:7"),
            Event(EventType.ALLOC, 3, 3 * MIB, component=activations, line="train.py:8"),
            Event(EventType.ALLOC, 4, 7 * MIB, component=activations, line="train.py:8"),
            Event(EventType.FREE, 3),
            Event(EventType.ALLOC, 5, 1000, stream=1, line="train.py:9"),
            Event(EventType.PHASE, phase="backward_1"),
            Event(EventType.ALLOC, 6, 15 * MIB, component=Component.GRADIENTS, line="train.py:11"),
            Event(EventType.FREE, 2),
            Event(EventType.FREE, 4),
        ],
    )
    return "run.jsonl"


def test_the_screen(stream: str, run, golden: Callable[[str, str], None]) -> None:
    outcome = run(
        "replay", stream, "--gpu", "t4", "--compare", "--sweep", "max_split_size_mb=32,none", "--units", "MiB"
    )

    assert (outcome.code, outcome.err) == (0, "")
    golden("replay_events", outcome.out)


def test_the_screen_of_a_snapshot(run, golden: Callable[[str, str], None]) -> None:
    outcome = run("replay", str(SNAPSHOT), "--units", "MiB")

    assert (outcome.code, outcome.err) == (0, "")
    golden("replay_snapshot", outcome.out)


def test_running_out_is_an_answer(tmp_path: Path, run, golden: Callable[[str, str], None]) -> None:
    write_events(
        tmp_path / "run.jsonl",
        [Event(EventType.ALLOC, 1, 2**30, line="a.py:1"), Event(EventType.ALLOC, 2, 2**34, line="a.py:2")],
    )

    outcome = run("replay", str(tmp_path / "run.jsonl"), "--gpu", "t4", "--sweep", "expandable_segments=True")

    assert (outcome.code, outcome.err) == (0, "")
    golden("replay_out_of_memory", outcome.out)


def test_the_document(stream: str, run) -> None:
    document = json.loads(run("replay", stream, "--gpu", "t4", "--compare", "--format", "json").out)

    assert (document["source"], document["kind"], document["events"], document["fits"]) == (
        "replay",
        "events",
        12,
        True,
    )
    # 30 and 12 MiB in segments of their own, 3 and 7 in one of 20, 1000 bytes in one of 2; 15 in one of 16 with a remainder too small to be split off
    assert document["peak"]["allocated_bytes"] == (30 + 12 + 7 + 16) * MIB + 1024
    assert document["most_reserved"]["reserved_bytes"] == (30 + 12 + 20 + 2 + 16) * MIB
    assert document["most_reserved"]["phase"] == "backward_1"
    assert sum(segment["total_size"] for segment in document["segments"]) == 80 * MIB
    blocks = [block for segment in document["segments"] for block in segment["blocks"]]
    assert sum(block["bytes"] for block in blocks if block["component"] == "gradients") == 16 * MIB
    assert {trial["allocator"] for trial in document["trials"]} >= {"pytorch", "tensorflow", "ideal"}
    assert document["over_time"][-1] == [11, 30 * MIB + 16 * MIB + 1024, 80 * MIB]
    assert document["recording"] is None


def test_the_document_of_a_snapshot(run) -> None:
    recording = json.loads(run("replay", str(SNAPSHOT), "--format", "json").out)["recording"]

    assert recording["agrees"] is True
    assert recording["torch"] == "2.13"
    assert sum(recording["components"].values()) == recording["requested_peak_bytes"]
    assert [leak["tensors"] for leak in recording["leaks"]] == [3]


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_the_picture(stream: str, suffix: str, run) -> None:
    assert run("replay", stream, "--picture", f"space.{suffix}").code == 0

    text = Path(f"space.{suffix}").read_text()
    if suffix == "html":
        assert text.startswith("<!DOCTYPE html>")
        text = text[text.index("<svg") : text.index("</svg>") + 6]
    root = ET.fromstring(text)
    tips = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == 1 + 1 + 3 + 2 + 1  # blocks of the segments of 30, 12, 20, 2 and 16 MiB
    assert any("gradients; requested 15,728,640 bytes; train.py:11" in tip for tip in tips)
    assert any("; free" in tip for tip in tips)


WRONG = {
    "replay run.jsonl --alloc-conf max_split:3": "error: torch 2.13 has no allocator option 'max_split'.",
    "replay run.jsonl --alloc-conf allow_growth=maybe --allocator tensorflow": "error: allow_growth = maybe is invalid. The value must be",
    "replay run.jsonl --allocator tensorflow": "error: TensorFlow reserves the GPU's memory at the first allocation",
    "replay run.jsonl --allocator paddle-auto-growth --alloc-conf x=1": "error: Paddle has no setting 'x'.",
    "replay run.jsonl --gpu h1000": "error: 'h1000' is not a known GPU.",
    "replay run.jsonl --release 1.3": "error: the allocator of torch '1.3' is not modelled.",
    "replay run.jsonl --sweep max_split_size_mb": "error: 'max_split_size_mb' does not name a setting with values.",
    "replay run.jsonl --picture space.png": "error: space.png ends in '.png'.",
    "replay run.jsonl --allocator jemalloc": "error: Invalid value for '--allocator'",
    "replay run.jsonl --device 1": "error: --device 1 is given, but run.jsonl is not a memory snapshot.",
    "replay run.jsonl --memory-fraction 0.5 --allocator ideal": "error: a memory fraction needs the PyTorch allocator",
    "replay nowhere": "error: nowhere: no file, preset or hub id has this name.",
    "replay": "error: Missing argument 'EVENTS|SNAPSHOT|CONFIG': a file of events",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_command_lines(line: str, stream: str, run) -> None:
    outcome = run(*line.split())

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(WRONG[line])
    assert outcome.err.count("\n") == 1


def test_memory_over_the_run_is_drawn(stream: str, run, tmp_path: Path) -> None:
    outcome = run("replay", stream, "--plot", "run.html", "--units", "MiB")
    page = (tmp_path / "run.html").read_text()

    assert outcome.code == 0
    assert (
        "peak 65.0 MiB in backward_1" in page
    )  # 30 + 12 + 7, 1,024 bytes, and 15 in a segment of 16 that is not split
    assert "<h2>Phase log: allocated, MiB</h2>" in page
    assert run("replay", stream, "--plot", "run.gif").code == 2


@pytest.mark.parametrize(
    ("flags", "allocator"),
    [
        ("FLAGS_allocator_strategy=auto_growth", "paddle-auto-growth"),
        ("FLAGS_allocator_strategy=naive_best_fit", "paddle-naive-best-fit"),
        ("export FLAGS_gpu_memory_limit_mb=8192 FLAGS_free_idle_chunk=true", "paddle-auto-growth"),
    ],
)
def test_flags_of_paddle_choose_its_allocator(flags: str, allocator: str, stream: str, run) -> None:
    """As users write them; they are no settings of PyTorch."""
    code, out, _ = run("replay", stream, "--gpu", "t4", "--alloc-conf", flags, "--format", "json")

    assert code == 0
    assert json.loads(out)["allocator"] == allocator
    assert run("replay", stream, "--alloc-conf", "FLAGS_allocator_strategy=best").code == 2
