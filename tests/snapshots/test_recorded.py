"""Snapshots that PyTorch's own allocator left, of five releases: the model must make the segments that the runs made."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.allocator import replay
from memcalc.events import EventType, timeline
from memcalc.ledger.component import Component
from memcalc.snapshots.composition import compose
from memcalc.snapshots.initial_state import beginning
from memcalc.snapshots.reading import read_snapshot
from memcalc.snapshots.recording import DeviceRecording, Snapshot
from memcalc.snapshots.stream import events_of
from memcalc.snapshots.verification import verify
from tests.thinning import quick_every

FOLDER = Path(__file__).parent / "recorded"
FILES = sorted(FOLDER.glob("*.pickle.gz"))
OF_GPUS = sorted((Path(__file__).parents[2] / "benchmarks/recordings/gpu").glob("*/snapshots/*.pickle.gz"))
RELEASES = ("2.1.2", "2.6.0", "2.9.1", "2.12.1", "2.13.0")
# Before 2.2 a snapshot had no settings: the user tells them.
TOLD = {"max-split": "max_split_size_mb:40", "roundup": "roundup_power2_divisions:4"}
MIB = 2**20


def opened(path: Path) -> tuple[Snapshot, DeviceRecording]:
    snapshot = read_snapshot(path)
    assert len(snapshot.recordings) == 1
    return snapshot, snapshot.recordings[0]


def named(path: Path) -> str:
    return path.name.removesuffix(".pickle.gz")


def test_every_release_and_setting_is_there() -> None:
    scenarios = {name.rpartition("-")[0] for name in map(named, FILES)}

    assert {named(path) for path in FILES} == {
        f"{scenario}-{release}" for scenario in scenarios for release in RELEASES
    }
    assert len(scenarios) == 7


@pytest.mark.parametrize("path", quick_every(4, FILES, first=1), ids=named)
def test_the_model_makes_the_segments_of_the_real_run(path: Path) -> None:
    """Every fetch and return, every address of a block, and every segment and block at the end."""
    snapshot, recording = opened(path)
    told = next((conf for word, conf in TOLD.items() if word in path.name), "")

    found = verify(snapshot, recording, told=told)

    assert found.difference == ""
    assert (found.agreed, found.gaps) == (len(recording.entries), 0)
    assert found.segments > 10
    assert found.from_start == ("ring" not in path.name)


@pytest.mark.parametrize("path", OF_GPUS, ids=lambda path: f"{path.parts[-3]} {named(path)}")
def test_the_replay_of_every_recorded_gpu_run_agrees(path: Path) -> None:
    """The snapshots are those of `make gpu-snapshots`, and others under other allocator settings."""
    snapshot, recording = opened(path)

    found = verify(snapshot, recording)

    assert found.difference == ""
    assert found.agreed == len(recording.entries) > 100


@pytest.mark.parametrize("path", [path for path in FILES if "max-split" in path.name and "2.1.2" not in path.name])
def test_a_difference_is_seen(path: Path) -> None:
    """The same recordings under rules that did not hold."""
    snapshot, recording = opened(path)
    snapshot.settings["PYTORCH_CUDA_ALLOC_CONF"] = ""

    found = verify(snapshot, recording)

    assert not found.agrees
    assert 0 < found.agreed < len(recording.entries)
    assert found.difference.startswith(f"at entry {found.agreed:,} of ")


@pytest.mark.parametrize("release", RELEASES)
def test_a_block_at_another_address_is_seen(release: str) -> None:
    snapshot, recording = opened(FOLDER / f"training-{release}.pickle.gz")
    entries = list(recording.entries)
    at = next(i for i, entry in enumerate(entries) if entry.action == "alloc" and i > 50)
    entries[at] = entries[at]._replace(address=entries[at].address + 512)

    found = verify(snapshot, DeviceRecording(0, tuple(entries), recording.segments, ()))

    assert not found.agrees
    assert found.agreed <= at


@pytest.mark.parametrize("path", quick_every(4, FILES), ids=named)
def test_the_events_have_the_recording_s_sums(path: Path) -> None:
    """What is alive at the end is what the segments say, requested bytes and blocks alike."""
    snapshot, recording = opened(path)
    events = events_of(snapshot, recording)
    requested = sum(
        block.requested_size
        for segment in recording.segments
        for block in segment.blocks
        if block.state == "active_allocated"
    )

    assert timeline(events).totals[-1] == requested
    assert sum(event.kind is EventType.OOM for event in events) == sum(e.action == "oom" for e in recording.entries)
    result = replay(events)
    if "ring" not in path.name and not any(e.action in ("segment_free", "segment_unmap") for e in recording.entries):
        assert result.end.reserved == sum(segment.total_size for segment in recording.segments)


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_memory_is_made_of(release: str) -> None:
    """The model has 2 x (256 x 1024 + 1024 + 1024 x 256 + 256) = 1,051,136 parameters of 4 bytes."""
    snapshot, recording = opened(FOLDER / f"training-{release}.pickle.gz")
    parameters = 4 * 2 * (256 * 1024 + 1024 + 1024 * 256 + 256)

    found = compose(snapshot, recording, beginning(recording))

    assert found.steps == 4
    assert found.by_component[Component.WEIGHTS] == parameters
    assert found.by_component[Component.GRADIENTS] == parameters
    assert found.by_component[Component.OPTIMIZER_STATE] == 2 * parameters
    workspaces = 2 * 8519680  # of cuBLAS, in forward's thread and in autograd's
    assert found.by_component[Component.LIBRARY_WORKSPACE] == workspaces + MIB * (release == "2.9.1")  # and cuBLASLt's
    assert sum(found.by_component.values()) == found.peak_bytes == sum(line.bytes for line in found.lines)
    assert any("record_snapshots.py" in line.location for line in found.lines)


@pytest.mark.parametrize("release", RELEASES)
def test_the_leak_is_found(release: str) -> None:
    """One clone of 64 x 256 float32 is kept in every step; those of steps 2 to 4 have outlived an optimizer step."""
    snapshot, recording = opened(FOLDER / f"training-{release}.pickle.gz")

    (leak,) = compose(snapshot, recording, beginning(recording)).leaks

    assert (leak.steps, leak.tensors, leak.bytes) == (3, 3, 3 * 64 * 256 * 4)
    assert leak.location.startswith("benchmarks/record_snapshots.py:")


@pytest.mark.parametrize("release", RELEASES[1:])
def test_steps_are_phases_of_the_stream(release: str) -> None:
    snapshot, recording = opened(FOLDER / f"training-{release}.pickle.gz")
    phases = [event.phase for event in events_of(snapshot, recording) if event.kind is EventType.PHASE]

    assert phases == [phase for step in (1, 2, 3, 4) for phase in (f"step_{step}", f"optimizer_step_{step}")] + [
        "step_5"
    ]
