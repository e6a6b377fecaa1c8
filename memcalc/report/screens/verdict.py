"""The first lines of a result: the run, the verdict, and allocated, reserved and device memory."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.ledger.result import ModuleResult, Result, Sizing
from memcalc.ledger.verdict import holding_memory
from memcalc.report.labels import count, label, listed, plural, rank_text
from memcalc.report.screen import Column, TextTable
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.limits import most_unmodelled_bytes
from memcalc.spec.model_families.transformers_fallback import architecture_of
from memcalc.spec.recompute_plan import words
from memcalc.spec.spec import Spec
from memcalc.units import Unit, format_bytes, format_host_memory, format_number
from memcalc.verdict.other_modules import OtherModules
from memcalc.verdict.reasons import Reason

# The modules that run, as a headline names them.
_MODULES = {
    "plain": "plain modules",
    "huggingface": "transformers modules",
    "megatron": "Megatron-Core modules",
    "torchtitan": "torchtitan modules",
}


TOLD = 0.02  # of the peak: assumptions that move it by more are in the headline
MOST_ASSUMED = 3  # of them


class Subject(NamedTuple):
    """What was estimated, as text.

    Args:
        run: the model and its step.
        how: kernels, recomputation and modules; empty for a module.
        layout: GPUs, with their parallelism and engine.
        modules: the modules or the program that runs.
    """

    run: str
    how: str = ""
    layout: str = ""
    modules: str = ""

    @property
    def lines(self) -> list[str]:
        """The two lines of a screen; a module takes one."""
        return [self.run, *([f"{self.how}; {self.layout}"] if self.how else [])]


def subject(result: Result | ModuleResult) -> Subject:
    """Return what was estimated."""
    if isinstance(result, ModuleResult):
        return Subject(f"{result.name}: {count(result.parameters)} parameters; {result.step}")
    spec = result.spec
    if spec.inference is not None:
        return _generation(result, spec.inference)
    training = spec.training
    step = f"b={training.micro_batch_size}, s={training.sequence_length}, {training.dtype}, {training.recipe}"
    if training.fp8 != "none":
        step += f", fp8 {training.fp8}"
    if training.fake_quantization != "none":
        step += f", fake-quantized {training.fake_quantization}"
    how = f"{training.optimizer}, {training.attention} attention, recompute {words(training.recompute)}"
    if training.lora is not None:
        base = "Q" if training.finetune == "qlora" else ""
        how = f"{base}{'DoRA' if training.lora.dora else 'LoRA'} of rank {training.lora.rank}, {how}"
    if training.teacher is not None:
        how = f"teacher of {training.teacher.num_layers} layers, {how}"
    program = spec.origin.program or _MODULES[training.implementation]
    if (text := spec.model.transformers_config) is not None:
        program = architecture_of(text) or program
    if training.compile:
        program += ", compiled"
    run = f"{spec.name}: {count(result.parameters)} parameters; {step}"
    return Subject(run, f"{how}, as {program}", _spread(spec), program)


def _generation(result: Result, inference: InferenceSpec) -> Subject:
    """Return generation: the model and its batch; then its cache."""
    spec = result.spec
    sizes = f"b={inference.batch_size}, {inference.prompt_length:,} tokens of prompt and {inference.new_tokens:,} new"
    weights: str = inference.dtype
    if inference.quantization != "none":
        wider = "" if inference.matmul_dtype == inference.dtype else f" (matmuls in {inference.matmul_dtype})"
        weights = f"{inference.quantization}{wider}, {inference.dtype}"
    blocks = f" in blocks of {inference.block}" if inference.cache == "paged" else ""
    kept = "" if inference.kv_cache_dtype == "compute" else f", in {inference.kv_cache_dtype}"
    chunk = f" in chunks of {inference.chunk:,}" if inference.chunk < inference.prompt_length else ""
    how = f"{inference.cache} cache{blocks}{kept}, prompt read{chunk or ' at once'}, {inference.attention} attention"
    modules = _MODULES[inference.implementation]
    run = f"{spec.name}: {count(result.parameters)} parameters; inference, {sizes}, {weights}"
    return Subject(run, f"{how}, as {modules}", _spread(spec), modules)


def _spread(spec: Spec) -> str:
    parallelism = spec.parallelism
    degrees = {
        "data": parallelism.data_parallel,
        "tensor": parallelism.tensor_parallel,
        "pipeline": parallelism.pipeline_parallel,
        "context": parallelism.context_parallel,
    }
    words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if parallelism.expert_parallel > 1:
        words.append(f"experts over {parallelism.expert_parallel}")
    if parallelism.zero_stage:
        words.append(f"ZeRO {parallelism.zero_stage}")
    if parallelism.data_parallel_replicate > 1:
        words.append(f"{parallelism.data_parallel_replicate} replicas")
    if parallelism.offload != "none":
        words.append("offload" if parallelism.offload == "all" else f"offload of {parallelism.offload}")
    engine = [parallelism.engine] if spec.inference is None else []
    return plural(parallelism.ranks, "GPU") + (f" ({', '.join([*words, *engine])})" if words else "")


def needed_bytes(result: Sizing) -> tuple[int, str]:
    """Return the most inclusive memory total that is known, and its name."""
    headline = result.headline
    if headline.device_bytes is not None:
        return headline.device_bytes, "device"
    if headline.reserved_bytes is not None:
        return headline.reserved_bytes, "reserved"
    return result.ledger.peak_bytes, "allocated"


def verdict(result: Sizing, unit: Unit) -> str:
    """One sentence: FITS, DOES NOT FIT, CANNOT SAY, or what the run needs where no GPU is given."""
    decision = result.decision
    missing = holding_memory(result.limits)
    without = f" Not modelled: {listed([limit.feature for limit in missing])}." if missing else ""
    if decision is None:
        allocated = format_bytes(result.ledger.peak_bytes, unit)
        needed, name = needed_bytes(result)
        reserved = f", {format_bytes(needed, unit)} {name}" if name != "allocated" else ""
        bound = "at least " if missing else ""
        hint = "" if result.source == "measure" else " Add --gpu to check whether it fits."
        return f"Peak per GPU: {bound}{allocated} allocated{reserved}{_counted_as(result)}.{without}{hint}"
    usable, least = limit_text(result, unit), format_bytes(decision.least_bytes, unit)
    if decision.answer == "unknown":
        interval = decision.interval
        if decision.assumed or decision.overcounted:
            needs = format_bytes(decision.needed_bytes, unit)
            how = "as assumed below" if decision.assumed else "as counted"
            named = {limit.feature for limit in missing}
            reducing = [feature for feature in decision.overcounted if feature not in named]
            counted = f" Counted without: {listed(reducing)}." if reducing else ""
            return f"CANNOT SAY: needs {needs} {how}, perhaps less, of {usable}.{without}{counted}"
        if missing or interval is None:
            return f"CANNOT SAY: needs at least {least} of {usable}.{without}"
        low, high = format_bytes(interval.low_bytes, unit), format_bytes(interval.high_bytes, unit)
        why = " Batches of different lengths fragment memory: their order decides." if _varies(result) else ""
        if interval.of_candidates:
            why = " It fits with the assumed values, but may not with others."
        return f"CANNOT SAY: needs at least {least}, probably {low} to {high}, of {usable}.{why}"
    needed, _ = needed_bytes(result)
    needs, headroom = format_bytes(needed, unit) + _counted_as(result), decision.limit_bytes - needed
    if decision.answer == "fits":
        if most := most_unmodelled_bytes(result.limits):  # known upper bounds fit, too
            needs += f", and at most {format_bytes(most, unit)} for {listed([limit.feature for limit in missing])},"
        return f"FITS: needs {needs} of {usable} ({format_bytes(headroom, unit)} free)."
    if headroom >= 0:  # only with the known lower bounds of unmodelled parts
        return f"DOES NOT FIT: needs at least {least}, but {limit_text(result, unit, clause=True)}.{without}"
    over = format_bytes(-headroom, unit)
    return f"DOES NOT FIT: needs {needs}, but {limit_text(result, unit, clause=True)} ({over} over).{without}"


def _varies(result: Sizing) -> bool:
    """Return whether the run is replayed in several orders of batch lengths."""
    return isinstance(result, Result) and result.confidence == "replay" and result.spec.training.variable_lengths


def _counted_as(result: Sizing) -> str:
    """Return how a compiled run is counted: mostly it needs less; and that a generation is not replayed."""
    if not isinstance(result, Result):
        return ""
    if result.spec.inference is not None and result.headline.reserved_bytes is not None:
        return "" if result.replayed.confidence == "replay" else " (allocator not replayed)"
    return " in eager execution" if result.spec.training.compile else ""


def limit_text(result: Sizing, unit: Unit, *, clause: bool = False) -> str:
    """Return what the run may use: the memory usable on its GPU, or a lower limit of a check; `clause`: with a verb."""
    limit, gpu = result.limit_bytes, result.gpu
    assert limit is not None
    text = format_bytes(limit, unit)
    if gpu is None or limit != gpu.usable_bytes:
        return f"{text} are allowed" if clause else f"{text} allowed"
    return f"{gpu.label} has {text} usable" if clause else f"{text} usable on {gpu.label}"


def assumed(result: Sizing, unit: Unit) -> str:
    """Return the assumptions that move the peak by more than TOLD, the largest first; "" if there are none."""
    if not isinstance(result, Result):
        return ""
    notable = [each for each in result.spec.origin.assumptions if each.share > TOLD]
    if not notable:
        return ""
    named = [
        f"{each.choice}: {each.taken} ({format_bytes(each.moved_bytes, unit)} less with {each.otherwise}; "
        f"--set {each.setting}=)"
        for each in notable[:MOST_ASSUMED]
    ]
    more = f"; and {len(notable) - MOST_ASSUMED} more" if len(notable) > MOST_ASSUMED else ""
    return f"Assumed, because the file does not set them: {'; '.join(named)}{more}."


def error_bars(result: Sizing, unit: Unit) -> str:
    """Return the interval from errors of recorded runs of this type; empty without a GPU."""
    interval = result.interval
    if interval is None:
        return ""
    low, high, errors, is_late, of_candidates = interval
    span = f"{format_bytes(low, unit)} to {format_bytes(high, unit)}"
    if holding_memory(result.limits):
        span += " for the modelled part"
    if _varies(result) and errors.replayed:
        span += " in several orders of batch lengths"
    if of_candidates:
        span += ", with other values than the assumed ones"
    if is_late:
        span += ", from CUDA streams that are on time to late ones"
    if isinstance(result, Result) and result.headline.outside.communication_library:
        span += ", from the least to the most of NCCL's buffers"
    if not errors.runs:
        assumed = f"{-errors.low:.0%} is assumed"
        return f"Interval: {span}. Too few runs of this type ({errors.run_type}) were recorded; {assumed}."
    worst = f"median error {errors.median:.1%}, worst {errors.worst:+.1%}"
    how = "95% of" if errors.replayed else "not replayed; the range of"
    if isinstance(result, Result) and result.spec.training.compile:
        how = "the range of"
    return f"Interval: {span}, {how} {errors.runs} recorded runs ({errors.run_type}; {worst})."


def modules_sentence(other: OtherModules | None, unit: Unit) -> str:
    """Return the modules of the estimate, and what transformers' modules would allocate; "" if it is about the same."""
    if other is None:
        return ""
    attention = f" ({other.attention} attention)" if other.attention else ""
    return (
        f"These are plain PyTorch modules; transformers' own would allocate "
        f"{format_bytes(other.allocated_bytes, unit)}{attention}: --set implementation=huggingface."
    )


def because(reason: Reason, unit: Unit) -> str:
    """Return what dominates the peak, and the cheapest change that makes the run fit."""
    parts = " and ".join(f"{label(part.value)} ({format_bytes(size, unit)})" for part, size in reason.largest)
    found = [f"The peak is in {reason.phase}: mostly {parts}."]
    if reason.lists:
        found.append(f"The optimizer's foreach update allocates {format_bytes(reason.lists, unit)} of temporaries.")
    if reason.fragmented:
        found.append(
            f"The peak itself fits; fragmentation adds {format_bytes(reason.fragmented, unit)} that is reserved and "
            "not usable."
        )
    if reason.remedy is not None:
        changes = " ".join(f"--set {override.partition('.')[2]}" for override in reason.remedy.overrides)
        host = ""
        if reason.remedy.host_bytes:
            host = f", {format_host_memory(*reason.remedy[-2:], unit)}"
        cost = "" if reason.remedy.cost.startswith("none") else f"; {reason.remedy.cost}"
        found.append(
            f"Cheapest change that fits: {changes} ({format_bytes(reason.remedy.device_bytes, unit)}{host}{cost})."
        )
    return " ".join(found)


def figures(result: Sizing, unit: Unit) -> TextTable:
    """Return device, reserved, allocated and headroom with their descriptions."""
    headline, ledger = result.headline, result.ledger
    where = rank_text(headline.rank) if len(result.ranks) > 1 else ""
    lines: list[tuple[str, int | None, str]] = [
        ("device", headline.device_bytes, "nvidia-smi: reserved, CUDA context and NCCL"),
        ("reserved", headline.reserved_bytes, "held by the PyTorch caching allocator"),
        ("allocated", ledger.peak_bytes, f"peak, in {ledger.peak_phase}{f' on {where}' if where else ''}"),
        ("headroom", result.headroom_bytes, "usable GPU memory less device"),
    ]
    rows = [(name, format_number(size, unit), text) for name, size, text in lines if size is not None]
    return TextTable("", (Column(""), Column(unit, right=True), Column("", wrap=True)), rows)
