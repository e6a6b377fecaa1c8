"""`memcalc trace`: run the step on fake tensors or the null CUDA device."""

from __future__ import annotations

import gc
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memcalc.cli.options import Export, Gpu, Html, Plot, Python, ResultFormat, Set, Steps, Units, complete_config
from memcalc.cli.shorthand import ShorthandCommand, assignments, with_shorthands

if TYPE_CHECKING:
    from memcalc.spec.spec import Spec

CONFIG_HELP = (
    "A configuration as for `memcalc estimate`, or FILE.py:NAME of a function without arguments that returns a "
    "torch.nn.Module."
)
INPUTS_HELP = (
    "The function that returns the arguments of forward; default: make_inputs of a module's file, or inputs made from "
    "the configuration."
)
OPTIMIZER_HELP = "Optimizer, such as adamw; default for a module: none."


CommandClass = ShorthandCommand  # its --lora and --recompute need no value


@with_shorthands(without=("optimizer",))
def command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help=CONFIG_HELP, autocompletion=complete_config)],
    *,
    overrides: Set = None,
    gpu: Gpu = None,
    inputs: Annotated[str | None, typer.Option(metavar="FILE.py:NAME", help=INPUTS_HELP)] = None,
    optimizer: Annotated[str | None, typer.Option(metavar="NAME", help=OPTIMIZER_HELP)] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Run only the forward of a module, under torch.inference_mode().")
    ] = False,
    device: Annotated[
        Literal["fake", "null"],
        typer.Option(help="fake: tensors without values, anywhere; null: PyTorch's CUDA build, without a GPU."),
    ] = "fake",
    steps: Steps = 3,
    semantics: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Kernels to emulate. cpu omits block rounding and CUDA workspaces.")
    ] = "cuda",
    alloc_conf: Annotated[
        str,
        typer.Option(
            "--alloc-conf", metavar="SETTINGS", help="Allocator settings: the value of PYTORCH_CUDA_ALLOC_CONF."
        ),
    ] = "",
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            min=2,
            metavar="N",
            help="Trace one rank of N. FSDP2 (zero_stage 3) shards over N / tensor_parallel ranks.",
        ),
    ] = None,
    python: Python = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare with the estimate and, for null, with the trace on fake tensors.")
    ] = False,
    plot: Plot = None,
    html: Html = None,
    export: Export = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every event to this file.")] = None,
    form: ResultFormat = "table",
    units: Units = "GiB",
) -> None:
    """Run the training step without a GPU, on fake tensors.

    Forward, backward and optimizer run in PyTorch on tensors without values; each allocation and release is replayed
    through a model of PyTorch's caching allocator. Needs torch, and no GPU. FILE.py:NAME runs your own module.

    Example: memcalc trace llama-3.2-1b --gpu a100-40gb --set b=4
    """
    from memcalc import api
    from memcalc.cli.output import WrittenFiles
    from memcalc.cli.ranks import one_of
    from memcalc.cli.trace_output import (
        print_trace,
        reject_options,
        results_to_compare,
        write_run,
        write_trace_report,
    )
    from memcalc.report.progress import shown_progress
    from memcalc.spec.python_target import is_python_target

    gc.set_threshold(700, 10, 10)  # a running step makes garbage, unlike the start-up that main() tunes for
    given = tuple(overrides or ())
    options: dict[str, Any] = {"steps": steps, "semantics": semantics, "alloc_conf": alloc_conf, "inputs": inputs}
    source: str | Spec = config
    if is_python_target(config):
        asked = {"--set": given, "--device": device != "fake", "--world-size": world_size, "--compare": compare}
        reject_options(asked, "of a configuration", f"{config} is a module")
        options |= {"gpu": gpu, "optimizer": optimizer, "inference": "inference_mode" if inference else None}
    else:
        reject_options({"--inference": inference}, "of a module", f"{config} is not a module")
        given = (*assignments({"optimizer": optimizer}), *given)
        ranks = () if world_size is None else one_of(world_size, api.load(config, *given).parallelism.tensor_parallel)
        source = api.load_to_run(config, *ranks, *given, gpu=gpu)
        options |= {"device": device, "python": python}
    if device == "fake":  # torch runs in this process, which is the command's own
        from memcalc.step.skip_compiler import without_compiler

        without_compiler()
        gc.freeze()  # modules are no garbage
    # What a user's own code prints is no part of the result.
    with shown_progress() as progress, redirect_stdout(sys.stderr):
        traced = api.trace(source, progress=progress, **options)
    files = WrittenFiles()
    with files.writing():
        if record is not None:
            from memcalc.events import write_events

            write_events(record, traced.events)
        write_run(traced, traced.result, plot or (), export or (), units)
    others = results_to_compare(source, device, steps, alloc_conf) if compare and not isinstance(source, str) else ()
    if html is not None:
        with files.writing():
            write_trace_report(html, traced, units, others)
    print_trace(traced, form, units, compared=others)
    files.complain()
