"""What a dry run says of its reports: figures, verdict, warnings, screen and document."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from memcalc.nullcuda.result import DONE, FAILED, OUT_OF_MEMORY, Allocation, DryRun, Process, Usage, process_from_report
from memcalc.report.dry_run import draw_dry_run, dry_run_document
from memcalc.report.schema import result_schema
from memcalc.report.screen import Screen
from memcalc.spec.cards import find_card

GIB = 2**30
CARD = find_card("a100-40gb")  # 39.38 GiB usable


def usage(process: int, rank: int | None, device: int, gib: int) -> Usage:
    return Usage(process, rank, device, gib * GIB, (gib + 1) * GIB, (gib + 3) * GIB, 3 * GIB // 2, 0, 0)


def process(number: int, rank: int | None, *usages: Usage) -> Process:
    return Process(number, rank, ("train.py",), "2.13.0+cu130", 3, None, usages, (), 0, 0, ())


TWO_RANKS = DryRun(
    ("torchrun", "train.py"),
    CARD,
    2,
    DONE,
    0,
    1.5,
    (process(11, 0, usage(11, 0, 0, 20)), process(12, 1, usage(12, 1, 1, 30))),
)


def test_the_fullest_card_decides() -> None:
    assert TWO_RANKS.peak == usage(12, 1, 1, 30)
    assert (TWO_RANKS.allocated_bytes, TWO_RANKS.reserved_bytes, TWO_RANKS.device_bytes) == (
        30 * GIB,
        31 * GIB,
        33 * GIB,
    )
    assert TWO_RANKS.fits
    assert TWO_RANKS.headroom_bytes == CARD.usable_bytes - 33 * GIB


def test_cards_with_room_are_named_smallest_first() -> None:
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
    assert "nothing was measured" in run.warnings[0]


def test_warnings_count_over_processes() -> None:
    first, second = TWO_RANKS.processes
    run = replace(
        TWO_RANKS,
        processes=(
            replace(first, small_reads=2, masks=1, unmodelled=("cusolverDnSgeqrf",)),
            replace(second, small_reads=3, usages=(replace(second.usages[0], device=0, retries=1, ooms=2),)),
        ),
    )

    reads, masks, retries, ooms, unmodelled, shared = run.warnings
    assert "read back from the device 5 times" in reads
    assert masks.startswith("elements were selected by a mask once")
    assert "gave back its cache once" in retries
    assert ooms.startswith("the card's memory ran out 2 times, and the program went on")
    assert unmodelled == "called, and refused by the null device: cusolverDnSgeqrf"
    assert shared.startswith("several processes used cuda:0")


def test_who_died_of_memory() -> None:
    """Also a parent that passes on what its worker died of."""
    worker = replace(process(1, None), failure=("OutOfMemoryError", "CUDA out of memory. Tried ..."))
    parent = replace(process(1, None), failure=("ProcessRaisedException", "... CUDA out of memory. Tried ..."))
    other = replace(process(1, None), failure=("ValueError", "no"))

    assert [p.died_of_memory for p in (worker, parent, other, process(1, None))] == [True, True, False, False]


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
        "unmodelled": ["f"],
        "allocations": [{"device": 1, "where": "a.py:1 f", "bytes": 10, "count": 2}],
    }

    assert process_from_report(report) == Process(
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
    )


SCREEN = """\
torchrun train.py on 2 x NVIDIA A100 40GB, a null device: done

Peaks
  process  card    steps  allocated GiB  reserved  device   free
  rank 0   cuda:0      3          20.00     21.00   23.00  16.38
  rank 1   cuda:1      3          30.00     31.00   33.00   6.38

  FITS: 33.00 GiB (0.73 GiB for the context and loaded kernels and 1.50 GiB for NCCL included) of
    the 39.38 GiB that a100-40gb lets a process use; 6.38 GiB free.
"""


def screen_of(run: DryRun) -> str:
    file = io.StringIO()
    draw_dry_run(Screen(file, 100), run, "GiB")
    return file.getvalue()


def test_the_screen_answers_first() -> None:
    assert screen_of(TWO_RANKS).startswith(SCREEN)


def test_the_lines_that_hold_most_are_shown_for_the_fullest_card() -> None:
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
    from memcalc.ledger.schema import Document

    document = dry_run_document(TWO_RANKS)

    required = {name for name, field in Document.model_fields.items() if field.is_required()}
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

    jsonschema.validate(document, result_schema())

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"processes": [{"pid": 1}]}, result_schema())
