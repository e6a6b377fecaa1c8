"""Snapshots that were cut off: what is whole in them is read, what is missing is said, and nothing is executed."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.replaying.sources import source_of
from memcalc.snapshots.packing import pack
from memcalc.snapshots.reading import read_snapshot, unpacked
from memcalc.snapshots.recording import Snapshot
from memcalc.snapshots.unpickling import PARTS, TruncatedFile, UnsafePickle, loads_plain, salvaged
from memcalc.snapshots.verification import can_verify, verify
from tests.properties.specs import examples

FOLDER = Path(__file__).parent / "recorded"
NAMES = ("training-2.13.0", "training-2.1.2", "shuffled-delayed-2.12.1", "shuffled-expandable-ring-2.9.1")
CONTENTS = {name: gzip.decompress((FOLDER / f"{name}.pickle.gz").read_bytes()) for name in NAMES}
MARK = "MEMCALC_TEST_EXECUTED"


def cut(content: bytes, at: int) -> Snapshot:
    with pytest.raises(TruncatedFile):
        loads_plain(content[:at])
    return unpacked(pack(*salvaged(content[:at])))


@pytest.fixture(scope="module")
def whole() -> Callable[[str], Snapshot]:
    found = {name: read_snapshot(FOLDER / f"{name}.pickle.gz") for name in NAMES}
    return found.__getitem__


@examples(60)
@given(st.sampled_from(NAMES), st.floats(0.1, 1, exclude_max=True))
def test_what_is_left_is_the_beginning_of_the_whole(whole: Any, name: str, share: float) -> None:
    content, full = CONTENTS[name], whole(name)
    part = cut(content, int(len(content) * share))
    (complete,) = full.recordings
    (left,) = part.recordings

    def told(snapshot: Snapshot, entries: Any) -> list[Any]:  # stacks are numbered in the order of their first use
        return [(*entry[:5], snapshot.stacks[entry.stack], entry.pool) for entry in entries]

    count = len(left.entries)
    assert told(part, left.entries) == told(full, complete.entries[:count])
    assert PARTS[-1] in part.lacks
    assert part.lacks == PARTS[-len(part.lacks) :]
    assert left.is_cut == ("device_traces" in part.lacks)
    if "segments" not in part.lacks:
        assert len(left.segments) == len(complete.segments)
    else:
        assert (count, len(left.segments) <= len(complete.segments)) == (0, True)
    if "device_traces" not in part.lacks:
        assert count == len(complete.entries)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [0, 1, 10, 100])
def test_nothing_whole_is_refused(name: str, length: int) -> None:
    with pytest.raises(UnsafePickle, match="it is truncated"):
        cut(CONTENTS[name], length)


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_that_was_written_is_not_lost(name: str) -> None:
    """All of the history but what is in the last few hundred bytes, although a frame of the pickle is longer."""
    content = CONTENTS[name]
    (last,) = cut(content, len(content) - 1).recordings
    end = content.rindex(b"device_traces") if name == "training-2.1.2" else content.rindex(b"allocator_settings")
    (earlier,) = cut(content, (len(content) if name == "training-2.1.2" else end) - 600).recordings

    assert 0 < len(last.entries) - len(earlier.entries) <= 20


@examples(20)
@given(st.sampled_from(NAMES), st.floats(0.3, 1, exclude_max=True))
def test_what_is_left_is_checked_and_replayed(name: str, share: float) -> None:
    """From the first allocation on, every fetch and address of what is left; else there is nothing to compare with."""
    content = CONTENTS[name]
    part = cut(content, int(len(content) * share))
    (left,) = part.recordings
    recorded = source_of("cut", part, left).recorded
    assert recorded is not None

    if "ring" in name and left.is_cut:
        assert not can_verify(left, recorded.start)
    elif left.entries:
        assert can_verify(left, recorded.start)
        found = verify(part, left, recorded.start)
        assert (found.difference, found.agreed) == ("", len(left.entries))


def two_devices() -> dict[str, Any]:
    entries = [
        {"action": "alloc", "addr": 512 * i, "size": 512, "stream": 0, "frames": [{"name": "f", "filename": "a.py", "line": i}]}
        for i in range(1, 2500)
    ]  # fmt: skip
    block = {"address": 512, "size": 512, "requested_size": 8, "state": "active_allocated", "frames": []}
    segment = {
        "device": 0,
        "address": 512,
        "total_size": 512,
        "allocated_size": 512,
        "active_size": 512,
        "blocks": [block],
    }
    return {"segments": [segment], "device_traces": [entries, [], [dict(entry) for entry in entries]]}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_devices_are_distinguished(protocol: int) -> None:
    """The first one's history is whole, the second has none, the third's is cut: in batches of 1,000, and beyond."""
    content = pickle.dumps(two_devices(), protocol)

    found = cut(content, len(content) - 12_000)

    first, third = (next(r for r in found.recordings if r.device == device) for device in (0, 2))
    assert (len(first.entries), first.is_cut) == (2499, False)
    assert 2000 < len(third.entries) < 2499
    assert third.is_cut
    assert found.lacks == PARTS[1:]


def test_a_packed_file_may_be_cut_too(tmp_path: Path) -> None:
    packed = (FOLDER / "training-2.13.0.pickle.gz").read_bytes()
    path = tmp_path / "cut.pickle.gz"
    path.write_bytes(packed[: len(packed) * 3 // 4])

    (recording,) = read_snapshot(path).recordings

    assert 100 < len(recording.entries) < 474


def test_it_is_said_what_is_missing(run: Any, tmp_path: Path) -> None:
    content = CONTENTS["training-2.13.0"]
    path = tmp_path / "cut.pickle"
    path.write_bytes(content[: len(content) * 6 // 10])

    screen = run("replay", str(path))
    document = json.loads(run("replay", str(path), "--format", "json").out)["recording"]

    assert (screen.code, screen.err) == (0, "")
    words = " ".join(screen.out.split())
    assert (
        "THE FILE IS TRUNCATED. Missing: the history after its first 150 entries, the allocator's settings (name them "
        "with --alloc-conf) and the marks of steps. The report covers the rest."
    ) in words
    assert "over 150 entries the model allocated, freed and kept the same 12 segments" in words
    assert document["lacks"] == ["device_traces", "allocator_settings", "external_annotations"]
    assert (document["entries"], document["agrees"], document["from_first_allocation"]) == (150, True, True)


def test_where_the_beginning_is_lost_too_nothing_is_compared(run: Any, tmp_path: Path) -> None:
    content = CONTENTS["shuffled-expandable-ring-2.9.1"]
    path = tmp_path / "cut.pickle"
    path.write_bytes(content[: len(content) // 2])

    screen = run("replay", str(path))
    document = json.loads(run("replay", str(path), "--format", "json").out)["recording"]

    assert screen.code == 0
    assert "Not checked against the recording: neither the blocks in use before" in " ".join(screen.out.split())
    assert document["agrees"] is None


def test_a_whole_file_lacks_nothing(run: Any) -> None:
    path = FOLDER / "training-2.13.0.pickle.gz"

    assert json.loads(run("replay", str(path), "--format", "json").out)["recording"]["lacks"] == []
    assert "CUT OFF" not in run("replay", str(path)).out


class Call:
    """Pickles as a call of a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import os; os.environ[{MARK!r}] = '1'",)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.999])
def test_what_would_run_is_refused_in_a_cut_file_too(
    share: float, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MARK, raising=False)
    found = two_devices()
    found["segments"].insert(1, Call())
    content = pickle.dumps(found)
    path = tmp_path / "crafted.pickle"
    path.write_bytes(content[: int(len(content) * share)])

    outcome = run("replay", str(path))

    assert (outcome.code, outcome.out) == (2, "")
    assert "it refers to builtins.exec" in outcome.err
    assert MARK not in os.environ
