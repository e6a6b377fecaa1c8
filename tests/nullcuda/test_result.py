"""What a dry run says of its reports: figures, verdict, warnings, screen and document."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from memcalc.documents.dry_run import dry_run_document
from memcalc.nullcuda.result import (
    DONE,
    FAILED,
    INTERRUPTED,
    OUT_OF_MEMORY,
    STOPPED,
    TIMED_OUT,
    Allocation,
    DeviceCounters,
    DryRun,
    PythonProcess,
    UnknownRead,
    Usage,
    process_from_report,
)
from memcalc.report.screen import Screen
from memcalc.report.screens.dry_run import draw_dry_run
from memcalc.spec.hardware.gpus import find_gpu
from tests.schemas import validate_result

GIB = 2**30
CARD = find_gpu("a100-40gb")  # 39.38 GiB usable


def usage(process: int, rank: int | None, device: int, gib: int) -> Usage:
    return Usage(process, rank, device, gib * GIB, (gib + 1) * GIB, (gib + 3) * GIB, 3 * GIB // 2, 0, 0)


def process(number: int, rank: int | None, *usages: Usage) -> PythonProcess:
    return PythonProcess(number, rank, ("train.py",), "2.13.0+cu130", 3, None, usages, (), 0, 0, ())


TWO_RANKS = DryRun(
    ("torchrun", "train.py"),
    CARD,
    2,
    DONE,
    0,
    1.5,
    (process(11, 0, usage(11, 0, 0, 20)), process(12, 1, usage(12, 1, 1, 30))),
)


def test_the_fullest_gpu_decides() -> None:
    assert TWO_RANKS.peak == usage(12, 1, 1, 30)
    assert (TWO_RANKS.allocated_bytes, TWO_RANKS.reserved_bytes, TWO_RANKS.device_bytes) == (
        30 * GIB,
        31 * GIB,
        33 * GIB,
    )
    assert TWO_RANKS.fits
    assert TWO_RANKS.headroom_bytes == CARD.usable_bytes - 33 * GIB


def test_gpus_with_room_are_named_smallest_first() -> None:
    """33 GiB: more than an RTX 5090 (31.36) and a V100 (31.73) let a process use."""
    names = [card.name for card in TWO_RANKS.would_fit]

    assert names[0] == "a100-40gb"
    assert "v100-32gb" not in names
    assert {"h100-80gb", "b200"} <= set(names)


def test_memory_that_ran_out_does_not_fit() -> None:
    run = replace(TWO_RANKS, outcome=OUT_OF_MEMORY, exit_code=1)

    assert run.fits is False
    assert run.headroom_bytes is None
    assert run.would_fit == ()


def test_a_command_without_a_gpu_is_neither() -> None:
    run = replace(TWO_RANKS, processes=())

    assert run.fits is None
    assert run.peak is None
    assert run.answer is None
    assert "nothing was measured" in run.warnings[0]


def test_a_command_that_failed_before_it_used_the_gpu_says_why_in_one_sentence() -> None:
    run = replace(TWO_RANKS, processes=(), outcome=FAILED, failure=("ImportError", "word " * 40))
    reason = f"no process of the command used the GPU through PyTorch (ImportError: {'word ' * 32}...)"

    assert run.doubt == reason
    assert f"NOTHING MEASURED: {reason}. " in f"{' '.join(screen_of(run).split())} "


def test_warnings_count_over_processes() -> None:
    first, second = TWO_RANKS.processes
    run = replace(
        TWO_RANKS,
        processes=(
            replace(
                first, unknown_reads=(UnknownRead("a.py:1 f", 2),), masks=1, unmodelled=("cusolverDnSgeqrf",), choices=1
            ),
            replace(
                second,
                unknown_reads=(UnknownRead("a.py:1 f", 3),),
                usages=(replace(second.usages[0], device=0, retries=1, ooms=2),),
            ),
        ),
    )

    reads, choices, masks, retries, ooms, unmodelled, shared = run.warnings
    assert reads == (
        "a.py:1 f read a value that kernels should have computed 5 times: the null device returned 0, so branches "
        "on it may differ on a real GPU"
    )
    assert choices == (
        "experts or tokens were chosen by unknown scores once: all equally often (--routing worst-case: the "
        "same for every token)"
    )
    assert masks.startswith("elements were selected by an unknown mask once")
    assert "freed its cache once" in retries
    assert ooms.startswith("the GPU's memory ran out 2 times, and the program continued")
    assert unmodelled == "functions that the null device rejected: cusolverDnSgeqrf"
    assert shared.startswith("several processes used cuda:0")


def test_who_died_of_memory() -> None:
    """Also a parent that passes on what its worker died of."""
    worker = replace(process(1, None), failure=("OutOfMemoryError", "CUDA out of memory. Tried ..."))
    parent = replace(process(1, None), failure=("ProcessRaisedException", "... CUDA out of memory. Tried ..."))
    other = replace(process(1, None), failure=("ValueError", "no"))

    assert [p.ran_out_of_memory for p in (worker, parent, other, process(1, None))] == [True, True, False, False]


def test_a_report_becomes_a_process() -> None:
    """A card that was only looked at does not count."""
    report = {
        "pid": 5,
        "ranks": {"rank": 1, "world_size": 2},
        "arguments": ["train.py"],
        "torch": "2.13.0",
        "steps": 4,
        "failure": ["ValueError", "no"],
        "devices": {
            "0": {"allocated_bytes": 0, "reserved_bytes": 0, "device_bytes": 9, "ooms": 0, "retries": 0},
            "1": {"allocated_bytes": 1, "reserved_bytes": 2, "device_bytes": 3, "ooms": 4, "retries": 5},
        },
        "counts": {"communicator_bytes": 6, "reads": 7, "small_reads": 8},
        "masks": 2,
        "values": True,
        "choices": 3,
        "unknown_reads": [{"where": "a.py:2 g", "count": 8}],
        "checkpoints": {"count": 1, "first": "/tmp/model.pt"},
        "unmodelled": ["f"],
        "allocations": [{"device": 1, "where": "a.py:1 f", "bytes": 10, "count": 2}],
    }

    assert process_from_report(report) == PythonProcess(
        number=5,
        rank=1,
        arguments=("train.py",),
        torch="2.13.0",
        steps=4,
        failure=("ValueError", "no"),
        usages=(Usage(5, 1, 1, 1, 2, 3, 6, 5, 4),),
        allocations=(Allocation(5, 1, "a.py:1 f", 10, 2),),
        reads=7,
        small_reads=8,
        unmodelled=("f",),
        masks=2,
        unknown_reads=(UnknownRead("a.py:2 g", 8),),
        choices=3,
        checkpoints=1,
        first_checkpoint="/tmp/model.pt",
    )


def test_the_devices_books_go_beyond_a_killed_processs_last_report() -> None:
    """Card 0 held 9 GiB with 1 GiB for the context; card 1 was as reported."""
    peaks = {"allocated_bytes": 2, "reserved_bytes": 3, "device_bytes": 4 * GIB, "ooms": 0, "retries": 0}
    report = {
        "pid": 5,
        "ranks": {},
        "arguments": [],
        "torch": "",
        "steps": 0,
        "failure": None,
        "devices": {"1": peaks},
        "counts": {"communicator_bytes": 0, "reads": 0, "small_reads": 0},
        "masks": 0,
        "values": True,
        "choices": 0,
        "unknown_reads": [],
        "checkpoints": {"count": 0, "first": ""},
        "unmodelled": [],
        "allocations": [],
    }

    found = process_from_report(report, DeviceCounters((9 * GIB, 4 * GIB), 0), GIB)

    assert found.usages == (
        Usage(5, None, 0, 0, 8 * GIB, 9 * GIB, 0, 0, 0),
        Usage(5, None, 1, 2, 3, 4 * GIB, 0, 0, 0),
    )
    (warning,) = replace(TWO_RANKS, processes=(found,)).warnings
    assert warning == (
        "process 5 was killed before its last report: allocated memory is a lower bound; reserved and device memory are "
        "complete"
    )
    assert process_from_report(report, DeviceCounters((GIB, 4 * GIB), 0), GIB).usages == found.usages[1:]
    assert process_from_report(report, DeviceCounters((GIB,), 0, steps=2), GIB).steps == 2
    assert [
        usage.ooms for usage in process_from_report(report, DeviceCounters((GIB, GIB), 0, ooms=(0, 3)), GIB).usages
    ] == [3]


def test_weights_that_are_missing_and_checkpoints_of_zeros_are_said() -> None:
    first, second = TWO_RANKS.processes
    run = replace(
        TWO_RANKS,
        weights_missing=True,
        processes=(
            first,
            replace(second, checkpoints=2, first_checkpoint="/tmp/out/model.safetensors"),
        ),
    )

    assert run.warnings == (
        "the program found no weights to load: --random-weights builds the model from its config alone",
        (
            "2 checkpoint files written, with zeros for weights (/tmp/out/model.safetensors): do not load them, or end the "
            "run earlier with --steps"
        ),
    )


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("org/model does not appear to have a file named pytorch_model.bin or model.safetensors.", True),
        ("Error no file named model.safetensors, or pytorch_model.bin, found in directory model.", True),
        ("We couldn't connect to 'https://huggingface.co' to load the files", True),
        ("org/model is not a local folder and is not a valid model identifier listed on", True),
        ("no", False),
    ],
)
def test_which_failures_are_of_missing_weights(message: str, missing: bool) -> None:
    assert replace(process(1, None), failure=("OSError", message)).lacked_weights is missing


def with_ooms(run: DryRun, ooms: int) -> DryRun:
    first, second = run.processes
    return replace(run, processes=(first, replace(second, usages=(replace(second.usages[0], ooms=ooms),))))


def without_steps(run: DryRun) -> DryRun:
    return replace(run, processes=tuple(replace(process, steps=0) for process in run.processes))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (with_ooms(TWO_RANKS, 2), "the GPU's memory ran out 2 times, and the program continued with a fallback"),
        (
            with_ooms(replace(TWO_RANKS, outcome=TIMED_OUT), 1),
            "the GPU's memory ran out once, and the program ended differently (timed out)",
        ),
        (without_steps(replace(TWO_RANKS, outcome=FAILED)), "failed before the first optimizer step was complete"),
        (
            without_steps(replace(TWO_RANKS, outcome=FAILED, failure=("ValueError", "no\nreally"))),
            "failed before the first optimizer step was complete (ValueError: no)",
        ),
        (
            without_steps(replace(TWO_RANKS, outcome=INTERRUPTED)),
            "interrupted before the first optimizer step was complete",
        ),
    ],
)
def test_what_a_run_cannot_say(run: DryRun, reason: str) -> None:
    """Memory that ran out and was caught, or an end before the first step: the peak of the whole is not known."""
    assert run.fits is None
    assert run.doubt == reason
    assert f"CANNOT SAY: {reason}. Until then it held at most 33.00 GiB" in " ".join(screen_of(run).split())
    assert (dry_run_document(run)["verdict"], dry_run_document(run)["fits"]) == ("unknown", None)


def test_a_run_without_optimizer_that_ends_by_itself_is_whole() -> None:
    assert without_steps(TWO_RANKS).fits
    assert without_steps(replace(TWO_RANKS, outcome=STOPPED)).fits


def test_a_rank_that_dies_of_memory_while_others_hang_does_not_fit() -> None:
    first, second = TWO_RANKS.processes
    died = replace(second, failure=("OutOfMemoryError", "CUDA out of memory."))
    run = replace(TWO_RANKS, outcome=TIMED_OUT, processes=(first, died))

    assert run.fits is False
    assert "DOES NOT FIT: the run exceeds the 39.38 GiB" in screen_of(run)


SCREEN = """\
torchrun train.py on 2 x NVIDIA A100 40GB, a null device: done

Peaks
  process  GPU     steps  allocated GiB  reserved  device   free
  rank 0   cuda:0      3          20.00     21.00   23.00  16.38
  rank 1   cuda:1      3          30.00     31.00   33.00   6.38

  FITS: 33.00 GiB (0.73 GiB for the context and loaded kernels and 1.50 GiB for NCCL included) of
    the 39.38 GiB usable on a100-40gb; 6.38 GiB free.
"""


def screen_of(run: DryRun) -> str:
    file = io.StringIO()
    draw_dry_run(Screen(file, 100), run, "GiB")
    return file.getvalue()


def test_the_screen_answers_first() -> None:
    assert screen_of(TWO_RANKS).startswith(SCREEN)


def test_the_lines_that_hold_most_are_shown_for_the_fullest_gpu() -> None:
    first, second = TWO_RANKS.processes
    mine = Allocation(12, 1, "train.py:7 forward", 9 * GIB, 3)
    theirs = Allocation(11, 0, "train.py:8 forward", 10 * GIB, 3)
    run = replace(TWO_RANKS, processes=(replace(first, allocations=(theirs,)), replace(second, allocations=(mine,))))

    text = screen_of(run)

    assert "  9.00        3  train.py:7 forward" in text
    assert "train.py:8" not in text


def test_a_run_that_failed_fits_as_far_as_it_came() -> None:
    assert "FITS, before it ended: 33.00 GiB" in screen_of(replace(TWO_RANKS, outcome=FAILED, exit_code=3))


def test_the_document_has_the_shape_of_the_other_verbs() -> None:
    from memcalc.documents.schema import documents

    document = dry_run_document(TWO_RANKS)

    required = set(documents()["estimate"].json_schema(mode="serialization")["required"])
    assert required <= set(document)
    assert document["source"] == "dry-run"
    assert document["device"] == "null:a100-40gb"
    assert document["peak"] == {
        "phase": None,
        "rank": {"rank": 1},
        "allocated_bytes": 30 * GIB,
        "reserved_bytes": 31 * GIB,
        "device_bytes": 33 * GIB,
        "confidence": "allocator",
    }
    assert document["outside_allocated"] == {
        "cached_segments": GIB,
        "device_context": CARD.context_bytes,
        "communication_library": 3 * GIB // 2,
    }
    assert [p["rank"] for p in document["processes"]] == [0, 1]


@pytest.mark.parametrize(
    "run", [TWO_RANKS, replace(TWO_RANKS, processes=(), outcome=FAILED, exit_code=3)], ids=["ran", "nothing"]
)
def test_the_document_is_valid_against_the_shipped_schema(run: DryRun) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = dry_run_document(run)

    validate_result(document)

    with pytest.raises(jsonschema.ValidationError):
        validate_result(document | {"processes": [{"pid": 1}]})
