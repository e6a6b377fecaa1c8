"""Several ranks on the CPU, under torchrun, with gloo: each as the trace of one rank says, byte for byte."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from memcalc.errors import InputError
from memcalc.measuring.ranks import Place, measure_rank, place
from memcalc.report.schema import result_schema
from memcalc.spec.loading import load

SMALL = ("gpt2", "recipe=pure", "attention=eager", "l=3", "d=64", "h=4", "V=96", "s=32", "b=2")
STATES = ("weights", "master_weights", "gradients", "optimizer_state")


def torchrun(ranks: int, record: Path, *overrides: str) -> dict[str, Any]:
    """The document that rank 0 prints."""
    sets = [word for override in (*SMALL[1:], *overrides) for word in ("--set", override)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "memcalc", "measure", SMALL[0], *sets, "--device", "cpu", "--steps", "2", "--format", "json"]
    done = subprocess.run(
        [*command, "--record", str(record)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ("engine=fsdp2", "zero_stage=3")),
        pytest.param(2, ("tensor_parallel=2", "sequence_parallel=true", "loss=vocab-parallel"), marks=pytest.mark.long),
        pytest.param(2, ("tensor_parallel=2", "recipe=mixed-20", "recompute=full"), marks=pytest.mark.long),
        pytest.param(
            4, ("tensor_parallel=2", "sequence_parallel=true", "engine=fsdp2", "zero_stage=3"), marks=pytest.mark.long
        ),
        pytest.param(2, ("engine=ddp",), marks=pytest.mark.long),
        pytest.param(4, ("engine=fsdp2", "zero_stage=3"), marks=pytest.mark.long),
        pytest.param(4, ("engine=fsdp2", "zero_stage=2"), marks=pytest.mark.long),
        pytest.param(4, ("engine=fsdp2", "zero_stage=3", "data_parallel_replicate=2"), marks=pytest.mark.long),
        pytest.param(4, ("engine=ddp",), marks=pytest.mark.long),
        pytest.param(4, ("engine=fsdp2", "zero_stage=3", "recompute=full"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_every_rank_is_as_its_trace(ranks: int, overrides: tuple[str, ...], tmp_path: Path) -> None:
    record = tmp_path / "records.jsonl"
    shards = ranks // 2 if "tensor_parallel=2" in overrides else ranks
    found = torchrun(ranks, record, f"data_parallel={shards}", *overrides)
    (traced,) = found["traces"]

    jsonschema.validate(found, result_schema())
    assert [each["rank"] for each in found["ranks"]] == list(range(ranks))
    assert [json.loads(line)["rank"] for line in record.read_text().splitlines()] == list(range(ranks))
    for phase in traced["phases"]:
        if not phase["phase"].startswith(("input", "forward", "optimizer_step")):
            continue  # in backward gradients are on their way, and the highest moment is now before one, now behind it
        for each in found["ranks"]:
            held = next(line for line in each["phases"] if line["name"] == phase["phase"])["components"]
            for state in STATES:  # what is sharded is as large on every rank
                assert held.get(state, 0) == phase["components"].get(state, 0)
    predicted = traced["peak"]["allocated_bytes"]
    for each in found["ranks"]:
        peak = max(line["peak_allocated_bytes"] for line in each["phases"])
        assert predicted * 0.999 <= peak <= predicted * 1.001


@pytest.mark.long
def test_several_machines_are_the_same_command(tmp_path: Path) -> None:
    """Two agents of torchrun on this one, which find each other by its rendezvous: one record a rank, one screen."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    sets = [
        word for each in (*SMALL[1:], "engine=fsdp2", "zero_stage=3", "data_parallel=2") for word in ("--set", each)
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "-m", "memcalc", "measure", SMALL[0]]
    command += [
        *sets,
        "--device",
        "cpu",
        "--steps",
        "2",
        "--format",
        "json",
        "--record",
        str(tmp_path / "records.jsonl"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        for _ in range(2)
    ]
    printed = [agent.communicate(timeout=300)[0] for agent in agents]

    assert [agent.returncode for agent in agents] == [0, 0]
    (document,) = (json.loads(text) for text in printed if text)
    assert [each["rank"] for each in document["ranks"]] == [0, 1]
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2


def test_the_configuration_has_as_many_ranks_as_were_started() -> None:
    with pytest.raises(InputError, match=r"data_parallel = 1, but 4 ranks were started\. Add --set data_parallel=4"):
        measure_rank(load("gpt2"), Place(0, 4, 0), "cpu", 1, None)
    split = load("gpt2", ("tensor_parallel=2",))
    with pytest.raises(InputError, match=r"tensor_parallel = 2, but 4 ranks were started\. Add --set data_parallel=2"):
        measure_rank(split, Place(0, 4, 0), "cpu", 1, None)
    with pytest.raises(InputError, match=r"but 3 ranks were started\. Start as many ranks"):
        measure_rank(split, Place(0, 3, 0), "cpu", 1, None)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, Place(9, 16, 1)),
    ],
)
def test_a_rank_knows_its_place(variables: dict[str, str], found: Place | None, monkeypatch: Any) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert place() == found
