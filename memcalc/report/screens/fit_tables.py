"""The tables of `fit`'s screen."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.report.labels import letter
from memcalc.report.screen import Column, TextTable, numeric
from memcalc.report.screens.fit_text import amount, layout_legend, short_layout
from memcalc.report.tables.breakdown import breakdown
from memcalc.search.costs import TERMS
from memcalc.search.minima import GpuVerdict
from memcalc.search.result import FitResult
from memcalc.spec.recompute_plan import words
from memcalc.units import Unit, format_number


def layout_grid(answer: FitResult, unit: Unit) -> TextTable:
    """Return one row per layout: its degrees, memory and cost."""
    best = answer.best
    experts = any(found.result.spec.parallelism.expert_parallel > 1 for found in best)
    cheapest = best[0].costs.total
    rows = []
    for number, found in enumerate(best, 1):
        spread, training = found.result.spec.parallelism, found.result.spec.training
        rows.append(
            (
                str(number),
                f"{spread.tensor_parallel}{'+sp' if spread.sequence_parallel else ''}",
                str(spread.context_parallel),
                *((str(spread.expert_parallel),) if experts else ()),
                str(spread.pipeline_parallel),
                str(spread.virtual_stages),
                str(spread.data_parallel),
                f"{spread.zero_stage} {spread.engine}",
                words(training.recompute),
                str(training.micro_batch_size),
                str(training.gradient_accumulation_steps),
                format_number(found.result.headline.device_bytes or 0, unit),
                f"{found.costs.total:.3g}",
                f"{100 * (found.costs.total / cheapest - 1):+.1f}%" if number > 1 else "",
            )
        )
    columns = (
        Column("", right=True),
        Column("t"),
        Column("c", right=True),
        *((Column("e", right=True),) if experts else ()),
        *numeric("p", "v", "N"),
        Column("ZeRO"),
        Column("recompute"),
        *numeric("b", "m", unit, "seconds", ""),
    )
    return TextTable("", columns, rows, frozenset({0}), legend=layout_legend(answer))


def cost_grid(answer: FitResult) -> TextTable:
    """Return the cost terms that any layout has, in seconds per step."""
    terms = used_terms(answer)
    rows = [
        (str(number), *(f"{getattr(found.costs, term):.3f}" for term in terms), f"{found.costs.total:.3f}")
        for number, found in enumerate(answer.best, 1)
    ]
    columns = numeric("", *terms, "total")
    return TextTable("Seconds of a step at peak rates", columns, rows)


def used_terms(answer: FitResult) -> list[str]:
    """Return the cost terms that are not zero in all layouts."""
    return [term for term in TERMS if any(getattr(found.costs, term) for found in answer.best)]


def memory_grid(answer: FitResult, unit: Unit) -> TextTable:
    """Return memory at the peak of the rank that needs most, by component letter; small parts are added up."""
    whole = [table.inside | table.outside for table in (breakdown(found.result) for found in answer.best)]
    parts = shown_parts(answer)
    rows = []
    for number, sizes in enumerate(whole, 1):
        shown = [sizes.get(name, 0) for name in parts]
        total = sum(sizes.values())
        numbers = [*shown, total - sum(shown), total]
        rows.append((str(number), *(format_number(size, unit) for size in numbers)))
    heads = (*(letter(name) for name in parts), "rest", "device")
    columns = numeric("", *heads)
    return TextTable(f"Memory of the rank with the highest peak, {unit}", columns, rows, legend=memory_legend(answer))


def shown_parts(answer: FitResult) -> list[str]:
    """Return the parts of memory that are at least 1% of any layout's memory."""
    tables = [breakdown(found.result) for found in answer.best]
    whole = [table.inside | table.outside for table in tables]
    order = [*(part.value for part in Component), "cached_segments", "device_context", "communication_library"]
    return [name for name in order if any(100 * sizes.get(name, 0) >= sum(sizes.values()) for sizes in whole)]


def memory_legend(answer: FitResult) -> str:
    """Return the legend of the component letters."""
    return ", ".join(f"{letter(name)} {name.replace('_', ' ')}" for name in shown_parts(answer))


def term_grid(answer: FitResult) -> TextTable:
    """Return the description and source of each cost term, then the rates."""
    rows = [(term, f"{TERMS[term][0]} [{TERMS[term][1]}]") for term in used_terms(answer)]
    system = answer.system
    rates = (
        f"{system.flops / 1e12:g} TFLOP/s, {system.link_bytes / 1e9:g} GB/s inside a node, "
        f"{system.nic_bytes / 1e9:g} GB/s per GPU between nodes [{system.source}]"
    )
    return TextTable(
        "Terms of the cost", (Column("term"), Column("", wrap=True)), [*rows, ("rates", rates)], head=False
    )


def pruned_grid(answer: FitResult) -> TextTable:
    """Return the excluded layouts and the reasons."""
    rows = [
        (f"{times:,}", ": ".join(filter(None, (choice, reason)))) for (choice, reason), times in answer.pruned.items()
    ]
    columns = (Column("choices", right=True), Column("why they are excluded", wrap=True))
    return TextTable("Excluded layouts", columns, rows)


def offer_grid(answer: FitResult) -> TextTable:
    """Return the GPUs that have a price, with the number of them on which a token costs least."""
    rows = []
    for number, offer in enumerate(answer.offers, 1):
        found, dearer = offer.layouts, ""
        if found is None:
            fewer = "may fit" if offer.verdict == "unknown" else "too large"
            rows.append(("", offer.gpu.name, amount(offer.price), "", "", "", "", offer.lacks or fewer))
            continue
        if number > 1:
            dearer = f"{100 * (offer.of_tokens / answer.offers[0].of_tokens - 1):+.1f}%"
        costs = (amount(offer.price), str(found.gpus), amount(offer.hourly), amount(offer.of_tokens), dearer)
        layout = short_layout(found.best[0].result.spec)
        rows.append((str(number), offer.gpu.name, *costs, f"{layout}{'; fewer GPUs may fit' * offer.may_be_fewer}"))
    columns = (
        Column("", right=True),
        Column("GPU"),
        *numeric("price", "GPUs", "per hour", "10^6 tokens", ""),
        Column("cheapest layout", wrap=True),
    )
    strong = frozenset({0} if answer.offers[0].layouts is not None else ())
    return TextTable(
        "Prices: one GPU per hour, all GPUs per hour, a million tokens at peak rates", columns, rows, strong
    )


CARD_WORDS = {"fits": "fits", "does-not-fit": "too large", "unknown": "may fit"}


_CARDS_BELOW, _CARDS_ABOVE = 6, 14  # rows before the smallest GPU that fits, and from it on


def shown_gpus(answer: FitResult) -> list[GpuVerdict]:
    """Return the GPUs around the smallest that fits."""
    first = next((index for index, sized in enumerate(answer.gpu_verdicts) if sized.suffices), len(answer.gpu_verdicts))
    return answer.gpu_verdicts[max(first - _CARDS_BELOW, 0) : first + _CARDS_ABOVE]


def gpu_grid(answer: FitResult, unit: Unit) -> TextTable:
    """Return what the run needs on the GPUs around the smallest that fits; the JSON document has all."""
    gpus = shown_gpus(answer)
    lacks = any(sized.lacks for sized in gpus)
    rows = [
        (
            CARD_WORDS[sized.verdict.answer],
            sized.gpu.name,
            f"{'≥ ' * (sized.verdict.device_bytes is None)}{format_number(sized.device_bytes, unit)}",
            format_number(sized.gpu.usable_bytes, unit),
            *((sized.lacks,) if lacks else ()),
        )
        for sized in gpus
    ]
    strong = frozenset(index for index, sized in enumerate(gpus) if sized.suffices)
    columns = (Column(""), Column("GPU"), *numeric(f"needs {unit}", "usable"))
    left_out = len(answer.gpu_verdicts) - len(gpus)
    title = (
        f"{len(gpus)} of {len(answer.gpu_verdicts)} GPUs, by usable memory; --format json has all" if left_out else ""
    )
    return TextTable(title, (*columns, *((Column("but", wrap=True),) if lacks else ())), rows, strong)
