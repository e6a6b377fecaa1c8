"""Remedies in order, with their effect, from one message alone; and settings that avoid fragmentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.diagnosis.accounting import Account
from memcalc.diagnosis.causes import Cause
from memcalc.diagnosis.report import OutOfMemoryReport
from memcalc.units import format_bytes

MIB = 2**20

# max_split_size_mb: the minimum accepted by every version is 21 (allocator/pytorch/versions.py). Above 512 too few
# blocks are large enough to stay unsplit. At most half of the request, so that a block that held such a tensor is never
# split.
_LEAST_SPLIT, _MOST_SPLIT = 32, 512

_VARIABLES = {
    "cuda": "PYTORCH_CUDA_ALLOC_CONF",
    "hip": "PYTORCH_HIP_ALLOC_CONF",
    "npu": "PYTORCH_NPU_ALLOC_CONF",
}


class Advice(NamedTuple):
    """One remedy."""

    lever: str  # what to change
    effect: str  # of the change, as text
    gain_bytes: int | None = None  # upper bound of the gain; None if the message has no figures for it
    enough: bool | None = None  # whether that gain would let the request succeed


def gain_of(account: Account, gain: int) -> tuple[int, bool | None]:
    """Return the gain of a remedy, and whether it is enough for the failed request."""
    shortfall = account.shortfall
    return gain, None if shortfall is None else gain >= shortfall


def fragmentation_settings(report: OutOfMemoryReport, account: Account) -> Iterator[Advice]:
    """Yield allocator settings that avoid fragmentation."""
    if account.cached is None:
        return
    cached = account.cached.bytes
    if report.framework == "tensorflow":
        yield Advice(
            "TF_GPU_ALLOCATOR=cuda_malloc_async",
            "uses the driver's memory pool instead of BFC; the pool can map separate pages contiguously",
            *gain_of(account, cached),
        )
        return
    if report.framework == "xla":
        yield Advice(
            "XLA_PYTHON_CLIENT_ALLOCATOR=platform",
            "sends each request to the driver and frees it at once: slow, but without fragmentation",
            *gain_of(account, cached),
        )
        return
    variable = _VARIABLES.get(report.device_type)
    if variable is None:
        return
    old = "1." in report.wording  # 1.x and 2.0 print the same message
    yield Advice(
        f"{variable}=expandable_segments:True",
        "lets segments grow, so cached memory can serve requests of any size"
        + ("; needs PyTorch 2.1 or later, and Linux" if old else "; not on Windows"),
        *gain_of(account, cached),
    )
    split = _split_size(account)
    if split is not None:
        yield Advice(
            f"{variable}=max_split_size_mb:{split}",
            f"does not split freed blocks of {split} MiB and more: they serve the next large tensor, or are freed to "
            "the device",
            *gain_of(account, cached),
        )


def _split_size(account: Account) -> int | None:
    """Return the largest power of two, in MiB, up to half of the request; None if too small."""
    if account.requested is None:
        return None
    split = _MOST_SPLIT
    while split * MIB * 2 > account.requested.bytes:
        split //= 2
    return split if split >= _LEAST_SPLIT else None


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
