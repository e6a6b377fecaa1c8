"""KV cache of generation, and the largest batch and context that fit."""

from __future__ import annotations

from memcalc.ledger.result import Result
from memcalc.report.grid import Column, TextTable
from memcalc.report.labels import plural
from memcalc.units import Unit, format_bytes


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
