"""What a plan of recomputation buys, in words: batches, when the larger one pays, and offload in its place."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.recomputation.recommendation import RecomputeResult
from memcalc.report.labels import plural
from memcalc.units import Unit, format_bytes

ASSUMED = (
    "Assumed: backward takes twice forward's FLOPs; a GPU reaches b/(b + b_half) of its peak rate at a micro-batch of "
    "b. Fixed costs of a step (the optimizer update, gradient all-reduce beyond backward) come in "
    "addition and favor the larger one."
)


def bought(planning: RecomputeResult, unit: Unit) -> Iterator[str]:
    """Sentences."""
    gain = planning.gain
    about = "Largest micro-batch" if gain.replayed else "Largest micro-batch, about"
    if not gain.without:
        yield f"{about}: {gain.most} with recomputation; without it not even one sequence fits."
    elif gain.most == gain.without:
        yield f"{about}: {gain.most}, with and without recomputation."
    else:
        yield f"{about}: {gain.most} with recomputation, {gain.without} without."
    if not gain.replayed:
        yield "Estimated from allocated memory; --maximize micro_batch_size replays it."
    if 0 < gain.without < gain.most:
        more = f"{gain.slow_down - 1:.1%} more work for each sequence"
        if gain.pays_below is None:
            yield f"A larger micro-batch cannot pay: {more} for {gain.most / gain.without - 1:.0%} more at once."
        elif gain.slow_down > 1:
            yield (
                f"It pays, with {more}, if the GPU reaches less than {gain.pays_below:.0%} of its rate with "
                f"{gain.without}."
            )
        yield ASSUMED
    yield from _offloaded(planning, unit)


def _offloaded(planning: RecomputeResult, unit: Unit) -> Iterator[str]:
    third = planning.third
    if third is None:
        return
    link = f"{third.bytes_per_second / 1e9:g} GB/s each way (--host-bandwidth)"
    if third.offload is None:
        yield f"Offload to host memory instead is not enough with any link (here {link})."
        return
    waited = third.offload.waited_seconds
    yield (
        f"Offload to host memory instead: {format_bytes(third.offload.freed_bytes, unit)} of "
        f"{plural(len(third.offload.blocks), 'layer')} at {link}: a step {waited / third.step_seconds:.0%} longer than "
        f"{third.step_seconds:.3g} s, at the GPU's peak rate, where copies overlap least. "
        f"Host memory: {format_bytes(third.host_bytes_per_rank, unit)} per rank, "
        f"{format_bytes(third.host_bytes_per_node, unit)} per node."
    )
