"""The command `trace` on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from memcalc.directories import temporary_compiler_cache
from memcalc.errors import InputError
from memcalc.ledger.result import Result
from memcalc.progress import Progress, silent
from memcalc.spec.hardware.gpus import DEFAULT_CARD, find_gpu
from memcalc.spec.model_families.transformers_fallback import can_read_with_transformers, fallback_family
from memcalc.spec.spec import Spec
from memcalc.step.packages import require

if TYPE_CHECKING:
    import torch

    from memcalc.recorder.real_device import DeviceRun
    from memcalc.recorder.recording import Recording
    from memcalc.recorder.trace import Trace

Semantics = Literal["cuda", "cpu"]


def trace(
    spec: Spec,
    steps: int = 3,
    semantics: str = "cuda",
    alloc_conf: str = "",
    progress: Progress = silent,
    inputs: str | None = None,
) -> Trace:
    """Run the training step on fake tensors; attribute every byte, and replay it through the PyTorch allocator.

    A spec with an `inference:` block runs prefill and decoding instead of steps.

    Args:
        spec: the run.
        steps: optimizer steps. The first one creates the optimizer states; the second is already the steady state.
        semantics: "cuda": kernels of the spec's GPU, or of an A100 80 GB; "cpu": kernels of the CPU, without block
            rounding.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        progress: called with the progress of the work.
        inputs: "file.py:name" of a function that makes the arguments of the model's forward; None: made from the spec.

    Raises:
        Unavailable: torch or transformers is missing.
        InputError: the step cannot run the spec, or PyTorch rejects the settings.
    """
    recording = record(spec, steps, semantics, progress, inputs)
    from memcalc.recorder.trace import make_trace  # late: `stands_in` needs no allocator

    return make_trace(spec, recording, alloc_conf or spec.training.alloc_conf, progress=progress)


def record(
    spec: Spec, steps: int = 3, semantics: str = "cuda", progress: Progress = silent, inputs: str | None = None
) -> Recording:
    """Return the recording of `trace`, without a replay; for arguments and errors see there."""
    check_semantics(semantics)
    require("trace", spec)
    refuse_replicas(spec, semantics)
    refuse_kernels(spec)
    gpu = find_gpu(spec.hardware.gpu or DEFAULT_CARD)
    with temporary_compiler_cache():
        from memcalc.tracing.fake import record_fake

        return record_fake(
            _run_of(spec, semantics, inputs),
            gpu,
            steps,
            cuda=semantics == "cuda",
            ranks=spec.parallelism.ranks,
            progress=progress,
        )


def _run_of(spec: Spec, semantics: str, inputs: str | None) -> Callable[[torch.device], DeviceRun]:
    """Return the factory of the run: a training step, or generation."""
    if spec.inference is not None:
        if inputs is not None:
            raise InputError(
                "--inputs has no effect on generation, which makes its own inputs.", "Leave --inputs out.", "--inputs"
            )
        refuse_generation(spec, semantics)
        from memcalc.step.generation import GenerationRun

        return partial(GenerationRun, spec)
    from memcalc.step.loop import TrainingRun

    if inputs is None:
        return partial(TrainingRun, spec)
    from memcalc.step.python_file import inputs_of_file

    return partial(TrainingRun, spec, inputs=inputs_of_file(inputs))


def in_place_of_formulas(spec: Spec, progress: Progress = silent) -> Result:
    """Return a traced result for a run without formulas; its first note says that it was traced.

    The step runs in a child process.

    Raises:
        Unavailable: torch or transformers is missing.
        InputError: the step cannot run the spec.
    """
    from memcalc.recorder.trace import make_trace
    from memcalc.tracing.child import record_in_child

    require("trace", spec)
    progress("trace", 0)
    found = make_trace(spec, record_in_child(spec, 2), spec.training.alloc_conf, progress=progress).result
    original = spec.model.transformers_config is not None
    what = fallback_family(spec.model) if original else f"transformers' modules of {spec.model.architecture}"
    note = f"memcalc has no formulas for {what}: {'its' if original else 'their'} real step was traced on fake tensors"
    return replace(found, notes=(note, *spec.origin.notes, *found.notes))


def stands_in(spec: Spec) -> bool:
    """Return whether fake tensors can run a step without formulas, and torch and transformers are installed."""
    parallelism = spec.parallelism
    alone = parallelism.trains_alone
    sharded = parallelism.engine == "fsdp2" and parallelism.data_parallel == parallelism.ranks
    needs_kernels = spec.training.finetune == "qlora" or spec.training.optimizer_options.paged
    return can_read_with_transformers() and (alone or sharded) and not needs_kernels


def refuse_replicas(spec: Spec, semantics: str) -> None:
    """Reject FSDP1, and DistributedDataParallel with CUDA's semantics, which one rank cannot emulate.

    Raises:
        InputError: the run uses it.
    """
    parallelism = spec.parallelism
    if parallelism.engine == "fsdp1" and parallelism.data_parallel > 1:
        raise InputError(
            "FullyShardedDataParallel resizes the memory of tensors, which fake tensors do not have.",
            "Use `memcalc estimate`, `memcalc dry-run`, or engine: fsdp2.",
            "parallelism.engine",
        )
    if parallelism.data_parallel == 1 or parallelism.tensor_parallel > 1 or semantics == "cpu":
        return
    if parallelism.engine == "ddp":
        raise InputError(
            "DistributedDataParallel's buckets are compiled code that reads memory, which fake tensors do not have.",
            "Trace it with --device null or --semantics cpu, or use `memcalc estimate`.",
            "parallelism.engine",
        )


def refuse_kernels(spec: Spec) -> None:
    """Reject features of bitsandbytes that need a device.

    Raises:
        InputError: for 4-bit weights, and for paged optimizer states.
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
                "Trace it with --device null, or use `memcalc estimate`."
                if spec.model.transformers_config is None
                else "Trace it with `memcalc trace --device null`, or run its program with `memcalc dry-run`.",
                field,
            )


def refuse_generation(spec: Spec, semantics: str) -> None:
    """Reject generation other than with modules and caches of transformers on one GPU.

    Raises:
        InputError: for a paged cache, plain modules, 4-bit weights, several ranks, and CPU semantics.
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
                f"generation with {what} is not traced: supported are transformers' modules and caches on one GPU.",
                f"Set {remedy}, or use `memcalc estimate`.",
                field,
            )


def check_semantics(semantics: str) -> None:
    """Check the name of the emulated kernels.

    Raises:
        InputError: the name is unknown.
    """
    if semantics not in get_args(Semantics):
        raise InputError(f"semantics = {semantics!r} is not known.", "Choose cuda or cpu.", "--semantics")
