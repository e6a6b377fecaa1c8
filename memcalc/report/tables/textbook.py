"""Published closed forms compared with the ledger; in generation, the KV cache and the largest batch and context."""

from __future__ import annotations

from memcalc.ledger.component import Component
from memcalc.ledger.result import ModuleResult, Result
from memcalc.report.labels import count, plural, ratio
from memcalc.report.screen import Column, TextTable, numeric
from memcalc.units import Unit, format_bytes

_STATES = (Component.WEIGHTS, Component.MASTER_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE)

_LETTERS = "l layers, d hidden size, V vocabulary, b micro-batch, s sequence, h heads"

_PARAMETER_BYTES = 2  # the ratio's convention: parameters held in 16 bits


def textbook_grid(result: Result | ModuleResult, unit: Unit) -> TextTable | None:
    """Return each closed form with its value, the ledger's number on this rank, and its assumptions.

    None for a module, and for models that the closed forms do not describe.
    """
    textbook, ledger = result.textbook if isinstance(result, Result) else None, result.ledger
    if textbook is None:
        return None
    columns = [ledger.components_by_phase[phase] for phase in ledger.phases]
    states = max(sum(column.get(component, 0) for component in _STATES) for column in columns)
    activations = max(column.get(Component.ACTIVATIONS, 0) for column in columns)
    rows = [
        (
            "parameters",
            "l(12d²+13d)+Vd",
            count(textbook.parameters),
            count(result.parameters),
            "no positions",
        ),
        (
            "model states",
            f"{textbook.bytes_per_parameter} bytes/parameter",
            format_bytes(textbook.model_state_bytes, unit),
            format_bytes(states, unit),
            "all copies at once",
        ),
        (
            "activations",
            "l(34bsd+5bs²h)",
            format_bytes(textbook.activation_bytes, unit),
            format_bytes(activations, unit),
            "16-bit GPT, dropout, no recomputation",
        ),
        (
            "ratio",
            "activations/params",
            ratio(textbook.activation_bytes / (_PARAMETER_BYTES * textbook.parameters)),
            "-" if len(result.ranks) > 1 else ratio(activations / (_PARAMETER_BYTES * result.parameters)),
            "2-byte parameters",
        ),
    ]
    return TextTable(
        "Published formulas (one GPU, unsharded) compared with this rank",
        (Column(""), Column("formula"), *numeric("textbook", "ledger"), Column("assumptions", wrap=True)),
        rows,
        legend=_LETTERS,
    )


def short_textbook_grid(result: Result, unit: Unit) -> TextTable | None:
    """Return the three published numbers next to the ledger's; None for a model that they do not describe."""
    whole = textbook_grid(result, unit)
    if whole is None:
        return None
    rows = [row[:4] for row in whole.rows[:3]]
    numbers = numeric("one GPU", "this run")
    return TextTable("", (Column("published formula"), Column(""), *numbers), rows, legend=_LETTERS)


def generation_grid(result: Result, unit: Unit, *, largest: bool = False) -> TextTable:
    """Return the size of the cache per token, per sequence and in total.

    Args:
        result: the estimate of a generation.
        unit: of sizes.
        largest: add the largest batch and context that fit, which takes some seconds of allocator replays to find.
    """
    inference, found = result.spec.inference, result.generation
    assert inference is not None
    assert found is not None
    sequence = f"{inference.context_length:,} tokens"
    rows = [
        ("per token", format_bytes(found.bytes_per_token, "bytes"), "in all layers"),
        ("per sequence", format_bytes(found.bytes_per_sequence, unit), sequence),
        (
            "all",
            format_bytes(found.bytes_per_sequence * inference.batch_size, unit),
            plural(inference.batch_size, "sequence"),
        ),
    ]
    most = found.largest if largest else None
    if most is not None:
        positions = ", all positions of the model" if most.all_positions else ""
        rows += [
            ("largest batch", f"{most.batch_size:,}", f"with {inference.context_length:,} tokens each"),
            ("longest context", f"{most.context_length:,}", f"{plural(inference.batch_size, 'sequence')}{positions}"),
        ]
    where = "on each GPU" if result.spec.parallelism.tensor_parallel > 1 else "all layers"
    fit = "" if most is None or result.gpu is None else f"; largest that fit on {result.gpu.label}"
    columns = (Column(""), Column("", right=True), Column("", wrap=True))
    return TextTable(f"KV cache, {where}{fit}", columns, rows)
