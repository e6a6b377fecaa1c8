"""Finding messages in logs: of any size, of several ranks, in color, wrapped, packed, repeated."""

import gzip
import io
import json
import tracemalloc
from collections.abc import Iterator

import pytest

from memcalc.diagnosis.diagnosis import Diagnosis, diagnose
from memcalc.diagnosis.log_prefixes import split_prefix, without_colors
from memcalc.diagnosis.report_assembly import MOST_REPORTS
from memcalc.errors import InputError

MIB = 2**20
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.63 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 2.61 GiB is free. Process 77 has 1.50 GiB memory in use. Including non-PyTorch memory, this process has "
    "75.00 GiB memory in use. Of the allocated memory 70.16 GiB is allocated by PyTorch, and 3.48 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {asked}.00 MiB (GPU {gpu}; 31.75 GiB total capacity; 29.87 "
    "GiB already allocated; 41.94 MiB free; 30.29 GiB reserved in total by PyTorch)"
)


def found(text: str | bytes) -> Diagnosis:
    return diagnose("a.log", io.BytesIO(text.encode() if isinstance(text, str) else text))


@pytest.fixture(scope="module")
def whole():
    return found(MESSAGE).finding.report.figures


@pytest.mark.parametrize("width", [20, 37, 40, 64, 80, 100, 119, 200])
@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "    ", "│ ", "E       ", "worker-3: ", "[1,3]<stderr>:"])
def test_wrapped_anywhere(width: int, prefix: str, whole) -> None:
    """A terminal breaks lines wherever they are full, in words and numbers too."""
    lines = [prefix + MESSAGE[at : at + width] for at in range(0, len(MESSAGE), width)]
    report = found("\n".join([f"{prefix}start", *lines, f"{prefix}end"])).finding.report

    assert report.figures == whole
    assert report.holders[0].pid == 77
    assert report.line == 2 + MESSAGE.index("CUDA") // width  # where "CUDA out of memory" begins


@pytest.mark.parametrize("number", range(1, 13))
def test_ranks_that_write_at_once(number: int, whole) -> None:
    """Each line of the log is of another rank; each rank's message is wrapped."""
    parts = [MESSAGE[at : at + 90] for at in range(0, len(MESSAGE), 90)]
    lines = [f"[rank{rank}]: {part.replace('GPU 3', f'GPU {rank}')}" for part in parts for rank in range(number)]
    findings = found("\n".join(lines)).findings

    assert [finding.report.device for finding in findings] == list(range(number))
    assert [finding.report.sources for finding in findings] == [(f"rank {rank}",) for rank in range(number)]
    assert all(finding.report.figures == whole for finding in findings)


def test_colors_and_progress_bars(whole) -> None:
    colored = MESSAGE.replace("CUDA", "\x1b[1;31mCUDA\x1b[0m").replace("79.11", "\x1b[1;36m79.11\x1b[0m")
    text = f"  0%|     | 0/9\r 11%|#    | 1/9\r{colored}\r\n\x1b]0;title\x07done\n"

    assert found(text).finding.report.figures == whole


def test_inside_json(whole) -> None:
    """Notebooks and structured logs: escapes are written out."""
    record = json.dumps({"level": "error", "message": f"\x1b[31m{MESSAGE}\x1b[0m\n  next"})

    assert found(record).finding.report.figures == whole


@pytest.mark.parametrize(
    "packed",
    [
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text[:100].encode()) + gzip.compress(text[100:].encode()),
        lambda text: text.encode("utf-16"),  # what PowerShell's > writes
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: b"\xfe\xfd no text \x00\n" + text.encode(),
    ],
    ids=["gzip", "gzip of two members", "UTF-16", "with a byte order mark", "with bytes that are no text"],
)
def test_packed_and_encoded(packed, whole) -> None:
    data = packed(f"start\n{MESSAGE}\nend\n")

    assert found(data).finding.report.figures == whole


def test_a_broken_archive_is_refused() -> None:
    with pytest.raises(InputError, match=r"a\.log: the log cannot be unpacked"):
        found(gzip.compress(b"x" * 1000)[:5] + b"garbage")


def test_repeated_messages_are_one_report() -> None:
    text = "\n".join([f"ERROR 03-13 09:00:43 [core.py:330] {MESSAGE}", MESSAGE, f"During handling: {MESSAGE}"])
    diagnosis = found(text)

    assert len(diagnosis.findings) == 1
    assert diagnosis.finding.report.count == 3
    assert diagnosis.finding.report.line == 1


def test_a_run_that_survives_its_failures_is_bounded() -> None:
    lines = [OLD.format(asked=number, gpu=0) for number in range(1, MOST_REPORTS + 251)]
    diagnosis = found("\n".join(lines))

    assert len(diagnosis.findings) == MOST_REPORTS
    assert diagnosis.not_kept == 250


def test_the_order_is_that_of_the_log() -> None:
    text = "\n".join(OLD.format(asked=64, gpu=gpu) for gpu in (5, 2, 7))

    assert [finding.report.device for finding in found(text).findings] == [5, 2, 7]


def test_attempts_count_only_where_nothing_failed() -> None:
    attempt = (
        "memory allocation failed with OOM on device 0 while trying to allocate 2097152 bytes (free: 5, total: 9)."
    )
    both, alone = found(f"{attempt}\n{attempt}\n{MESSAGE}"), found(attempt)

    assert both.harmless == 2
    assert len(both.findings) == 1
    assert alone.harmless == 1
    assert alone.finding.report.figures.asked.bytes == 2097152  # type: ignore[union-attr]


def test_a_tensorflow_dump_and_its_exception_are_one_report() -> None:
    """The allocator's summary stands thousands of lines before the exception. Figures: a public log of TF 2.12."""
    source = "I tensorflow/tsl/framework/bfc_allocator.cc:1103]"
    lines = [
        (
            "2024-07-12 14:20:01.1: W tensorflow/tsl/framework/bfc_allocator.cc:485] Allocator (GPU_0_bfc) ran out of "
            "memory trying to allocate 488.28MiB (rounded to 512000000)requested by op model/conv2d"
        ),
        (
            "If the cause is memory fragmentation maybe the environment variable 'TF_GPU_ALLOCATOR=cuda_malloc_async' will "
            "improve the situation. "
        ),
        "Current allocation summary follows.",
        *(f"2024-07-12 14:20:01.2: {source} InUse at 7f00 of size {size} next {size}" for size in range(5000)),
        f"2024-07-12 14:20:01.3: {source} Sum Total of in-use chunks: 37.11GiB",
        (
            f"2024-07-12 14:20:01.4: {source} Total bytes in pool: 40231108608 memory_limit_: 40231108608 available bytes: "
            "0 curr_region_allocation_bytes_: 80462217216"
        ),
        f"2024-07-12 14:20:01.5: {source} Stats: ",
        "Limit:                     40231108608",
        "InUse:                     39851412480",
        "MaxInUse:                  39875904000",
        "NumAllocs:                     2797476",
        "MaxAllocSize:              13200000000",
        "",
        *(
            "RESOURCE_EXHAUSTED: OOM when allocating tensor with shape[32,64,250,250] and type float on "
            "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
            for _ in range(2)
        ),
    ]
    (finding,) = found("\n".join(lines)).findings
    figures = finding.report.figures

    assert figures.asked.bytes == 32 * 64 * 250 * 250 * 4  # type: ignore[union-attr]
    assert figures.allocated.bytes == 39_851_412_480  # type: ignore[union-attr]
    assert figures.peak.bytes == 39_875_904_000  # type: ignore[union-attr]
    assert finding.account.cached.bytes == 40_231_108_608 - 39_851_412_480  # type: ignore[union-attr]
    assert finding.cause.name == "real need"  # 379,696,128 bytes are left in all, 512,000,000 were requested
    assert finding.report.operator == "model/conv2d"
    assert (finding.report.line, finding.report.count) == (1, 2)


def test_no_message_no_answer() -> None:
    with pytest.raises(InputError, match="no out-of-memory message"):
        found("the program ran out of memory of how to allocate 3 GiB\n" * 100)


class Long(io.RawIOBase):
    """A log that is made as it is read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces = pieces

    def read(self, _size: int = -1) -> bytes:
        return next(self.pieces, b"")


@pytest.mark.parametrize("line", [b"step 17: loss 2.31\n", b"x" * 50], ids=["lines", "one endless line"])
def test_memory_is_bounded(line: bytes) -> None:
    """64 MiB in less than 16: what is held is some chunks, however long the log or its lines are."""

    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield line * (MIB // len(line))
        yield b"\n" + MESSAGE.encode() + b"\n"

    tracemalloc.start()
    diagnosis = diagnose("long.log", Long(pieces()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 16 * MIB
    assert diagnosis.finding.report.device == 3


def test_the_line_of_a_message_deep_in_a_log() -> None:
    text = "nothing\n" * 400_000 + MESSAGE + "\n"

    assert found(text).finding.report.line == 400_001


@pytest.mark.parametrize(
    ("line", "speaker", "rest"),
    [
        ("[rank3]: RuntimeError", "rank 3", "RuntimeError"),
        ("[default12]:RuntimeError", "rank 12", "RuntimeError"),
        ("[1,3]<stderr>:RuntimeError", "rank 3", "RuntimeError"),
        ("7: RuntimeError", "task 7", "RuntimeError"),
        ("gpu-q-13: ret = input", "gpu-q-13", "ret = input"),
        ("(VllmWorkerProcess pid=90) ERROR 12-16 21:40:15 worker.py:229] text", "process 90", "text"),
        ("2021-05-01 12:00:00.123456: I tensorflow/core/x.cc:905] text", "", "text"),
        ("2025-11-12T11:25:13.4961658Z text", "", "text"),
        ("E0105 09:48:28.755177  110350 client.cc:3088] text", "", "text"),
        ("[2023-04-04 17:43:59,766] [INFO] [launch.py:318:handler] text", "", "text"),
        ("InUse:   17", "", "InUse:   17"),
        ("torch.OutOfMemoryError: CUDA", "", "torch.OutOfMemoryError: CUDA"),
    ],
)
def test_who_speaks(line: str, speaker: str, rest: str) -> None:
    said = split_prefix(line)

    assert (said.source, said.text.strip()) == (speaker, rest)


def test_control_sequences_go() -> None:
    assert without_colors("\x1b[1;36m20.00\x1b[0m MiB \\u001b[31mred\\x1b[0m [3]") == "20.00 MiB red [3]"
