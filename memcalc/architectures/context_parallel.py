"""Context parallelism: every tensor along the sequence has the rank's shard of it.

Megatron-LM docs "context_parallel": all activations are sharded along the sequence, including those that sequence
parallelism shards further; weights are not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from memcalc.programs.program import Program, Storage

RENAMED = {"s": "s/c", "s/t": "s/(c·t)"}


def over_context_ranks(block: Program) -> Program:
    """Return a block with the sequence axes of one of c context-parallel ranks."""
    return replace(block, storages=tuple(_split(storage) for storage in block.storages))


def _split(storage: Storage) -> Storage:
    rule = storage.rule
    if isinstance(rule, partial):
        renamed = partial(rule.func, **{name: _axes(value) for name, value in rule.keywords.items()})
        renamed.__doc__ = rule.__doc__
        rule = renamed
    return storage._replace(shape=tuple(RENAMED.get(axis, axis) for axis in storage.shape), rule=rule)


def _axes(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(RENAMED.get(axis, axis) for axis in value)
    return RENAMED.get(value, value) if isinstance(value, str) else value
