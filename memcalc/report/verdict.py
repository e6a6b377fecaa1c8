"""The answer first: what was asked, whether it fits, and the three numbers: allocated, reserved, device."""

from __future__ import annotations

from memcalc.ledger.result import Result
from memcalc.report.grid import Column, Grid
from memcalc.report.words import count, plural, rank_text
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.segments import words
from memcalc.spec.spec import Spec
from memcalc.units import Unit, format_bytes, format_number


def subject(result: Result) -> str:
    """The run in two lines: the model and its step; then how it is spread."""
    spec = result.spec
    if spec.inference is not None:
        return _generation(result, spec.inference)
    training = spec.training
    step = f"b={training.micro_batch_size}, s={training.sequence_length}, {training.dtype}, {training.recipe}"
    if training.fp8 != "none":
        step += f", fp8 {training.fp8}"
    how = f"{training.optimizer}, {training.attention} attention, recompute {words(training.recompute)}"
    if training.lora is not None:
        how = f"{'QLoRA' if training.finetune == 'qlora' else 'LoRA'} of rank {training.lora.rank}, {how}"
    modules = f"{training.implementation} modules"
    return f"{spec.name}: {count(result.parameters)} parameters; {step}\n{how}, {modules}; {_spread(spec)}"


def _generation(result: Result, inference: InferenceSpec) -> str:
    """The same of generation: the model and its batch; then its cache."""
    spec = result.spec
    sizes = f"b={inference.batch_size}, {inference.prompt_length:,} tokens of prompt and {inference.new_tokens:,} new"
    weights = inference.dtype if inference.quantization == "none" else f"{inference.quantization}, {inference.dtype}"
    blocks = f" in blocks of {inference.block}" if inference.cache == "paged" else ""
    kept = "" if inference.kv_cache_dtype == "compute" else f", in {inference.kv_cache_dtype}"
    chunk = f" in pieces of {inference.chunk:,}" if inference.chunk < inference.prompt_length else ""
    how = f"{inference.cache} cache{blocks}{kept}, prompt read{chunk or ' at once'}, {inference.attention} attention"
    modules = f"{inference.implementation} modules"
    return (
        f"{spec.name}: {count(result.parameters)} parameters; inference, {sizes}, {weights}\n"
        f"{how}, {modules}; {_spread(spec)}"
    )


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


def needed_bytes(result: Result) -> tuple[int, str]:
    """The widest number known of what a GPU must hold, and its name."""
    headline = result.headline
    if headline.device_bytes is not None:
        return headline.device_bytes, "device"
    if headline.reserved_bytes is not None:
        return headline.reserved_bytes, "reserved"
    return result.ledger.peak_bytes, "allocated"


def verdict(result: Result, unit: Unit) -> str:
    """One sentence: FITS, DOES NOT FIT, or what it needs where no card is named."""
    needed = format_bytes(needed_bytes(result)[0], unit)
    card, headroom = result.card, result.headroom_bytes
    if card is None or headroom is None:
        verb = "Held" if result.source == "measure" else "Needs"
        allocated = format_bytes(result.ledger.peak_bytes, unit)
        reserved = f", {needed} {needed_bytes(result)[1]}" if needed_bytes(result)[1] != "allocated" else ""
        hint = "" if result.source == "measure" else " No --gpu named."
        return f"{verb} {allocated} allocated{reserved} per GPU.{hint}"
    usable = f"{format_bytes(card.usable_bytes, unit)} usable on {card.label}"
    if headroom >= 0:
        return f"FITS: {needed} of {usable}, {format_bytes(headroom, unit)} to spare."
    return f"DOES NOT FIT: {needed} against {usable}, {format_bytes(-headroom, unit)} too much."


def figures(result: Result, unit: Unit) -> Grid:
    """Device, reserved, allocated and headroom, each with what it is."""
    headline, ledger = result.headline, result.ledger
    where = rank_text(headline.rank) if len(result.ranks) > 1 else ""
    lines: list[tuple[str, int | None, str]] = [
        ("device", headline.device_bytes, "what nvidia-smi shows: reserved, context and NCCL"),
        ("reserved", headline.reserved_bytes, "what PyTorch's caching allocator holds"),
        ("allocated", ledger.peak_bytes, f"peak, in {ledger.peak_phase}{f' on {where}' if where else ''}"),
        ("headroom", result.headroom_bytes, "usable memory of the card less device"),
    ]
    rows = [(name, format_number(size, unit), text) for name, size, text in lines if size is not None]
    return Grid("", (Column(""), Column(unit, right=True), Column("", wrap=True)), rows)
