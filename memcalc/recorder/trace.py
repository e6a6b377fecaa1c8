"""Results of `memcalc trace`: the analyzed recording, and the result type of all commands."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from memcalc.allocator.pytorch.versions import DEFAULT_VERSION
from memcalc.ledger.result import (
    Confidence,
    DeviceMemory,
    ModuleResult,
    OutsideMemory,
    RankResult,
    Result,
    Textbook,
    known,
)
from memcalc.ledger.textbook import generation_textbook, textbook
from memcalc.ledger.verdict import observed
from memcalc.progress import Progress, silent
from memcalc.recorder.ledger import host_ledger
from memcalc.recorder.recording import Recording
from memcalc.recorder.run_analysis import RunAnalysis, judge
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.limits import Limit
from memcalc.spec.model_families.transformers_fallback import has_published_formulas
from memcalc.spec.spec import Spec
from memcalc.spec.untraced_features import not_run


@dataclass(frozen=True, repr=False)
class Trace(RunAnalysis):
    """A traced run of a spec."""

    result: Result  # the ledger and the verdict, as for all commands

    @property
    def name(self) -> str:
        """Name of the configuration."""
        return self.result.name


@dataclass(frozen=True, repr=False)
class ModuleTrace(RunAnalysis):
    """A traced run of a module."""

    result: ModuleResult  # the ledger and the verdict, without a configuration

    @property
    def name(self) -> str:
        """Source of the module."""
        return self.result.name


def make_trace(
    spec: Spec,
    recording: Recording,
    alloc_conf: str = "",
    version: str = DEFAULT_VERSION,
    progress: Progress = silent,
) -> Trace:
    """Return the analysis of a recording of a spec's run, with the verdict on the spec's GPU.

    Args:
        spec: the run.
        recording: its recording.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        version: the PyTorch version of the simulated allocator.
        progress: called with the progress of the replay.

    Raises:
        InputError: PyTorch rejects the settings.
    """
    judged = judge(recording, spec.gpu, alloc_conf, version, progress)
    result = Result(
        spec=spec,
        textbook=_published(spec),
        **_sizing(judged, (*spec.origin.limits, *not_run(spec))),
    )
    return Trace(**fields_of(judged), result=result)


def _published(spec: Spec) -> Textbook | None:
    if not has_published_formulas(spec.model):
        return None
    return textbook(spec) if spec.inference is None else generation_textbook(spec)


def make_module_trace(
    name: str, step: str, recording: Recording, gpu: GpuSpec | None, alloc_conf: str = "", progress: Progress = silent
) -> ModuleTrace:
    """Return the analysis of a recording of a module's run, with the verdict on a GPU.

    Args:
        name: source of the module.
        step: the step that ran, for the screen.
        recording: its recording.
        gpu: the GPU to check against; None: no verdict.
        alloc_conf: as PYTORCH_CUDA_ALLOC_CONF.
        progress: called with the progress of the replay.

    Raises:
        InputError: PyTorch rejects the settings.
    """
    judged = judge(recording, gpu, alloc_conf, progress=progress)
    return ModuleTrace(**fields_of(judged), result=ModuleResult(name=name, step=step, **_sizing(judged, ())))


def fields_of(judged: RunAnalysis) -> dict[str, Any]:
    """Return the fields of an analysis, for one that adds others to them."""
    return {field.name: getattr(judged, field.name) for field in fields(judged)}


def _sizing(judged: RunAnalysis, missing: tuple[Limit, ...]) -> dict[str, Any]:
    """Return the fields that results of all runs have (`memcalc.ledger.result.Sizing`).

    Args:
        judged: the analyzed run.
        missing: requested features that are not modelled.
    """
    recording, gpu, reserved = judged.recording, judged.gpu, judged.reserved_bytes
    context = 0 if gpu is None else gpu.context_bytes
    on_device = None if gpu is None or reserved is None else reserved + context
    outside = OutsideMemory(0 if reserved is None else reserved - judged.ledger.peak_bytes, context, 0)
    limits = (*missing, *(Limit(what, holds_memory=False) for what in judged.not_modelled))
    judgement = None
    if gpu is not None and on_device is not None:
        judgement = observed(judged.failure is None, on_device, gpu.usable_bytes, limits)
    memory = known(DeviceMemory(reserved, on_device, outside))
    return {
        "source": "trace",
        "device": recording.device,
        "parameters": recording.parameters,
        "trainable_parameters": recording.trainable,
        "buffer_elements": recording.buffers,
        "ranks": (RankResult({"pipeline_stage": 0}, judged.ledger, memory, host_ledger(recording.host_events)),),
        "confidence": _confidence(recording, judged),
        "gpu": gpu,
        "limits": limits,
        "notes": judged.notes,
        "judgement": judgement,
    }


def _confidence(recording: Recording, judged: RunAnalysis) -> Confidence:
    if recording.reserved_bytes is not None:
        return "allocator"
    return "replay" if judged.replay is not None else "measured"
