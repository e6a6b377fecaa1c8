"""Remedies in order, with their effect, from one message alone."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.diagnosis.accounting import Account
from memcalc.diagnosis.causes import Cause
from memcalc.diagnosis.report import OutOfMemoryReport
from memcalc.diagnosis.settings import Advice, fragmentation_settings, gain_of
from memcalc.units import format_bytes


def advice_for(report: OutOfMemoryReport, account: Account, cause: Cause) -> tuple[Advice, ...]:
    """Return the remedies, the most promising first."""
    found = list(_for_cause(report, account, cause))
    if cause.name in ("real need", "memory outside the framework", "larger than the device", "a limit"):
        found += _need_less(report, account, cause)
    if cause.fragmented and cause.name not in ("fragmentation", "larger than the device"):
        found += fragmentation_settings(report, account)
    if cause.name != "memory outside the framework" and account.shortfall is not None and cause.outside > 0:
        found += _others(account, cause)
    return tuple(found)


def _for_cause(report: OutOfMemoryReport, account: Account, cause: Cause) -> Iterator[Advice]:
    name = cause.name
    if name == "fragmentation":
        yield from fragmentation_settings(report, account)
        yield from _need_less(report, account, cause)
    elif name == "memory outside the framework":
        yield from _others(account, cause)
    elif name == "a limit":
        yield from _raise_limit(report, account)
    elif name == "host memory":
        yield Advice(
            "use less host memory", "fewer data loader workers, no offload to the host, checkpoints loaded in shards"
        )
    elif name == "refused":
        yield Advice(
            "look for a cause outside the message",
            "another process may have used the memory briefly; on Windows the page file limits the driver; a "
            "container or MIG slice may have less memory than the device reports",
        )
    elif name == "not told":
        yield Advice(
            "run nvidia-smi (rocm-smi)",
            "the message has no memory figures; this lists the processes that use the device",
        )


def _others(account: Account, cause: Cause) -> Iterator[Advice]:
    others = account.other_processes
    if others is not None and others.bytes:
        yield Advice(
            "use another device, or stop the other processes on this one",
            f"the other processes use {format_bytes(others.bytes)}",
            *gain_of(account, others.bytes),
        )
        return
    yield Advice(
        "find what uses memory outside the framework",
        f"{format_bytes(cause.outside)} is in use beyond a context and one communication group: by other processes "
        "(nvidia-smi lists them), libraries or communicators",
        *gain_of(account, cause.outside),
    )


def _raise_limit(report: OutOfMemoryReport, account: Account) -> Iterator[Advice]:
    free = account.free
    rest = "" if free is None else f"; the device itself has {format_bytes(free.bytes)} free"
    if report.device_type == "mps":
        yield Advice(
            "close other applications, or raise PYTORCH_MPS_HIGH_WATERMARK_RATIO",
            "the limit is a fraction of the machine's memory",
        )
    elif report.framework == "paddlepaddle":
        yield Advice("raise FLAGS_gpu_memory_limit_mb", f"this process set the limit{rest}")
    elif report.framework == "tensorflow":
        yield Advice("raise per_process_gpu_memory_fraction", f"this process set the limit{rest}")
    else:
        words = "raise torch.cuda.set_per_process_memory_fraction"
        gain = () if free is None else _gain_of_free(account)
        yield Advice(words, f"this process set the limit{rest}", *gain)


def _gain_of_free(account: Account) -> tuple[int, bool | None]:
    assert account.free is not None
    more = account.free.bytes - (account.available.bytes if account.available else 0)
    return gain_of(account, more)


def _need_less(report: OutOfMemoryReport, account: Account, cause: Cause) -> Iterator[Advice]:
    if report.device_type in ("mps", "cpu") or report.framework == "driver":
        return
    if cause.name == "larger than the device" and report.device_type != "tpu":
        yield Advice(
            "check the shape of the requested tensor",
            "this tensor alone exceeds the device: its shape is wrong, or attention materializes its scores "
            "(use flash or memory-efficient attention)",
        )
    if report.phase == "model":
        yield Advice(
            "put fewer weights on this device",
            "the failure is during model loading: shard the model (FSDP, ZeRO 3, tensor parallelism), load its weights "
            "in bf16 or fp16, or train adapters on a quantized model; a smaller micro-batch does not help here",
        )
        return
    if report.phase == "optimizer_step":
        yield Advice(
            "reduce the optimizer state",
            "the failure is in the optimizer step: shard its state (ZeRO 1, FSDP), use 8-bit state, or fuse the update "
            "(fused=True); a smaller micro-batch only leaves more memory free before the step",
        )
    asked = account.requested
    half = "" if asked is None else f", also the requested tensor ({format_bytes(asked.bytes)})"
    yield Advice(
        "halve the micro-batch, double the accumulation",
        f"halves memory that grows with the batch{half if report.phase != 'optimizer_step' else ''}; the training "
        "result stays the same",
    )
    yield Advice(
        "recompute activations",
        "saves one tensor per layer instead of all, for one more forward: jax.checkpoint"
        if report.framework == "xla"
        else "saves one tensor per layer instead of all, for one more forward (gradient checkpointing)",
    )
    yield Advice(
        "shard over more devices",
        "divides states (ZeRO 1 to 3, FSDP) or everything (tensor parallelism) by the number of devices",
    )
    if report.framework == "xla" and report.device_type == "gpu":
        yield Advice(
            "raise XLA_PYTHON_CLIENT_MEM_FRACTION",
            "JAX reserves three quarters of the device by default",
        )
