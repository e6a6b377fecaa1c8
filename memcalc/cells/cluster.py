"""Cells on an existing Dask cluster: each worker runs a cell in a separate process, as `local.py` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from memcalc.cells.cell import CellResult, Request
from memcalc.cells.local_processes import run_request
from memcalc.errors import MemcalcError, Unavailable
from memcalc.extras import installation
from memcalc.text import message_part

PATIENCE = 10  # seconds to wait for the scheduler's reply


def run_on_cluster(requests: Sequence[Request], address: str) -> Iterator[tuple[int, CellResult]]:
    """Run cells on the workers of a cluster; yield the index and the answer of each as it ends.

    A worker that is killed loses its running cells; the scheduler gives them to other workers. A cell that has lost as
    many workers as the scheduler allows (Dask's `allowed-failures`) is lost.

    Args:
        requests: requests of the cells.
        address: address of the scheduler, such as "tcp://10.0.0.1:8786".

    Raises:
        Unavailable: Dask is not installed, the scheduler does not reply, or a worker lacks a requirement of the cells.
    """
    distributed = _distributed()
    try:
        client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except Exception as error:  # noqa: BLE001 -- each kind of address has its own, such as of a missing package
        reason = str(error) or type(error).__name__
        raise Unavailable(
            f"no Dask scheduler answers at {message_part(address)}: {reason}. Check the address."
        ) from None
    try:
        futures = {client.submit(run_request, request, pure=False): n for n, request in enumerate(requests)}
        # Results are fetched in the client's own thread: the worker of a finished future may be killed before that.
        for future, found in distributed.as_completed(futures, with_results=True, raise_errors=False):
            yield futures[future], _answer(future.status, found, distributed)
    finally:
        with suppress(Exception):  # the connection may be closed already
            client.cancel([future for future in futures if not future.done()], force=True)
        client.close()


def _answer(status: str, found: Any, distributed: Any) -> CellResult:
    """Return the result of a cell.

    Args:
        status: of its future.
        found: its result; of an error its type, the exception and its traceback.
        distributed: the module.
    """
    if isinstance(found, CellResult):
        return found
    if status != "error":
        raise Unavailable(
            "the connection to the Dask scheduler ended. Results so far are saved: repeat the command to resume."
        )
    _, error, _ = found
    if isinstance(error, distributed.KilledWorker):
        return CellResult("lost", reason=f"its workers were killed: {error}".partition("\n")[0])
    if isinstance(error, MemcalcError):
        raise Unavailable(f"on a worker: {error}")
    if isinstance(error, ImportError):
        raise Unavailable(
            f"a worker cannot run memcalc: {error}. Install this version of memcalc in the environment of the workers."
        )
    return CellResult("failed", reason=f"{type(error).__name__}: {error}".partition("\n")[0])


def _distributed() -> Any:
    try:
        return import_module("distributed")
    except ImportError:
        raise Unavailable(
            f"--scheduler needs Dask, which is not installed. Run: {installation('cluster')}. Without --scheduler "
            "cells run in processes of this machine."
        ) from None
