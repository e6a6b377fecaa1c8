"""Crafted and broken files: each is refused with one message and exit code 2, and nothing in it is executed."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcalc.snapshots.unpickling import UnsafePickle, loads_plain
from tests.thinning import quick_every

MARK = "MEMCALC_TEST_EXECUTED"  # set in the environment by any payload that runs


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Custom:
    """An object of a class of its own."""

    def __setstate__(self, state: Any) -> None:
        os.environ[MARK] = "1"


class Persistent(pickle.Pickler):
    """Writes references to objects outside."""

    def persistent_id(self, obj: Any) -> Any:
        return "elsewhere" if obj == "here" else None


def snapshot(**changes: Any) -> dict[str, Any]:
    """A whole, tiny snapshot."""
    block = {"address": 4096, "size": 512, "requested_size": 8, "state": "active_allocated", "frames": []}
    segment = {
        "device": 0, "address": 4096, "total_size": 512, "allocated_size": 512, "active_size": 512, "stream": 0,
        "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "blocks": [block],
    }  # fmt: skip
    entry = {"action": "alloc", "addr": 4096, "size": 8, "stream": 0, "time_us": 1, "frames": []}
    return {"segments": [segment], "device_traces": [[entry]], "allocator_settings": {}, **changes}


def changed(path: str, value: Any) -> bytes:
    """The snapshot with one value replaced: "segments.0.blocks"."""
    whole = snapshot()
    *parents, last = path.split(".")
    place: Any = whole
    for key in parents:
        place = place[int(key) if key.isdecimal() else key]
    place[int(last) if last.isdecimal() else last] = value
    return pickle.dumps(whole)


def persistent() -> bytes:
    file = io.BytesIO()
    Persistent(file).dump(snapshot(segments=["here"]))
    return file.getvalue()


def nested_key(depth: int = 300_000) -> bytes:
    """A dictionary with a tuple in a tuple in a tuple as a key: hashing it overflows the stack of C."""
    return b"\x80\x04}N" + b"\x85" * depth + b"Ns."


GOOD = pickle.dumps(snapshot())
MARKING = f"import os; os.environ[{MARK!r}] = '1'"
WITHIN: dict[str, Any] = {  # payloads where a value is expected
    "os.system": Call(os.system, f"touch {MARK}"),
    "exec": Call(exec, MARKING),
    "eval": Call(eval, f"__import__('os').environ.__setitem__({MARK!r}, '1')"),
    "getattr": Call(getattr, os, "environ"),
    "an import": Call(__import__, "antigravity"),
    "a class": Custom,
    "an object": Custom(),
    "a path": Path("/etc/passwd"),
    "an open file": Call(open, "/etc/passwd"),
    "an array": Call(__import__("array").array, "b", [1]),
    "an ordered dictionary": Call(__import__("collections").OrderedDict),
    "a complex number": 1j,
    "a slice": slice(1),
    "a range": range(3),
}
CORPUS: dict[str, bytes] = {
    **{f"calls {name}": pickle.dumps(snapshot(segments=payload)) for name, payload in WITHIN.items() if name != "getattr"},
    "is a call by itself": pickle.dumps(WITHIN["exec"]),
    "calls under protocol 0": pickle.dumps(WITHIN["exec"], protocol=0),
    "calls under protocol 2": pickle.dumps(WITHIN["os.system"], protocol=2),
    "calls before the data": pickle.dumps(WITHIN["exec"])[:-1] + b"0" + GOOD[2:],
    "names a function in old style": b"cos\nsystem\n(S'touch MARK'\ntR.",
    "names a method": b"\x80\x04\x8c\x08builtins\x8c\x09dict.keys\x93.",
    "makes an instance": b"(S'x'\nios\nsystem\n.",
    "makes an instance, protocol 0": b"(cos\nsystem\nS'x'\no.",
    "has an extension code": b"\x80\x02\x82\x01.",
    "sets a state": b"\x80\x04}}\x8c\x01a\x8c\x01bsb.",
    "refers outside": persistent(),
    "refers outside, protocol 0": b"Pelsewhere\n.",
    "needs buffers": b"\x80\x05\x97.",
    "fills a memo of sixteen gigabytes": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "promises a long text": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
    "promises a long number": b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.",
    "promises a huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
    "overflows the stack": nested_key(),
    "has a list for a key": b"\x80\x04}]Ns.",
    "is empty": b"",
    "is cut off in its first segment": GOOD[: len(GOOD) // 4],
    "is not a pickle": b"\x80\x04this is no pickle",
    "is of a protocol to come": b"\x80\x63N.",
    "takes from an empty stack": b"\x80\x04.",
    "is text": b"\x80\x04\x8c\x05hello.",
    "is a number": b"\x80\x04K\x01.",
    "is a list": pickle.dumps([]),
    "is another dictionary": pickle.dumps({"a": 1}),
    "is a checkpoint": pickle.dumps({"model": {}, "optimizer": {}}),
    "has no traces": pickle.dumps({"segments": []}),
    "has segments that are none": changed("segments", {"a": 1}),
    "has a segment that is none": changed("segments.0", 5),
    "has no address": changed("segments.0.address", None),
    "has a negative size": changed("segments.0.blocks.0.size", -512),
    "has a size that is true": changed("segments.0.blocks.0.size", True),
    "has blocks that do not fill it": changed("segments.0.total_size", 1024),
    "has an unknown state": changed("segments.0.blocks.0.state", "melted"),
    "has traces that are none": changed("device_traces", [{"action": "alloc"}]),
    "has an entry that is none": changed("device_traces.0.0", 7),
    "has an entry without a size": changed("device_traces.0.0", {"action": "alloc", "addr": 1, "stream": 0}),
    "has a size in words": changed("device_traces.0.0.size", "8"),
    "has a size beyond all memory": changed("device_traces.0.0.size", 2**70),
    "has frames that are none": changed("device_traces.0.0.frames", [1]),
    "has a pool that is none": changed("segments.0.segment_pool_id", "default"),
    "is packed rubbish": b"\x1f\x8b" + b"rubbish" * 20,
    "is packed and calls": gzip.compress(pickle.dumps(WITHIN["exec"])),
}  # fmt: skip


@pytest.mark.parametrize("name", quick_every(3, CORPUS))
def test_it_is_refused_and_nothing_runs(name: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "crafted.pickle"
    path.write_bytes(CORPUS[name])

    outcome = run("replay", str(path))

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {path}: this is not a memory snapshot: ")
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.err
    assert MARK not in os.environ
    assert list(tmp_path.iterdir()) == [path]


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 30


def test_the_payloads_would_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is dangerous: an ordinary unpickler executes it."""
    monkeypatch.delenv(MARK, raising=False)

    pickle.loads(CORPUS["is a call by itself"])

    assert os.environ.pop(MARK) == "1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("calls os.system", "it refers to posix.system; a snapshot has only lists, dictionaries, numbers and strings"),
        ("is cut off in its first segment", "it is truncated before its first complete part: writing or"),
        ("refers outside", "it refers to objects outside the file"),
        ("is a checkpoint", "it is a checkpoint, not a memory snapshot"),
        ("has no traces", "it lacks segments and device_traces"),
        ("has blocks that do not fill it", "the blocks of the segment at 4096 make 512 bytes of its 1024"),
        ("has an unknown state", "the state of a block is 'melted'"),
    ],
)
def test_the_reason_is_reported(name: str, words: str, run: Any, tmp_path: Path) -> None:
    (tmp_path / "crafted.pickle").write_bytes(CORPUS[name])

    assert words in run("replay", str(tmp_path / "crafted.pickle")).err


@pytest.mark.parametrize("value", [None, True, 3, -1.5, "text", b"bytes", [1], (1, 2), {"a": {1, 2}}, frozenset([1])])
def test_plain_values_are_read(value: object) -> None:
    for protocol in range(4, pickle.HIGHEST_PROTOCOL + 1):
        assert loads_plain(pickle.dumps(value, protocol)) == value


def test_every_opcode_that_names_something_is_refused() -> None:
    """Whatever can lead to a call goes through a name or a reference; their opcodes are these."""
    naming = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
    programs = {
        "GLOBAL": b"cos\nsystem\n.", "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "INST": b"(ios\nsystem\n.", "EXT1": b"\x82\x01.", "EXT2": b"\x83\x01\x00.", "EXT4": b"\x84\x01\x00\x00\x00.",
        "PERSID": b"Pa\n.", "BINPERSID": b"NQ.",
    }  # fmt: skip
    assert naming == programs.keys() <= {opcode.name for opcode in pickletools.opcodes}

    for program in programs.values():
        with pytest.raises(UnsafePickle):
            loads_plain(program)


def test_a_missing_file_is_its_own_error(run: Any) -> None:
    code, out, err = run("replay", "nowhere.pickle")

    assert (code, out) == (2, "")
    assert err.startswith("error: nowhere.pickle: the file cannot be read: No such file or directory. Name a file of ")


def test_a_whole_one_is_read(run: Any, tmp_path: Path) -> None:
    (tmp_path / "good.pickle").write_bytes(GOOD)

    assert run("replay", str(tmp_path / "good.pickle")).code == 0
