"""Cells on a Dask cluster: two workers on this machine, one of them killed in mid-run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from memcalc import api
from memcalc.cells.cell import GridCell
from memcalc.errors import Unavailable


@pytest.mark.long
def test_a_worker_that_is_killed_loses_no_other_cell(tmp_path: Path) -> None:
    """Its cell is given to the other. The figures are those of processes on this machine."""
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
    pytest.importorskip("torch")
    killed: list[int] = []
    axes = {"b": [1, 2, 3, 4, 5, 6]}
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        workers = list(client.run(os.getpid).values())

        def kill(cell: GridCell | None, done: int, total: int) -> None:
            assert total == len(axes["b"])
            if cell is not None and not killed:
                killed.append(workers[0])
                os.kill(workers[0], signal.SIGKILL)

        run = ("gpt2", axes, "l=1", "s=64")
        found = api.sweep_runs(
            *run, gpu="h100-80gb", cells=tmp_path / "far", steps=2, scheduler=cluster.scheduler_address, tell=kill
        )
    here = api.sweep_runs(*run, gpu="h100-80gb", cells=tmp_path / "here", steps=2)

    assert len(workers) == 2
    assert killed
    answers = [(cell.answer.outcome, cell.answer.reserved_bytes) for cell in found.cells if cell.answer]
    assert [outcome for outcome, _ in answers] == ["measured"] * len(axes["b"])
    assert answers == [(cell.answer.outcome, cell.answer.reserved_bytes) for cell in here.cells if cell.answer]
    assert len((tmp_path / "far").read_text().splitlines()) == len(axes["b"])


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "ucx://127.0.0.1:9", "inproc://a", "nope", ""])
def test_an_address_without_a_scheduler(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.cells.cluster.PATIENCE", 0.3)

    with pytest.raises(Unavailable, match=rf"no Dask scheduler answers at {address}: .+\. Check the address\."):
        api.sweep_runs("gpt2", {"b": [1]}, cells=tmp_path / "cells", scheduler=address)
