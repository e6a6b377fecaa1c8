"""Snapshots that the model itself writes agree with it, whole and with their beginning lost; nonsense is no traceback."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator import history
from memcalc.allocator.pytorch.dump import snapshot as dumped
from memcalc.events import Event
from memcalc.replaying import replay_source
from memcalc.replaying.sources import source_of
from memcalc.snapshots.packing import pack
from memcalc.snapshots.reading import unpacked
from memcalc.snapshots.recording import Snapshot
from memcalc.snapshots.unpickling import UnsafePickle
from memcalc.snapshots.verification import verify
from tests.allocator.running import MIB
from tests.allocator.streams import event_streams
from tests.properties.specs import examples

CONFIGS = ("", "expandable_segments:True", "max_split_size_mb:40", "roundup_power2_divisions:4")
CAPACITY = 700 * MIB


def written(events: list[Event], config: str, capacity: int | None = None) -> dict[str, Any]:
    """The snapshot of a replay with the rules of 2.6, which break ties by address."""
    found = dumped(history(events, config, "2.6", capacity))
    found["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = config
    return found


def opened(found: dict[str, Any]) -> Snapshot:
    return unpacked(pack(pickle.loads(pickle.dumps(found))))


@pytest.mark.parametrize("config", CONFIGS)
@examples(25)
@given(event_streams(streams=True))
def test_a_snapshot_of_the_model_agrees_with_the_model(config: str, events: list[Event]) -> None:
    snapshot = opened(written(events, config))

    for recording in snapshot.recordings:
        found = verify(snapshot, recording)
        assert found.difference == ""
        assert found.from_start


@pytest.mark.parametrize("config", CONFIGS)
@examples(30)
@given(event_streams(streams=True), st.integers(1, 60))
def test_the_beginning_may_be_lost(config: str, events: list[Event], lost: int) -> None:
    """What a full ring buffer overwrites follows from the end."""
    found = written(events, config)
    found["device_traces"][0] = found["device_traces"][0][lost:]
    snapshot = opened(found)

    for recording in snapshot.recordings:
        outcome = verify(snapshot, recording)
        assert outcome.difference == ""
        assert outcome.gaps == 0


@examples(30)
@given(event_streams())
def test_running_out_agrees_too(events: list[Event]) -> None:
    snapshot = opened(written(events, "", CAPACITY))

    for recording in snapshot.recordings:
        assert verify(snapshot, recording).difference == ""


ADDRESSES = st.sampled_from([0, 512, 4096, 4608, 2**21, 2**21 + 512, 2**40])
ENTRIES = st.fixed_dictionaries(
    {
        "action": st.sampled_from(
            "alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap oom".split()
        ),
        "addr": ADDRESSES,
        "size": st.sampled_from([0, 1, 512, 1024, 2**21, 20 * 2**20, 2**62]),
        "stream": st.integers(0, 1),
        "time_us": st.integers(0, 3),
        "frames": st.just([]),
    }
)
BLOCKS = st.lists(
    st.tuples(
        st.sampled_from([0, 512, 1024, 2**20, 2**21]),
        st.sampled_from(["active_allocated", "active_pending_free", "inactive"]),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def nonsense(draw: st.DrawFn) -> dict[str, Any]:
    """A snapshot of the right shape with unrelated history and segments."""
    segments = []
    for address, blocks, small, expandable in draw(
        st.lists(st.tuples(ADDRESSES, BLOCKS, st.booleans(), st.booleans()), max_size=3)
    ):
        segments.append(
            {
                "device": 0, "address": address, "total_size": sum(size for size, _ in blocks), "allocated_size": 0,
                "active_size": 0, "stream": 0, "segment_type": "small" if small else "large",
                "segment_pool_id": (0, int(expandable and small)), "is_expandable": expandable,
                "blocks": [{"size": size, "requested_size": size, "state": state} for size, state in blocks],
            }
        )  # fmt: skip
    return {"segments": segments, "device_traces": [draw(st.lists(ENTRIES, max_size=12))], "allocator_settings": {}}


@examples(150)
@given(nonsense(), st.sampled_from(CONFIGS))
def test_nonsense_of_the_right_shape_is_rejected_without_a_traceback(found: dict[str, Any], config: str) -> None:
    found["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = config
    snapshot = opened(found)

    for recording in snapshot.recordings:
        replay = replay_source(source_of("test", snapshot, recording))
        assert replay.verification is not None


WHOLE = written([Event("alloc", 1, 1000), Event("alloc", 2, 3 * MIB), Event("free", 1)], "")  # type: ignore[arg-type]
VALUES = st.sampled_from([None, True, -1, 2**70, 1.5, "x", b"x", [], {}, (), [1], {"a": 1}, (1, 2), float("nan")])


@examples(150)
@given(st.data(), VALUES)
def test_a_value_of_another_type_is_refused_or_does_not_matter(data: st.DataObject, value: Any) -> None:
    found = copy.deepcopy(WHOLE)
    place: Any = found
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = value

    try:
        snapshot = unpacked(pack(found))
    except UnsafePickle:
        return
    else:
        assert all(replay_source(source_of("test", snapshot, one)).verification for one in snapshot.recordings)
