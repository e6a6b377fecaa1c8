"""The verb `trace` on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from memcalc.errors import InputError
from memcalc.folders import temporary_compiler_cache
from memcalc.ledger.result import Result
from memcalc.progress import Progress, silent
from memcalc.spec.cards import find_card
from memcalc.spec.foreign import can_read_foreign, family_of_foreign
from memcalc.spec.spec import Spec
from memcalc.step.packages import require

if TYPE_CHECKING:
    import torch

    from memcalc.recorder.recording import Recording
    from memcalc.recorder.trace import Trace
    from memcalc.tracing.fake import Run

Semantics = Literal["cuda", "cpu"]

DEFAULT_CARD = "a100-80gb"  # whose workspaces operators take where no card is named


def trace(
    spec: Spec,
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    progress: Progress = silent,
    inputs: str | None = None,
) -> Trace:
    """The real training step on fake tensors, every byte attributed, replayed through PyTorch's allocator.

    Of a spec with an `inference:` block prompts are read and tokens made in place of steps.

    Args:
        spec: what to train.
        steps: optimizer steps. The first one makes the optimizer's states; the second is already the steady state.
        semantics: "cuda": operators as on the card of the spec, or an A100 80 GB; "cpu": as on the CPU, without blocks.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        progress: told how far the work is.
        inputs: "file.py:name" of what makes the arguments of the model's forward; None: made from the spec.

    Raises:
        Unavailable: torch or transformers is missing.
        InputError: the step cannot run what the spec asks for, or settings that PyTorch refuses.
    """
    recording = record(spec, steps, semantics, progress, inputs)
    from memcalc.recorder.trace import make_trace  # here: who only asks whether a trace can stand in needs no allocator

    return make_trace(spec, recording, alloc_conf or spec.training.alloc_conf, progress=progress)


def record(
    spec: Spec, steps: int = 3, semantics: str = "cuda", progress: Progress = silent, inputs: str | None = None
) -> Recording:
    """The events of `trace`, not yet replayed; arguments and errors as there."""
    check_semantics(semantics)
    require("trace", spec)
    refuse_replicas(spec, semantics)
    refuse_kernels(spec)
    card = find_card(spec.hardware.gpu or DEFAULT_CARD)
    with temporary_compiler_cache():
        from memcalc.tracing.fake import record_fake

        return record_fake(
            _run_of(spec, semantics, inputs),
            card,
            steps,
            cuda=semantics == "cuda",
            ranks=spec.parallelism.ranks,
            progress=progress,
        )


def _run_of(spec: Spec, semantics: str, inputs: str | None) -> Callable[[torch.device], Run]:
    """What runs: a training step, or generation."""
    if spec.inference is not None:
        if inputs is not None:
            raise InputError("generation makes its own inputs.", "Leave --inputs out.", "--inputs")
        refuse_generation(spec, semantics)
        from memcalc.step.generation import GenerationRun

        return partial(GenerationRun, spec)
    from memcalc.step.loop import TrainingRun

    if inputs is None:
        return partial(TrainingRun, spec)
    from memcalc.step.python_file import made_inputs

    return partial(TrainingRun, spec, inputs=made_inputs(inputs))


def in_place_of_formulas(spec: Spec, progress: Progress = silent) -> Result:
    """What a run of a family, or of its modules, without formulas holds, and a note that this was traced.

    The step runs in a child process.

    Raises:
        Unavailable: torch or transformers is missing.
        InputError: the step cannot run what the spec asks for.
    """
    from memcalc.recorder.trace import make_trace
    from memcalc.tracing.child import record_in_child

    require("trace", spec)
    progress("trace", 0)
    found = make_trace(spec, record_in_child(spec, 2), spec.training.alloc_conf, progress=progress).result
    own = spec.model.transformers_config is not None
    what = family_of_foreign(spec.model) if own else f"transformers' modules of {spec.model.architecture}"
    note = f"memcalc has no formulas for {what}: {'its' if own else 'their'} real step was traced on fake tensors"
    return replace(found, notes=(note, *spec.origin.notes, *found.notes))


def stands_in(spec: Spec) -> bool:
    """Whether fake tensors can run a step that formulas are missing for: torch and transformers are there for it."""
    parallelism = spec.parallelism
    alone = parallelism.ranks == 1
    sharded = parallelism.engine == "fsdp2" and parallelism.data_parallel == parallelism.ranks
    needs_kernels = spec.training.finetune == "qlora" or spec.training.optimizer_options.paged
    return can_read_foreign() and (alone or sharded) and not needs_kernels


def refuse_replicas(spec: Spec, semantics: str) -> None:
    """What cannot be spread over ranks that are not there.

    Raises:
        InputError: for DistributedDataParallel with CUDA's semantics.
    """
    parallelism = spec.parallelism
    if parallelism.data_parallel == 1 or parallelism.tensor_parallel > 1 or semantics == "cpu":
        return
    if parallelism.engine == "ddp":
        raise InputError(
            "DistributedDataParallel's buckets are compiled code that reads memory, which fake tensors do not have.",
            "Trace it with --device null or --semantics cpu, or use `memcalc estimate`.",
            "parallelism.engine",
        )


def refuse_kernels(spec: Spec) -> None:
    """What bitsandbytes does in code that needs a device.

    Raises:
        InputError: for 4-bit matrices, and for pages that move between host and device.
    """
    training = spec.training
    for asked, field in (
        (training.finetune == "qlora", "training.finetune"),
        (training.optimizer_options.paged, "training.optimizer_options.paged"),
    ):
        if asked:
            value = training.finetune if field == "training.finetune" else "true"
            raise InputError(
                f"{field.rpartition('.')[2]} = {value} needs bitsandbytes' kernels, which fake tensors do not have.",
                "Trace it with --device null, or use `memcalc estimate`.",
                field,
            )


def refuse_generation(spec: Spec, semantics: str) -> None:
    """What of generation is no run of transformers' modules and caches on one GPU.

    Raises:
        InputError: for a paged cache, plain modules, matrices in 4 bits, several ranks, and the CPU's semantics.
    """
    asked = spec.inference
    assert asked is not None
    for is_so, what, remedy, field in (
        (asked.cache == "paged", "cache = paged", "cache: dynamic or static", "inference.cache"),
        (
            asked.implementation == "plain",
            "implementation = plain",
            "implementation: huggingface",
            "inference.implementation",
        ),
        (
            asked.quantization != "none",
            f"quantization = {asked.quantization}",
            "quantization: none",
            "inference.quantization",
        ),
        (spec.parallelism.ranks > 1, f"{spec.parallelism.ranks} ranks", "one rank", "parallelism"),
        (semantics == "cpu", "semantics = cpu", "--semantics cuda", "--semantics"),
    ):
        if is_so:
            raise InputError(
                f"{what} while generating: what is traced are transformers' modules and caches on one GPU.",
                f"Set {remedy}, or use `memcalc estimate`.",
                field,
            )


def check_semantics(semantics: str) -> None:
    """Whose operators run.

    Raises:
        InputError: nobody's that is known.
    """
    if semantics not in get_args(Semantics):
        raise InputError(f"semantics = {semantics!r} is not known.", "Name cuda or cpu.", "--semantics")
