"""`memcalc dry-run`: run any training command without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.core import TyperCommand

from memcalc.cli.messages import show_error
from memcalc.cli.options import Budget, TableOrJson, Units, complete_gpu
from memcalc.cli.output import WrittenFiles, print_json
from memcalc.errors import NotWritten
from memcalc.files import write_text
from memcalc.text import json_safe

LOST = "Its contents are missing from these figures. Free space there, or set TMPDIR to another directory."
TIMED_OUT = 124  # as timeout(1) ends


class DryRunCommand(TyperCommand):
    """Passes everything after COMMAND to the command, options included."""

    allow_interspersed_args = False


CommandClass = DryRunCommand  # see memcalc/cli/tree.py


def command(
    words: Annotated[list[str], typer.Argument(metavar="[--] COMMAND [ARGS]...", help="Training command to run.")],
    *,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", "-g", metavar="GPU", help="GPU to simulate; see `memcalc gpus`.", autocompletion=complete_gpu
        ),
    ] = None,
    budget: Budget = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="Number of GPUs on the simulated machine.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="End each process after N optimizer steps.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, metavar="S", help="End the command after S seconds.")
    ] = None,
    skip_init: Annotated[
        bool, typer.Option("--skip-init", help="Skip weight initialization, so that host memory stays untouched.")
    ] = False,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Build from_pretrained models from the config, without a checkpoint."),
    ] = False,
    delayed_events: Annotated[
        bool,
        typer.Option(
            "--delayed-events", help="Complete the work of a stream only when the host waits for that stream."
        ),
    ] = False,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run the command as one rank of N, without the others.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, metavar="R", help="Rank to run with --world-size.")] = 0,
    routing: Annotated[
        Literal["balanced", "worst-case"],
        typer.Option(
            help="Rule that chooses experts and tokens, because no kernel computes scores. `balanced`: all equally "
            "often. `worst-case`: the same for every token."
        ),
    ] = "balanced",
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JSON, with the lines that allocate most.")
    ] = None,
    assert_fits: Annotated[
        bool, typer.Option("--assert-fits", help="Exit with 1 if the command does not fit.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Find the largest micro-batch that fits; needs --micro-batch-flag.")
    ] = False,
    micro_batch_flag: Annotated[
        str | None, typer.Option(metavar="FLAG", help="Option of the command that sets its micro-batch size.")
    ] = None,
    micro_batches: Annotated[str | None, typer.Option(metavar="LIST", help="Try only these sizes, e.g. 1,2,4.")] = None,
    form: TableOrJson = "table",
    units: Units = "GiB",
) -> None:
    """Run any training command without a GPU, and report its memory.

    PyTorch's own CUDA build runs the real steps; only NVIDIA's libraries are replaced, by stubs that count memory and
    compute nothing. Needs Linux, a C compiler and a CUDA build of torch; no GPU, and none of NVIDIA's libraries.

    Exit code: that of the command; 4: it ran out of memory; 124: --timeout was reached; with --assert-fits 1: it does
    not fit, and 2 if the command itself exits with 1.

    Example: memcalc dry-run --gpu h100-80gb --steps 3 -- python train.py --batch-size 8
    """
    from memcalc.errors import InputError
    from memcalc.nullcuda import run
    from memcalc.nullcuda.options import Options
    from memcalc.spec.hardware.gpus import with_budget

    if budget is not None:
        gpu = with_budget(gpu, budget)
    if gpu is None:
        raise InputError(
            "dry-run needs a GPU to simulate.", "Add --gpu GPU, which `memcalc gpus` lists, or --budget SIZE."
        )
    if record is not None:  # whether it can be written is known before a long run, not after it
        record.parent.mkdir(parents=True, exist_ok=True)
        if record.is_dir():
            raise InputError(f"{record} is a directory.", "Name a file.", "--record")
    options: Options = {
        "steps": steps,
        "skip_init": skip_init,
        "random_weights": random_weights,
        "delayed_events": delayed_events,
        "world_size": world_size,
        "rank": rank,
        "routing": routing,
        "history": record is not None,
    }
    if sweep:
        from memcalc.cli.dry_run_sweep import run_sweep

        run_sweep(
            words,
            gpu,
            micro_batch_flag,
            micro_batches,
            form=form,
            units=units,
            assert_fits=assert_fits,
            gpus=gpus,
            timeout=timeout,
            **options,
        )
    result = run(
        words,
        gpu,
        gpus=gpus,
        timeout=timeout,
        stdout=sys.stderr if form == "json" else None,  # the document alone is on standard output
        **options,
    )
    from memcalc.documents.dry_run import dry_run_document
    from memcalc.report.screens.dry_run import draw_dry_run

    files = WrittenFiles()
    if record is not None:
        with files.writing():
            write_text(record, json_safe(json.dumps(dry_run_document(result), indent=2)) + "\n")
    if form == "json":
        print_json(dry_run_document(result))
    else:
        from memcalc.report.screen import make_screen

        draw_dry_run(make_screen(), result, units)
    files.complain()
    if result.lost:
        raise NotWritten("the temporary report of a process", "its disk is full", LOST)
    raise typer.Exit(_exit_code(result.outcome, result.exit_code, result.fits, asserted=assert_fits))


def _exit_code(outcome: str, code: int, fits: bool | None, *, asserted: bool) -> int:
    from memcalc.cli.app import INTERRUPTED
    from memcalc.nullcuda.result import INTERRUPTED as BY_USER
    from memcalc.nullcuda.result import OUT_OF_MEMORY
    from memcalc.nullcuda.result import TIMED_OUT as OUT_OF_TIME

    if outcome == BY_USER:
        return INTERRUPTED
    if outcome == OUT_OF_TIME:
        return TIMED_OUT
    if outcome == OUT_OF_MEMORY:
        return 1 if asserted else 4
    return exit_code_of(code, asserted=asserted) or int(asserted and not fits)


def exit_code_of(code: int, *, asserted: bool) -> int:
    """Return the exit code of the command; 2 in place of 1 if 1 is reserved for "does not fit"."""
    if asserted and code == 1:
        show_error(
            "the command failed with exit code 1. memcalc exits with 2, because --assert-fits reserves 1 for runs that "
            "do not fit. See the messages of the command."
        )
        return 2
    return code
