"""Estimate a run: from a spec to the ledger of every pipeline stage, from formulas alone, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.errors import InputError
from memcalc.estimation.host_memory import host_rows
from memcalc.estimation.limits import limits_of
from memcalc.estimation.transient import transient_rows
from memcalc.layout.parameters import buffer_elements
from memcalc.layout.peft_parameters import all_parameters, trainable_parameters
from memcalc.layout.schedules import logits_released
from memcalc.layout.stages import Stage, stages_of
from memcalc.layout.teacher import teacher_run
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.result import DeviceMemory, OutsideMemory, RankResult, Result, known
from memcalc.ledger.row_drafts import PHASES, run_phases
from memcalc.ledger.textbook import textbook
from memcalc.spec.finetuning import names_without_layer
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.hardware.kernels import missing_units
from memcalc.spec.layers import fills_windows
from memcalc.spec.model_families.transformers_fallback import reject_without_formulas
from memcalc.spec.spec import Spec
from memcalc.states.model_states import state_rows
from memcalc.states.paged_optimizer import paging_notes
from memcalc.stream.requests import AllocatorOverhead


def estimate(spec: Spec, played: AllocatorOverhead | None = None) -> Result:
    """Return the memory of each GPU of a run by phase, and the verdict.

    Args:
        spec: the run.
        played: the allocator's overhead from an allocator replay; None: from formulas.

    Raises:
        InputError: the family, or this implementation of it, is not modelled.
    """
    if spec.inference is not None:
        from memcalc.estimation.generation import generation  # a training step does not need this module

        return generation(spec, played)
    reject_without_formulas(spec)
    if spec.training.teacher is not None:
        reject_without_formulas(teacher_run(spec))
    refuse_settings(spec)
    gpu = spec.gpu
    ranks = [rank_result(spec, stage, gpu, played and played.of(stage.index)) for stage in stages_of(spec)]
    ranks.sort(key=lambda rank: -rank.ledger.peak_bytes)  # stable sort: of equal stages the first one is the headline
    return Result(
        source="estimate",
        device=None,
        spec=spec,
        parameters=all_parameters(spec),
        trainable_parameters=trainable_parameters(spec),
        buffer_elements=buffer_elements(spec.model),
        textbook=textbook(spec),
        ranks=tuple(ranks),
        confidence="formula",
        gpu=gpu,
        limits=limits_of(spec),
        notes=notes(spec),
    )


def refuse_settings(spec: Spec) -> None:
    """Reject allocator settings that the run's PyTorch version does not support.

    `memcalc.spec` does not know the allocator, so its settings are read here and in the allocator replay.

    Raises:
        InputError: this version of PyTorch does not support `training.alloc_conf`.
    """
    if not spec.training.alloc_conf:
        return
    from memcalc.allocator.pytorch.settings import parse_settings
    from memcalc.allocator.pytorch.versions import parse_version

    try:
        parse_settings(spec.training.alloc_conf, parse_version(spec.training.torch_version.removeprefix("v")))
    except InputError as error:
        raise error.located("training.alloc_conf") from None


def rank_result(spec: Spec, stage: Stage, gpu: GpuSpec | None, played: AllocatorOverhead | None = None) -> RankResult:
    """Return the ledger of the ranks of one stage and the memory outside it; `played` as in `estimate`."""
    others = transient_rows(spec, stage, gpu, {} if played is None else played.remainders)
    phases = tuple(filter(None, run_phases(spec)))
    ledger = Ledger((state_rows(spec, stage, tails=played is None), others), phases)
    held = host_rows(spec, stage)
    host = None if held is None else Ledger((held,), PHASES)
    return RankResult({"pipeline_stage": stage.index}, ledger, known(UNKNOWN), host)


# Formulas give allocated bytes; `memcalc.verdict` derives reserved bytes.
UNKNOWN = DeviceMemory(None, None, OutsideMemory(0, 0, 0))


def family_notes(spec: Spec) -> Iterator[str]:
    """Yield notes on attention kernels that PyTorch lacks for this dtype or these position embeddings."""
    training = spec.training
    if training.attention == "flash" and training.dtype == "fp32":
        yield "PyTorch's flash attention has no fp32 kernel; a run needs eager or memory-efficient attention."
    if spec.model.position_embedding == "alibi" and training.attention != "eager":
        yield "PyTorch's fused attention kernels cannot add ALiBi's bias; a run needs eager attention."


def adapter_notes(spec: Spec) -> Iterator[str]:
    """Yield a note on listed modules that no layer has, so that they get no adapter."""
    training = spec.training
    if training.lora is None:
        return
    ignored = names_without_layer(training.lora, spec.model, training.implementation)
    if ignored:
        yield f"target_modules: no layer of this model is named {' or '.join(ignored)}, so that name adds no adapter."


def gpu_notes(spec: Spec) -> Iterator[str]:
    """Yield notes on what the GPU lacks for this run, and on sequences longer than the model's positions."""
    training, positions = spec.training, spec.model.max_position_embeddings
    if (gpu := spec.gpu) is not None:
        for lack in missing_units(training.dtype, training.attention, gpu):
            yield f"{gpu.label} has {lack}; the estimate is for {training.dtype} and {training.attention} attention."
    if training.sequence_length > positions:
        yield f"sequence_length = {training.sequence_length:,} is beyond the model's {positions:,} positions."


def notes(spec: Spec) -> tuple[str, ...]:
    """Return the notes of an estimate: how the config was read, host memory, and options with no effect on memory."""
    found = [*gpu_notes(spec), *spec.origin.notes]
    training, parallelism = spec.training, spec.parallelism
    if parallelism.sequence_parallel and parallelism.tensor_parallel == 1:
        found.append("sequence_parallel has no effect without tensor_parallel.")
    if parallelism.zero_stage and parallelism.data_parallel * parallelism.context_parallel == 1:
        found.append(f"zero_stage = {parallelism.zero_stage} shards nothing over data_parallel = 1.")
    if parallelism.engine == "deepspeed" and training.recipe == "mixed-20" and training.gradient_dtype is None:
        how = "only with ZeRO" if parallelism.zero_stage == 0 else "with data_types.grad_accum_dtype: fp32"
        found.append(f"recipe mixed-20: DeepSpeed sums gradients in fp32 {how}. Its default is --set recipe=mixed-16.")
    if training.implementation == "megatron" and training.logits_until == "backward":
        found.append("logits_until = backward has no effect: megatron releases them earlier.")
    if (released := logits_released(spec)) != training.logits_until:
        why = "PyTorch's pipeline schedules keep them" if released == "backward" else "torchtitan releases them earlier"
        found.append(f"logits_until = {training.logits_until} has no effect: {why}.")
    found += [*adapter_notes(spec), *family_notes(spec), *window_notes(spec)]
    by_operator = training.implementation == "torchtitan"  # torchtitan selects the operator results that it saves
    if training.completion_length is not None:
        found.append(
            "generation copies its cache for each token: the allocator may reserve free memory for blocks of earlier "
            "lengths, which it releases before it runs out."
        )
    if training.recompute == "selective" and training.attention != "eager" and not by_operator:
        found.append(
            "recompute = selective saves little with a fused attention kernel, which materializes no attention matrix."
        )
    return (*paging_notes(spec), *found, *assumption_notes(spec))


def assumption_notes(spec: Spec) -> Iterator[str]:
    """Yield what the run's file leaves open, what is assumed, and how far it moves the peak."""
    for each in spec.origin.assumptions:
        yield (
            f"assumed: {each.choice}: {each.taken}; with {each.otherwise} the peak is {each.share:.1%} "
            f"({each.moved_bytes:,} bytes) lower. Set it with --set {each.setting}=."
        )


def window_notes(spec: Spec) -> Iterator[str]:
    """Yield a note that transformers' sdpa applies sliding windows with masks."""
    if fills_windows(spec):
        yield (
            f"sequence_length = {spec.training.sequence_length} fills the window of {spec.model.sliding_window} "
            "tokens: transformers' sdpa then passes a mask to PyTorch, which rules out flash attention. With "
            "flash_attention_2 (attention_windows: kernel) there is no mask."
        )
