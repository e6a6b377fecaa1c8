"""What PyTorch's allocator writes is read back, to the rounding of what it prints; and no text takes forever."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.allocator.pytorch.messages import (
    DeviceProcess,
    OutOfMemoryFigures,
    format_size,
    out_of_memory,
    rejected,
)
from memcalc.allocator.pytorch.versions import NEWEST, OLDEST, Version
from memcalc.diagnosis.diagnosis import Diagnosis, diagnose
from memcalc.diagnosis.sizes import PrintedSize, read_size
from memcalc.errors import InputError
from tests.thinning import quick_every

ROOT = Path(__file__).parents[2]

sizes = st.one_of(st.integers(0, 2**12), st.integers(0, 2**24), st.integers(0, 2**38))
processes = st.lists(
    st.builds(DeviceProcess, pid=st.one_of(st.none(), st.integers(1, 2**22)), bytes=sizes),
    max_size=9,
    unique_by=lambda process: process.pid,
)


def read(text: str) -> Diagnosis:
    return diagnose("a.log", io.BytesIO(text.encode()))


def near(figure: PrintedSize | None, size: int) -> bool:
    return figure is not None and abs(figure.bytes - size) <= figure.slack


@given(sizes)
def test_a_size_is_known_to_half_of_its_last_digit(size: int) -> None:
    assert near(read_size(format_size(size).replace(" ", "")), size)


@given(
    st.tuples(sizes, sizes, sizes, sizes),
    st.tuples(sizes, sizes, sizes),
    st.one_of(st.none(), sizes),
    st.integers(0, 1023),
    processes,
    st.integers(OLDEST, NEWEST),
)
def test_what_is_written_is_read(
    device: tuple[int, int, int, int],
    pools: tuple[int, int, int],
    allowed: int | None,
    number: int,
    holders: list[DeviceProcess],
    minor: int,
) -> None:
    segment, capacity, free, allocated = device
    private, cached, _ = pools
    shortage = OutOfMemoryFigures(
        segment=segment,
        capacity=capacity,
        free=free,
        allocated=allocated,
        reserved=allocated + private + cached,
        private=private,
        allowed=allowed,
        device=number,
        processes=holders,
    )
    version = Version(2, minor)
    finding = read(out_of_memory(shortage, version)).finding
    report, figures = finding.report, finding.report.figures

    assert (report.device_type, report.device) == ("cuda", number)
    assert near(figures.asked, segment)
    assert near(figures.capacity, capacity)
    assert near(figures.free, free)
    assert near(figures.allocated, allocated)
    assert near(figures.reserved, allocated + private + cached)
    assert (figures.private is None) == (private == 0)
    assert private == 0 or near(figures.private, private)
    assert (figures.allowed is None) == (allowed is None)
    assert allowed is None or near(figures.allowed, allowed)
    assert [holder.pid for holder in report.holders] == [each.pid for each in holders if each.pid is not None]
    others = [each for each in holders if each.pid is not None]
    assert all(near(holder.bytes, each.bytes) for holder, each in zip(report.holders, others, strict=True))
    own = [each.bytes for each in holders if each.pid is None]
    assert figures.process is None if not own else near(figures.process, own[0])
    assert report.setting == f"{version.advised_variable}=expandable_segments:True"


@given(sizes)
def test_a_rejection_is_read(size: int) -> None:
    finding = read(rejected(size)).finding

    assert near(finding.report.figures.asked, size)
    assert finding.cause.name == "a limit"


def out_of_memory_async(
    *, size: int, allocated: int, capacity: int, free: int, allowed: int | None, device: int
) -> str:
    """The message of backend:cudaMallocAsync; without a memory fraction, its limit is the largest 64-bit number.

    Source: torch 2.13 c10/cuda/CUDAMallocAsyncAllocator.cpp, mallocAsync.
    """
    limit = 2**64 - 1 if allowed is None else allowed
    return "\n".join(
        [
            f"Allocation on device {device} would exceed allowed memory. (out of memory)",
            f"Currently allocated     : {format_size(allocated)}",
            f"Requested               : {format_size(size)}",
            f"Device limit            : {format_size(capacity)}",
            f"Free (according to CUDA): {format_size(free)}",
            "PyTorch limit (set by user-supplied memory fraction)",
            f"                        : {format_size(limit)}",
        ]
    )


@given(st.tuples(sizes, sizes, sizes, sizes), st.one_of(st.none(), sizes), st.integers(0, 31))
def test_the_message_of_cuda_malloc_async_is_read(
    parts: tuple[int, int, int, int], allowed: int | None, number: int
) -> None:
    size, allocated, capacity, free = parts
    text = out_of_memory_async(
        size=size, allocated=allocated, capacity=capacity, free=free, allowed=allowed, device=number
    )
    report = read(text).finding.report
    figures = report.figures

    assert report.device == number
    assert near(figures.asked, size)
    assert near(figures.allocated, allocated)
    assert near(figures.capacity, capacity)
    assert near(figures.free, free)
    assert (figures.allowed is None) == (allowed is None)


WORDS = st.sampled_from(
    [
        *"CUDA out of memory. Tried to allocate|MiB|GiB|bytes|(GPU 0;|total capacity;|free;|9|.|1.5 GiB|, \n\r".split(
            "|"
        ),
        "[rank1]: ",
        "\x1b[31m",
        "GPU 0 has a total capacity of",
        "Process 1 has",
        "Of the allocated memory",
        "OOM when allocating tensor with shape[1,2,",
        "] and type float on /job:x/device:GPU:0",
        "Stats: \nLimit: 5\nInUse: 4\nMaxInUse: 4",
        "Out of memory error on GPU 0. Cannot allocate",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes.",
        "Ran out of memory in memory space hbm. Used 21.95G of 15.48G hbm. Exceeded hbm capacity by 6.47G.",
        '  File "a.py", line 1, in step',
        "\x00",
    ]
)


@given(st.lists(WORDS, max_size=60).map("".join))
def test_no_text_is_a_traceback(text: str) -> None:
    """Whatever stands there: a diagnosis with figures that are not negative, or one clear message."""
    try:
        diagnosis = read(text)
    except InputError as error:
        if "no out-of-memory message" not in error.problem:
            raise
        return
    for finding in diagnosis.findings:
        assert all(figure.low >= 0 for figure in finding.report.figures.by_name().values())
        assert 1 <= finding.report.line <= text.count("\n") + 1


HOSTILE = {
    "heads": "CUDA out of memory. Tried to allocate 1.00 MiB. " * 20_000,
    "lines of heads": "CUDA out of memory. Tried to allocate 1.00 MiB (GPU 0;\n" * 20_000,
    "processes": "CUDA out of memory. Tried to allocate 1.00 MiB. GPU 0 has a total capacity of 1.00 GiB of which 0 bytes "
    "is free. " + "Process 1 has 1.00 GiB memory in use. " * 20_000,
    "digits": "Tried to allocate " + "9" * 1_000_000,
    "prefixes": ("[rank1]: 2021-01-01 00:00:00 INFO " * 30_000 + "out of memory\n") * 1,
    "brackets": "(" * 500_000 + "Tried to allocate" + "[" * 500_000,
    "operators": "Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.00MiB (rounded to 5)requested by op "
    + "a" * 1_000_000,
    "shapes": "OOM when allocating tensor with shape[" + "1," * 500_000,
    "carriage returns": "ried to allocate\r" * 60_000,
    "escapes": "\x1b[" * 400_000 + "ut of memory",
    "speakers": "".join(f"[rank{rank}]: CUDA out of memory. Tried to\n" for rank in range(30_000)),
}


@pytest.mark.parametrize("name", quick_every(6, HOSTILE))
def test_no_text_takes_forever(name: str, tmp_path: Path) -> None:
    """About a megabyte each: at most seconds; a pattern that backtracks would not end in a lifetime."""
    log = tmp_path / "hostile.log"
    log.write_text(HOSTILE[name])
    process = subprocess.run(
        [sys.executable, "-m", "memcalc", "oom", str(log), "--format", "json"],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )

    assert process.returncode in (0, 2), process.stderr[-500:]
