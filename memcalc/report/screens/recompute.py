"""The report of `recompute`: the plan, what it needs and costs, and the lines to paste."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memcalc.recomputation.framework_plans import FrameworkText
from memcalc.recomputation.recommendation import RecomputeResult
from memcalc.recomputation.verification import DeviceVerification
from memcalc.report.labels import listed, plural
from memcalc.report.screen import Column, Screen, TextTable, draw_grid, draw_line, draw_list, numeric
from memcalc.report.screens.recompute_tables import front_grid, layers_grid, plans_grid, slower
from memcalc.report.screens.sizing import VERDICT_STYLES
from memcalc.report.screens.verdict import error_bars, subject
from memcalc.units import Unit, format_bytes, format_number


def draw_planning(screen: Screen, planning: RecomputeResult, unit: Unit, checked: list[DeviceVerification]) -> None:
    """Draw the screen of `memcalc recompute`."""
    for line in subject(planning.result).lines:
        draw_line(screen, line, 0, "bold")
    screen.line()
    draw_line(screen, verdict(planning, unit), 0, VERDICT_STYLES[planning.verdict.answer])
    for line in remarks(planning, unit):
        draw_line(screen, line, 2)
    screen.line()
    draw_grid(screen, plans_grid(planning, unit))
    draw_grid(screen, layers_grid(planning, unit))
    which = "plans of whole layers" if planning.saved_operators else ""
    marks = ("fits", "likely") if planning.verdict.answer == "fits" else ("cannot say", "")  # one plan was judged
    draw_grid(screen, front_grid(planning, unit, which, marks))
    for device in checked:
        if device.missing:
            draw_line(screen, f"Not verified on the null CUDA device: {device.missing}", 0)
            screen.line()
        else:
            draw_grid(screen, checked_grid(device, planning, unit))
    screen.line(("Gain of the plan", "bold"))
    for line in gain_sentences(planning, unit):
        draw_line(screen, line, 2)
    screen.line()
    draw_yaml(screen, planning)
    screen.line(("The plan in the syntax of other frameworks, as close as each allows", "bold"))
    for text in planning.framework_texts:
        draw_line(screen, f"{text.framework}: {distance(text, planning, unit)}", 2)
        for line in text.lines:
            screen.line((f"    {line}", ""))
    screen.line()
    draw_list(screen, "Not modelled", planning.result.not_modelled)


def verdict(planning: RecomputeResult, unit: Unit) -> str:
    """One sentence: whether the run fits with the plan, and what that costs."""
    chain, again = planning.configured.chain, planning.plan.evaluation.recompute_flops
    cost = f"recomputes {again / chain.flops:.1%} of a forward, a step is {slower(planning, again)} longer"
    if planning.verdict.answer == "unknown":
        return f"CANNOT SAY: {_uncertain(planning, unit)} The plan {cost if again else 'costs nothing'}."
    needed = planning.result.headline.device_bytes or planning.result.headline.reserved_bytes or 0
    room = f"needs {format_bytes(needed, unit)} of {_available(planning, unit)}"
    free = f" ({format_bytes(planning.limit - needed, unit)} free)" if needed <= planning.limit else ""
    if again:
        return f"FITS: {room}{free}; {cost}."
    if planning.saved_operators:
        return f"FITS: {room}{free}; recomputes no matmul, only the small operators between matmuls."
    return f"NOTHING TO RECOMPUTE: {room}{free}."


def _uncertain(planning: RecomputeResult, unit: Unit) -> str:
    """Return the reason for the verdict CANNOT SAY."""
    decision = planning.verdict
    least, there = format_bytes(decision.least_bytes, unit), _available(planning, unit)
    if decision.unmodelled or decision.interval is None:
        return f"needs at least {least} of {there}. Not modelled: {listed(decision.unmodelled)}."
    low, high = format_bytes(decision.interval.low_bytes, unit), format_bytes(decision.interval.high_bytes, unit)
    return f"needs at least {least}, probably {low} to {high}, of {there}."


def _available(planning: RecomputeResult, unit: Unit) -> str:
    gpu = planning.gpu
    if gpu is None or planning.limit < gpu.usable_bytes:
        return f"the {format_bytes(planning.limit, unit)} budget"
    return f"{format_bytes(planning.limit, unit)} usable on {gpu.label}"


def remarks(planning: RecomputeResult, unit: Unit) -> Iterator[str]:
    """Yield sentences on the verdict's certainty, allocated memory, the plan, and recomputed layers."""
    loss, flops = planning.plan.loss, planning.configured.chain.flops
    if bars := error_bars(planning.result, unit):
        yield bars
    peak = f"Allocated at the peak: {format_bytes(planning.peak_bytes, unit)}"
    more = f"{format_bytes(abs(planning.remainder_bytes), 'MiB')} {'more' if planning.remainder_bytes > 0 else 'less'}"
    if not planning.remainder_bytes:
        yield f"{peak}."
    elif planning.result.confidence == "replay":
        yield (
            f"{peak}. The allocator replay finds {more}, in unsplit block remainders, than the formulas of the tables "
            "below."
        )
    else:
        yield f"{peak}: {more} than the chain of blocks of the tables below."
    if loss == 0:
        yield f"No plan that allocates at most {format_bytes(planning.budget, unit)} recomputes less."
    elif loss is not None:
        yield (
            f"By allocated memory alone a plan within {format_bytes(planning.budget, unit)} could recompute at most "
            f"{loss / flops:.2%} of a forward less."
        )
    if planning.saved_operators:
        saved = ", ".join(planning.saved_operators)
        yield f"Recomputed layers save the results of {saved} and recompute everything else."
        yield "FLOPs count matmuls only; recomputed norms, activation functions and sums take time too."
    if planning.configured.chain.longest == 1 and planning.plan.plan.strategy != "selective":
        yield "The engine gathers parameters layer by layer, so each layer is a separate checkpoint segment."


def checked_grid(checked: DeviceVerification, planning: RecomputeResult, unit: Unit) -> TextTable:
    """Return the table of planned and traced peaks by phase, then reserved memory and whether it fits."""
    outside = planning.result.headline.outside
    device = checked.reserved[1] + outside.device_context + outside.communication_library
    fits = "fits" if device <= planning.limit else "DOES NOT FIT"
    rows = [*checked.phases, ("peak", checked.planned, checked.traced), (f"reserved, {fits}", *checked.reserved)]
    cells = [
        (phase, format_number(planned, unit), format_number(traced, unit), f"{(planned / traced - 1):+.3%}")
        for phase, planned, traced in rows
    ]
    columns = (Column("phase"), *numeric(f"planned {unit}", "traced", "difference"))
    return TextTable(f"The planned step, traced on {checked.device}", columns, cells, frozenset({len(cells) - 1}))


def draw_yaml(screen: Screen, planning: RecomputeResult) -> None:
    """Draw the lines of the configuration with the plan."""
    screen.line(("For the configuration", "bold"))
    screen.line(("  training:", ""))
    draw_line(screen, f"recompute: {yaml_line(planning.recompute)}", 4)
    if planning.saved_operators:
        draw_line(screen, f"recompute_keep: {yaml_line(list(planning.saved_operators))}", 4)
    screen.line()


def yaml_line(recompute: list[Any] | str) -> str:
    """Return a plan as one line of YAML."""
    return recompute if isinstance(recompute, str) else f"[{', '.join(map(yaml_item, recompute))}]"


def yaml_item(item: Any) -> str:
    """Return a layer, a range or a list as YAML."""
    return f"[{', '.join(map(yaml_item, item))}]" if isinstance(item, list) else str(item)


def distance(text: FrameworkText, planning: RecomputeResult, unit: Unit) -> str:
    """Return the memory and cost of the framework's own plan, compared with the plan."""
    if text.difference:
        return text.difference
    peak = text.evaluation.peak_bytes - planning.plan.evaluation.peak_bytes
    again = text.evaluation.recompute_flops - planning.plan.evaluation.recompute_flops
    if peak == 0 and again == 0:
        return "the plan itself"
    parts = []
    if peak:
        parts.append(f"{format_bytes(abs(peak), unit)} {'more' if peak > 0 else 'less'} at the peak")
    if again:
        parts.append(
            f"{abs(again) / planning.configured.chain.flops:.1%} of a forward {'more' if again > 0 else 'less'}"
        )
    over = text.evaluation.peak_bytes > planning.budget
    return " and ".join(parts or ["the same"]) + (", which does not fit" if over else "")


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
