"""Logs made to be slow: words of messages without end are read at some megabytes a second, and real messages found."""

from __future__ import annotations

import io
import random
import time

import pytest

from memcalc.diagnosis.log_scanner import Scanner
from memcalc.diagnosis.report_assembly import collect
from tests.thinning import quick_every

MESSAGE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.56 GiB already "
    "allocated; 38.44 MiB free; 14.80 GiB reserved in total by PyTorch)"
)
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.00 MiB is free. "
)
LINES = {
    "beginnings": "CUDA out of memory. Tried to allocate ",
    "almost messages": "CUDA out of memory. Tried to allocate 2.00 GiB",
    "prefixes": "[rank1]:" * 6 + " out of memory",
    "triggers": "ried to allocate ut of memory MaxInUse Attempting to reserve",
    "colors": "\x1b[31m" * 30 + "out of memory",
    "short lines": "out of memory",
    "attempts": "Attempting to reserve 5",
    "long lines": "out of memory " * 2_000,
    "one long message": FULL + "Process 1 has 79.09 GiB memory in use. " * 3_000,
    "overwritten lines": "a\r" * 30 + "out of memory",
    "line feeds": "",
    "shapes": "OOM when allocating tensor with shape[" + "123456," * 300 + "] and type float on /job:localhost",
    "shapes without an end": "OOM when allocating tensor with shape[" + "123456," * 11 + "x",
    "paddle's": "Out of memory error on GPU 7. Cannot allocate 123456789.000GB memory on GPU 7, ",
}
MEGABYTES_PER_SECOND = 5  # of this process's time


def log_of(name: str, size: int) -> bytes:
    """A log of lines of a kind: `random` has numbers that differ from line to line."""
    rng = random.Random(22)
    lines: list[str] = []
    length = 0
    while length < size:
        if name == "different messages":
            line = MESSAGE.replace("20.00", f"{rng.randrange(1, 10**6)}.00")
        elif name == "different ranks":
            line = f"[rank{len(lines) % 600}]: CUDA out of memory. Tried to allocate {len(lines)}.00 Gi"
        elif name == "everything":
            line = rng.choice(list(LINES.values()))
        else:
            line = LINES[name]
        lines.append(line)
        length += len(line) + 1
    return "\n".join(lines).encode()


def seconds_for(log: bytes) -> float:
    """This process's time, the quicker of two goes: others use the machine, too."""
    found = []
    for _ in range(2):
        began = time.process_time()
        collect(Scanner().reports(io.BytesIO(log)))
        found.append(time.process_time() - began)
        if len(log) / found[-1] / 1e6 >= MEGABYTES_PER_SECOND:
            break
    return min(found)


KINDS = (*LINES, "different messages", "different ranks", "everything")


@pytest.mark.parametrize("name", quick_every(10, KINDS))
def test_a_log_that_was_made_to_be_slow_does_not_hang(name: str) -> None:
    assert seconds_for(log_of(name, 1_000_000)) < 5  # a tenth of the bar at the least, on a busy machine


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_adversarial_logs_are_read_at_five_megabytes_a_second(name: str) -> None:
    size = 10_000_000

    assert size / seconds_for(log_of(name, size)) / 1e6 >= MEGABYTES_PER_SECOND


@pytest.mark.parametrize("name", quick_every(3, ["almost messages", "prefixes", "short lines"]))
def test_a_message_behind_them_is_found(name: str) -> None:
    """Long after the time for reading line after line is used up."""
    log = log_of(name, 5_000_000) + f"\n{MESSAGE}\n".encode()
    found = collect(Scanner().reports(io.BytesIO(log)))

    assert [report.line for report in found.reports] == [log.count(b"\n")]
