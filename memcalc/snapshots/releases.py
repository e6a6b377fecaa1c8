"""The PyTorch version and settings of a snapshot: files do not contain the version, but their keys depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memcalc.allocator.pytorch.settings import Settings, parse_settings
from memcalc.allocator.pytorch.versions import Version
from memcalc.allocator.sizes import UNLIMITED
from memcalc.errors import InputError
from memcalc.snapshots.recording import DeviceRecording, Snapshot

# The version that introduced a key, in the settings or in an entry of the history; the newest first.
_SETTINGS_SINCE = (("max_cached_size", 13), ("max_round_threshold", 13))
_ENTRIES_SINCE = (("pool_id", 12), ("user_metadata", 10), ("compile_context", 8))


def releases_of(snapshot: Snapshot) -> tuple[Version, ...]:
    """Return the versions that may have written a file; several only if its settings were truncated."""
    found = release_of(snapshot)
    if snapshot.lacks and not snapshot.settings and found >= Version(2, _ENTRIES_SINCE[0][1]):
        return (found, *(Version(2, minor) for minor in sorted({minor for _, minor in _SETTINGS_SINCE})))
    return (found,)


def release_of(snapshot: Snapshot) -> Version:
    """Return the oldest version that writes such files; its rules hold up to the version of the next key."""
    for key, minor in _SETTINGS_SINCE:
        if key in snapshot.settings:
            return Version(2, minor)
    for key, minor in _ENTRIES_SINCE:
        if key in snapshot.keys:
            return Version(2, minor)
    return Version(2, 6)  # for this purpose, 2.1 to 2.7 have the same rules


def settings_of(snapshot: Snapshot, recording: DeviceRecording, version: Version, told: str = "") -> Settings:
    """Return the allocator's settings during the recording.

    A memory fraction is not recorded; its effect is in the history.

    Args:
        snapshot: the file.
        recording: one device of it.
        version: the PyTorch version, for the known options.
        told: the settings from the user, for files without settings (before torch 2.2).
    """
    known = snapshot.settings
    if known:
        try:
            return parse_settings(str(known["PYTORCH_CUDA_ALLOC_CONF"]), version)
        except (InputError, KeyError):
            return _from_fields(known)
    settings = parse_settings(told, version)
    maps = any(entry.action == "segment_map" for entry in recording.entries)
    return replace(settings, expandable_segments=settings.expandable_segments or maps)


def _from_fields(known: dict[str, Any]) -> Settings:
    """Return settings from single values, if the text has options unknown in this version."""
    largest = known.get("max_split_size", -1)
    divisions = known.get("roundup_power2_divisions")
    slots = tuple(divisions.values()) if isinstance(divisions, dict) and len(divisions) == 16 else None
    return Settings(
        max_split_size=UNLIMITED if largest < 0 else largest,
        expandable_segments=bool(known.get("expandable_segments", False)),
        roundup_power2_divisions=slots if slots and any(slots) else None,
    )
