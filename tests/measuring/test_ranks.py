"""Several ranks on the CPU, under torchrun, with gloo: each as the trace of one rank says, byte for byte."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.measuring.ranks import RankPlace, device_of_rank, place, refuse_other_ranks
from memcalc.measuring.records import RECORDS
from memcalc.spec.loading import load
from tests.schemas import validate_result

SMALL = ("gpt2", "recipe=pure", "attention=eager", "l=3", "d=64", "h=4", "V=96", "s=32", "b=2")
ALONE = os.environ | {"OMP_NUM_THREADS": "1"}
STATES = ("weights", "master_weights", "gradients", "optimizer_state")


def measuring(record: Path, *overrides: str) -> list[str]:
    """The arguments of a run."""
    sets = [word for override in (*SMALL[1:], *overrides) for word in ("--set", override)]
    return ["measure", SMALL[0], *sets, "--device", "cpu", "--steps", "2", "--format", "json", "--record", str(record)]


def torchrun(ranks: int, arguments: list[str]) -> list[str]:
    """The command that users type."""
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *agent, "-m", "memcalc", *arguments]


def forked(ranks: int, arguments: list[str]) -> list[str]:
    """The same ranks in a third of the time: torch is imported once."""
    return [sys.executable, str(Path(__file__).with_name("forked.py")), str(ranks), str(free_port()), *arguments]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("ranks", "overrides", "start"),
    [
        pytest.param(2, "engine=ddp", torchrun, marks=pytest.mark.long),
        (2, "engine=fsdp2 zero_stage=3", forked),
        pytest.param(2, "engine=fsdp2 zero_stage=3", torchrun, marks=pytest.mark.long),
        pytest.param(4, "engine=fsdp2 zero_stage=3", forked, marks=pytest.mark.long),
        pytest.param(2, "tensor_parallel=2 sequence_parallel=true loss=vocab-parallel", forked, marks=pytest.mark.long),
        pytest.param(2, "tensor_parallel=2 recipe=mixed-20 recompute=full", forked, marks=pytest.mark.long),
        pytest.param(
            4, "tensor_parallel=2 sequence_parallel=true engine=fsdp2 zero_stage=3", forked, marks=pytest.mark.long
        ),
        pytest.param(4, "engine=fsdp2 zero_stage=2", forked, marks=pytest.mark.long),
        pytest.param(4, "engine=fsdp2 zero_stage=3 data_parallel_replicate=2", forked, marks=pytest.mark.long),
        pytest.param(4, "engine=ddp", forked, marks=pytest.mark.long),
        pytest.param(4, "engine=fsdp2 zero_stage=3 recompute=full", forked, marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_rank_is_as_its_trace(
    ranks: int, overrides: str, start: Callable[[int, list[str]], list[str]], tmp_path: Path
) -> None:
    record = tmp_path / "records.jsonl"
    shards = ranks // 2 if "tensor_parallel=2" in overrides else ranks
    command = start(ranks, measuring(record, f"data_parallel={shards}", *overrides.split()))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ALONE)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    (traced,) = found["traces"]

    validate_result(found)
    assert [each["rank"] for each in found["ranks"]] == list(range(ranks))
    assert [json.loads(line)["rank"] for line in record.read_text().splitlines()] == list(range(ranks))
    for phase in traced["phases"]:
        if not phase["phase"].startswith(("input", "forward", "optimizer_step")):
            continue  # in backward gradients are on their way, and the peak is now before one, now behind it
        for each in found["ranks"]:
            held = next(line for line in each["phases"] if line["name"] == phase["phase"])["components"]
            for state in STATES:  # what is sharded is as large on every rank
                assert held.get(state, 0) == phase["components"].get(state, 0)
    predicted = traced["peak"]["allocated_bytes"]
    for each in found["ranks"]:
        peak = max(line["peak_allocated_bytes"] for line in each["phases"])
        assert predicted * 0.999 <= peak <= predicted * 1.001


@pytest.mark.long
@pytest.mark.parametrize("after", [4.0, 6.0, 8.0, 10.0])
def test_an_interrupt_ends_all_ranks_and_leaves_no_half_record(after: float, tmp_path: Path) -> None:
    """Ctrl-C reaches torchrun and its ranks, at whatever they are; the record has all of a run's ranks or none."""
    record = tmp_path / "records.jsonl"
    command = torchrun(2, measuring(record, "engine=fsdp2", "zero_stage=3", "data_parallel=2"))
    started = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ALONE, start_new_session=True
    )
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):  # it was done by then
        os.killpg(started.pid, signal.SIGINT)
    started.wait(timeout=60)

    assert [each["rank"] for each in RECORDS.read(record)] in ([], [0, 1])
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)  # nobody is left


@pytest.mark.long
def test_several_machines_are_the_same_command(tmp_path: Path) -> None:
    """Two agents of torchrun on this one, which find each other by its rendezvous: one record a rank, one screen."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "-m", "memcalc"]
    command += measuring(tmp_path / "records.jsonl", "engine=fsdp2", "zero_stage=3", "data_parallel=2")
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ALONE)
        for _ in range(2)
    ]
    printed = [agent.communicate(timeout=300)[0] for agent in agents]

    assert [agent.returncode for agent in agents] == [0, 0]
    (document,) = (json.loads(text) for text in printed if text)
    assert [each["rank"] for each in document["ranks"]] == [0, 1]
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2


def test_the_configuration_has_as_many_ranks_as_were_started() -> None:
    with pytest.raises(InputError, match=r"data_parallel = 1, but 4 ranks were started\. Add --set data_parallel=4"):
        refuse_other_ranks(load("gpt2"), 4)
    split = load("gpt2", ("tensor_parallel=2",))
    with pytest.raises(InputError, match=r"tensor_parallel = 2, but 4 ranks were started\. Add --set data_parallel=2"):
        refuse_other_ranks(split, 4)
    with pytest.raises(InputError, match=r"but 3 ranks were started\. Start as many ranks"):
        refuse_other_ranks(split, 3)


@pytest.mark.parametrize(("asked", "found"), [("cpu", "cpu"), ("cuda", "cuda:1"), (None, "cuda:1")])
def test_a_rank_takes_the_gpu_of_its_number(asked: str | None, found: str) -> None:
    """Rank 9 is the second on its machine."""
    assert device_of_rank(asked, RankPlace(9, 16, 1)) == found


@pytest.mark.parametrize("asked", ["cuda:1", "null:h100-80gb"])
def test_one_device_is_not_for_all_ranks(asked: str) -> None:
    with pytest.raises(InputError, match=rf"--device {asked} does not suit 16 ranks\. Name cpu or cuda: .* dry-run"):
        device_of_rank(asked, RankPlace(9, 16, 1))


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, RankPlace(9, 16, 1)),
    ],
)
def test_a_rank_knows_its_place(variables: dict[str, str], found: RankPlace | None, monkeypatch: Any) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert place() == found
