"""Sentences on the gain of a recomputation plan: larger batches, when they are faster, and offload instead."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.recomputation.recommendation import RecomputeResult
from memcalc.report.labels import plural
from memcalc.units import Unit, format_bytes

ASSUMED = (
    "Assumed: backward takes twice forward's FLOPs; a GPU reaches b/(b + b_half) of its peak rate at a micro-batch of "
    "b. Fixed costs of a step (the optimizer update, gradient all-reduce beyond backward) are not included; they favor "
    "the larger micro-batch."
)


def gain_sentences(planning: RecomputeResult, unit: Unit) -> Iterator[str]:
    """Yield the sentences below "Gain of the plan"."""
    gain = planning.gain
    about = "Largest micro-batch" if gain.replayed else "Largest micro-batch, about"
    if not gain.without:
        yield f"{about}: {gain.most} with recomputation, none without."
    elif gain.most == gain.without:
        yield f"{about}: {gain.most}, with and without recomputation."
    else:
        yield f"{about}: {gain.most} with recomputation, {gain.without} without."
    if not gain.replayed:
        yield "Estimated from allocated memory; --maximize micro_batch_size replays it."
    if 0 < gain.without < gain.most:
        more = f"{gain.slow_down - 1:.1%} more work per sequence"
        if gain.pays_below is None:
            yield (
                f"The larger micro-batch is never faster: {gain.most / gain.without - 1:.0%} more sequences at once do "
                f"not outweigh {more}."
            )
        elif gain.slow_down > 1:
            yield (
                f"The larger micro-batch needs {more}. It is faster only if the GPU reaches less than "
                f"{gain.pays_below:.0%} of its peak rate at micro-batch {gain.without}."
            )
        yield ASSUMED
    yield from _offloaded(planning, unit)


def _offloaded(planning: RecomputeResult, unit: Unit) -> Iterator[str]:
    third = planning.third
    if third is None:
        return
    link = f"{third.bytes_per_second / 1e9:g} GB/s each way (--host-bandwidth)"
    if third.offload is None:
        yield f"Alternative: offload to host memory is not enough, regardless of the link (here {link})."
        return
    waited = third.offload.waited_seconds
    yield (
        f"Alternative: offload {format_bytes(third.offload.freed_bytes, unit)} of activations "
        f"({plural(len(third.offload.blocks), 'layer')}) to host memory at {link}. A step is then "
        f"{waited / third.step_seconds:.0%} longer than {third.step_seconds:.3g} s, its time at the GPU's peak rate, "
        f"where copies overlap least. Host memory: {format_bytes(third.host_bytes_per_rank, unit)} per rank, "
        f"{format_bytes(third.host_bytes_per_node, unit)} per node."
    )
