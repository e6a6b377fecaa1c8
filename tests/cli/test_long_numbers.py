"""Numbers of more digits than Python reads, wherever one can be given: refused in one short line."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.cli.app import main
from tests.fuzz.formats import EVENTS

LONG = "9" * 5_000


@pytest.mark.parametrize(
    "words",
    [
        "sweep gpt2 --vary b=1..N",
        "sweep gpt2 --vary b=N",
        "fit gpt2 --gpu t4 --gpus N",
        "estimate gpt2 --set b=N",
        "estimate gpt2 --set recompute=every-N",
        "estimate gpt2 --gpu t4 --alloc-conf max_split_size_mb:N",
        "check gpt2 --budget NGiB",
        "replay EVENTS --sweep max_split_size_mb=N",
        "replay EVENTS --alloc-conf max_split_size_mb:N",
        "replay EVENTS --allocator paddle-auto-growth --alloc-conf FLAGS_auto_growth_chunk_size_in_mb=N",
        "replay EVENTS --release N.N",
        "dry-run --gpu t4 --sweep --micro-batch-flag --b --micro-batches N -- true",
    ],
)
def test_a_number_of_thousands_of_digits(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events.jsonl"
    events.write_bytes(EVENTS)
    code = main([str(events) if word == "EVENTS" else word.replace("N", LONG) for word in words.split(" ")])
    out, err = capsys.readouterr()

    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 3_000
