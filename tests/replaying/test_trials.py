"""Sweeps, comparisons, and which setting is recommended."""

from __future__ import annotations

from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.events import Event, EventType, write_events
from memcalc.replaying.allocator_replay import COMPARED, swept

MIB = 2**20


@pytest.fixture
def fragmented(tmp_path: Path) -> Path:
    """The seed case of fragmentation: two free halves of 500 MiB that are not neighbors, and a request for 800.

    It fits a V100 of 16 GB next to 13 GiB that are held throughout, but for the fragmentation.
    """
    sizes = {"h": 13_760, "P": 600, "a": 100, "c": 500, "Q": 600, "b": 100, "R": 800}
    events = [Event(EventType.PHASE, phase="forward_1")]
    for word in ("+h", "+P", "-P", "+a", "+c", "+Q", "-Q", "+b", "-c", "+R"):
        name = ord(word[1])
        events.append(
            Event(EventType.ALLOC, name, sizes[word[1]] * MIB, line=f"model.py:{name}")
            if word[0] == "+"
            else Event(EventType.FREE, name)
        )
    path = tmp_path / "fragmented.jsonl"
    write_events(path, events)
    return path


def test_a_setting_that_makes_it_fit_is_recommended(fragmented: Path) -> None:
    replay = memcalc.replay(fragmented, gpu="v100-16gb", sweep=["max_split_size_mb=200,none"])

    assert replay.failed
    assert replay.result.failure is not None
    assert replay.result.failure.event == 10
    assert replay.recommendation is not None
    assert (replay.recommendation.trial.config, replay.recommendation.makes_it_fit) == ("max_split_size_mb:200", True)
    assert [trial.config for trial in replay.trials] == ["", "max_split_size_mb:200"]  # none is what was asked about


def test_the_gigabytes_saved_are_those_of_reserved_memory(fragmented: Path) -> None:
    replay = memcalc.replay(
        fragmented, alloc_conf="roundup_power2_divisions:2", sweep=["roundup_power2_divisions=2,none"]
    )

    assert replay.recommendation is not None
    assert replay.recommendation.trial.config == ""
    before, after = (trial.result.peak_reserved for trial in replay.trials if trial.result)
    assert replay.recommendation.saved_bytes == before - after > 0


def test_other_frameworks_are_compared_but_not_recommended(fragmented: Path) -> None:
    replay = memcalc.replay(fragmented, gpu="v100-16gb", compare=True)

    assert {trial.policy for trial in replay.trials} == {policy for policy, _ in COMPARED}
    assert replay.recommendation is not None
    assert replay.recommendation.trial.policy == "pytorch"
    results = {trial.policy: trial.result for trial in replay.trials}
    ideal = results["ideal"]
    assert ideal is not None
    assert ideal.fits


def test_allocators_that_need_a_gpu_are_skipped_with_a_reason(fragmented: Path) -> None:
    replay = memcalc.replay(fragmented, compare=True)

    refused = {trial.policy: trial.refused for trial in replay.trials if trial.refused}
    assert refused.keys() == {"paddle-naive-best-fit", "tensorflow"}
    assert all("Name one with --gpu" in words for words in refused.values())
    assert replay.gpu is None
    assert replay.result.fits  # a device that never runs out


def test_the_state_shown_is_that_of_the_failure(fragmented: Path) -> None:
    replay = memcalc.replay(fragmented, gpu="v100-16gb")

    assert replay.shown_event == 9
    free = [block.size for view in replay.segments for block in view.blocks if block.state == "inactive"]
    assert free == [500 * MIB, 500 * MIB]
    assert {event.line for event in replay.owners.values()} == {f"model.py:{ord(name)}" for name in "abh"}


def test_paddle_s_collector_changes_the_stream(tmp_path: Path) -> None:
    events = [
        Event(EventType.ALLOC, 1, MIB),
        Event(EventType.FREE, 1),
        Event(EventType.ALLOC, 2, MIB),
        Event(EventType.FREE, 2),
    ]
    write_events(tmp_path / "run.jsonl", events)

    def peak(flags: str, release: str | None = None) -> int:
        return memcalc.replay(
            tmp_path / "run.jsonl", allocator="paddle-auto-growth", alloc_conf=flags, release=release
        ).result.peak_allocated

    assert peak("") == MIB
    assert peak("FLAGS_eager_delete_tensor_gb=-1") == 2 * MIB
    assert peak("", release="1.5") == 2 * MIB


@pytest.mark.parametrize(
    ("policy", "config", "sweeps", "configs"),
    [
        ("pytorch", "", ["max_split_size_mb=32,none"], ["max_split_size_mb:32", ""]),
        ("pytorch", "max_split_size_mb:64,expandable_segments:True", ["max_split_size_mb=32,none"],
         ["expandable_segments:True,max_split_size_mb:32", "expandable_segments:True"]),
        ("pytorch", "", ["roundup_power2_divisions=[256:1,>:4],8"],
         ["roundup_power2_divisions:[256:1,>:4]", "roundup_power2_divisions:8"]),
        ("tensorflow", "FLAGS_x=1", ["allow_growth=true,false"], ["FLAGS_x=1,allow_growth=true", "FLAGS_x=1,allow_growth=false"]),
        ("paddle-auto-growth", "FLAGS_a=1", ["a=2", "b=3,none"], ["a=2,b=3", "a=2"]),
    ],
)  # fmt: skip
def test_sweeps(policy: str, config: str, sweeps: list[str], configs: list[str]) -> None:
    assert swept(policy, config, sweeps) == configs


@pytest.mark.parametrize("sweep", ["max_split_size_mb", "=1,2", "max_split_size_mb="])
def test_a_sweep_that_is_none_is_refused(sweep: str) -> None:
    with pytest.raises(InputError, match=r"does not name a setting with values. Write key=value,value"):
        swept("pytorch", "", [sweep])


def test_a_value_that_is_refused_ends_it_before_anything_long(fragmented: Path) -> None:
    with pytest.raises(InputError, match=r"max_split_size_mb = 8 is invalid. The value must be at least 20"):
        memcalc.replay(fragmented, sweep=["max_split_size_mb=8,32"])


def test_the_device_of_a_stream_of_events_is_refused(fragmented: Path) -> None:
    with pytest.raises(InputError, match="is not a memory snapshot"):
        memcalc.replay(fragmented, device=1)


def test_a_device_that_the_snapshot_has_not() -> None:
    path = Path(__file__).parents[1] / "snapshots" / "recorded" / "training-2.13.0.pickle.gz"
    with pytest.raises(InputError, match=r"the snapshot has no device 3. Choose from 0"):
        memcalc.replay(path, device=3)
