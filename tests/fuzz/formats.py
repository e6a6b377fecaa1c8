"""Every format of file that memcalc reads: a whole file of each, and what reads it."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from memcalc.cells.cell_sweep import ResultFile
from memcalc.cli.app import main
from memcalc.cli.messages import show_error
from memcalc.cli.streams import guarded_streams
from memcalc.errors import MemcalcError
from memcalc.validation.suite import load_suite
from tests.importers.cases import CASES
from tests.snapshots.test_refused import snapshot

ROOT = Path(__file__).parents[2]


class Answer(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Format(NamedTuple):
    """A format.

    Args:
        name: of a whole file.
        content: its bytes.
        read: has memcalc read a file of this format.
    """

    name: str
    content: bytes
    read: Callable[[Path], Answer]


def invoked(*arguments: str) -> Answer:
    """The command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return Answer(code, out.getvalue(), err.getvalue())


def command(*words: str) -> Callable[[Path], Answer]:
    """Reads a file by a command; "FILE" stands for its path."""
    return lambda path: invoked(*(str(path) if word == "FILE" else word for word in words))


def _suite(path: Path) -> Answer:
    """A suite is read, and nothing is measured: that takes seconds a run."""
    return _read(lambda: load_suite(path))


def _read(read: Callable[[], object]) -> Answer:
    err = io.StringIO()
    with redirect_stderr(err), guarded_streams():
        try:
            read()
        except MemcalcError as error:
            show_error(str(error))
            return Answer(error.exit_code, "", err.getvalue())
    return Answer(0, "", "")


def measured_records() -> bytes:
    """Two records of measured runs, with fewer phases."""
    lines = (ROOT / "benchmarks/recordings/measured/null-h100-80gb-torch-2.13.0.jsonl").read_text().splitlines()[:2]
    records = [json.loads(line) for line in lines]
    return b"".join(json.dumps(record | {"phases": record["phases"][-3:]}).encode() + b"\n" for record in records)


def _cells(path: Path) -> Answer:
    """The cells of an earlier sweep are read, and none is run."""
    return _read(lambda: ResultFile(path))


def _settings(path: Path) -> Answer:
    return invoked("check", str(ROOT / "configs/gpt2.yaml"), "--settings", str(path), "--format", "markdown")


CHAIN = b"""\
name: eight products
chain:
  resident: 1MiB
  blocks:
    - {name: product, count: 8, input: 4096, inside: 1KiB, output: 4096, flops: 1e6, left: 10}
    - {name: loss, input: 4096, output: 0, recomputable: false}
"""
SUITE = b"""\
steps: 2
runs:
  - gpt2 b=4 recipe=pure
  - {run: gpt2 s=128, alloc_conf: "expandable_segments:True"}
largest_batch:
  - gpt2 recipe=pure
"""
EVENTS = b"""\
{"format":"memcalc-events","version":1,"columns":["kind","storage","bytes","stream","component","phase","module",\
"operator","shape","dtype","line","time_us"]}
["phase",-1,0,0,null,"forward_1"]
["alloc",1,4096,0,"weights","forward_1","layers.0","aten.mm",[32,32],"float32","model.py:12",5]
["alloc",2,1048576,0,"activations","forward_1"]
["free",2]
["phase",-1,0,0,null,"backward_1"]
["alloc",3,2097152,0,"gradients","backward_1"]
["oom",-1,99999999999]
"""
CELLS = b"""\
{"cell":1,"digest":"70d9","by":"trace","values":{"micro_batch_size":1},"outcome":"measured","verdict":"fits",\
"allocated_bytes":3036676096,"reserved_bytes":3799,"device_bytes":46,"headroom_bytes":-1,"peak_phase":"backward_1",\
"seconds":5.12,"reason":""}
{"cell":1,"digest":"71aa","by":"trace","values":{"micro_batch_size":2},"outcome":"failed","verdict":null,\
"allocated_bytes":null,"reserved_bytes":null,"device_bytes":null,"headroom_bytes":null,"peak_phase":null,\
"seconds":1,"reason":"ValueError: four"}
"""
SETTINGS = b"""\
gpu = "h100-80gb"
margin = "5%"
budget = "79GiB"
paths = ["configs/gpt2.yaml"]
exclude = ["configs/drafts/**"]
set = ["b=2"]
[[rules]]
paths = ["**/gpt2*"]
gpu = "a100-80gb"
"""
BASELINE = json.dumps(
    {
        "schema_version": 1,
        "configs": [
            {
                "path": str(ROOT / "configs/gpt2.yaml"), "allocated_bytes": 5_000_000_000,
                "reserved_bytes": 5_500_000_000, "device_bytes": 6_000_000_000,
            }
        ],
    },
    indent=1,
).encode()  # fmt: skip
HF_CONFIG = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 32000,
        "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "rope_theta": 1e4,
    },
    indent=1,
).encode()  # fmt: skip

_LOG = (ROOT / "docs/examples/oom.log").read_bytes()

FORMATS: dict[str, Format] = {
    "config": Format(
        "run.yaml",
        (ROOT / "docs/examples/llama-3-70b-64xh100.yaml").read_bytes(),
        command("estimate", "FILE", "--format", "markdown"),
    ),
    "checked config": Format(
        "run.yaml",
        (ROOT / "configs/mixtral-8x7b.yaml").read_bytes(),
        command("check", "FILE", "--gpu", "h100-80gb", "--format", "github"),
    ),
    "hf config": Format("config.json", HF_CONFIG, command("estimate", "FILE", "--format", "json")),
    **{
        f"{name} file": Format(file, text.encode(), command("estimate", "FILE", *(f"--set={each}" for each in given)))
        for name, (file, text, given, _) in CASES.items()
    },
    "chain": Format("chain.yaml", CHAIN, command("recompute", "FILE", "--budget", "1200KiB")),
    "suite": Format("suite.yaml", SUITE, _suite),
    "records": Format("records.jsonl", measured_records(), command("measure", "--compare", "FILE", "--trace", "none")),
    "cells": Format("cells.jsonl", CELLS, _cells),
    "events": Format("events.jsonl", EVENTS, command("replay", "FILE", "--gpu", "h100-80gb")),
    "snapshot": Format("snapshot.pickle", pickle.dumps(snapshot()), command("replay", "FILE")),
    "settings": Format("memcalc.toml", SETTINGS, _settings),
    "baseline": Format(
        "main.json",
        BASELINE,
        command("check", str(ROOT / "configs/gpt2.yaml"), "--gpu", "h100-80gb", "--baseline", "FILE"),
    ),
    "log": Format("train.log", _LOG, command("oom", "FILE")),
    "packed log": Format("train.log.gz", gzip.compress(_LOG, mtime=0), command("oom", "FILE")),
}
