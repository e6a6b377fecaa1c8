"""Ring attention of PyTorch's context parallelism: the buffers of one rank's forward and backward.

torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py (_templated_ring_attention,
_templated_ring_attention_backward, _SDPAMerger), with its load balancing: each of c ranks has two chunks of every
sequence, and computes c blocks of attention, one for the keys of each rank. A block of a later rank in the ring reads
the second half of the queries alone. Results are merged in fp32.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from memcalc.workspaces import Script, attention
from memcalc.workspaces.attention import FP32, RANDOM_STATE, Heads

Rotation = Literal["all-gather", "ring"]  # how keys and values reach the other ranks
UNUSED_MASK = 8  # bytes


class Ring(NamedTuple):
    """The ranks that share a sequence."""

    ranks: int  # their number, at least 2
    rotation: Rotation  # whether the keys and values of all ranks are gathered at once, or passed from rank to rank
    rank: int  # the rank that has the buffers

    def is_partial(self, block: int) -> bool:
        """Return whether a block of attention has the second half of the queries alone."""
        return block > self.rank


class _Variables:
    """Buffers by the Python variables that reference them; a buffer is freed with its last reference."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self._sizes: list[int] = []
        self._references: Counter[int] = Counter()
        self._named: dict[str, int] = {}

    def bind(self, name: str, size: int) -> None:
        """Allocate a buffer, then let a variable reference it instead of what it referenced before."""
        self.script.append(size)
        self._sizes.append(size)
        self._point(name, len(self._sizes) - 1)

    def alias(self, name: str, other: str) -> None:
        """Let a variable reference the buffer of another one."""
        self._point(name, self._named[other])

    def drop(self, *names: str) -> None:
        """Remove variables, those that exist."""
        for name in names:
            self._release(self._named.pop(name, None))

    def run(self, script: Script) -> None:
        """Run an operator's own buffers, of which none stays."""
        self.script.extend(script)

    def _point(self, name: str, buffer: int) -> None:
        self._references[buffer] += 1
        before, self._named[name] = self._named.get(name), buffer
        self._release(before)

    def _release(self, buffer: int | None) -> None:
        if buffer is None:
            return
        self._references[buffer] -= 1
        if not self._references[buffer]:
            self.script.append(-self._sizes[buffer])


class _Bytes(NamedTuple):
    """Bytes of one rank's tensors."""

    queries: int
    keys: int
    queries_in_fp32: int
    keys_in_fp32: int
    log_sum_exps: int


def _bytes(sizes: Heads) -> _Bytes:
    tokens = sizes.b * sizes.s
    queries, keys = tokens * sizes.h * sizes.d, tokens * sizes.kv * sizes.d
    item = sizes.item_bytes
    return _Bytes(queries * item, keys * item, queries * FP32, keys * FP32, tokens * sizes.h * FP32)


def _copied(sizes: Heads) -> bool:
    """Return whether keys and values, a view by head of a matrix by token, are copied to be contiguous."""
    return sizes.kv > 1


def forward(sizes: Heads, ring: Ring, multiprocessors: int) -> Script:
    """Return the script before the merged output is allocated; `sizes` are of the rank's shard.

    Its log-sum-exps are not in it: the ones of the first block, or copies, stay.
    """
    size, now = _bytes(sizes), _Variables()
    if _copied(sizes):
        now.bind("key", size.keys)
        now.bind("value", size.keys)
    for block in range(ring.ranks):
        if block:
            now.drop("sent")  # the collective has ended
            now.alias("next", "received")
            now.alias("key", "next")
            now.alias("value", "next")
        if block < ring.ranks - 1:
            now.bind("sent", 2 * size.keys)
            _exchange(now, ring, "received", 2 * size.keys, block)
        partial = ring.is_partial(block)
        parts = 2 if partial else 1
        keys = sizes.t if partial or not block else sizes.t // 2
        call = sizes._replace(s=sizes.s // parts, t=keys)
        now.bind("new out", size.queries // parts)
        now.bind("new log-sum-exps", size.log_sum_exps // parts)
        before, after = attention.flash_forward(call, 0.0, multiprocessors)
        now.run(before)
        now.bind("new state", RANDOM_STATE)
        now.bind("new mask", UNUSED_MASK)
        now.run(after)
        for name in ("out", "log-sum-exps", "mask", "state"):
            now.alias(name, f"new {name}")
            now.drop(f"new {name}")
        now.bind("block", size.queries_in_fp32 // parts)
        _merge(now, size, block, parts)
        now.drop("block")
    now.drop(
        "merged", "merged log-sum-exps", "received", "next", "key", "value", "out", "log-sum-exps", "state", "mask"
    )
    return tuple(now.script)


def _exchange(now: _Variables, ring: Ring, name: str, size: int, block: int) -> None:
    """Send keys and values: gathered once for all ranks, or to the next rank."""
    if ring.rotation == "ring":
        now.bind(name, size)
    elif not block:
        now.bind(name, ring.ranks * size)
    else:
        now.drop("sent")


def _merge(now: _Variables, size: _Bytes, block: int, parts: int) -> None:
    """Merge a block's output into the sum of the blocks before (_SDPAMerger._merge_one)."""
    if not block:
        now.alias("merged", "block")
        now.alias("merged log-sum-exps", "log-sum-exps")
        return
    rows, elements = size.log_sum_exps // parts, size.queries_in_fp32 // parts
    now.bind("difference of rows", rows)
    now.bind("weights", rows)
    now.drop("difference of rows")
    now.bind("difference", elements)
    now.bind("product", elements)
    now.drop("weights", "difference")
    now.bind("sum", elements)
    now.drop("product")
    now.bind("difference of rows", rows)
    now.bind("weights", rows)
    now.drop("difference of rows")
    now.bind("sum of rows", rows)
    now.drop("weights")
    if parts == 1:
        now.alias("merged log-sum-exps", "sum of rows")
        now.alias("merged", "sum")
    else:
        now.bind("merged log-sum-exps", size.log_sum_exps)
        now.bind("merged", size.queries_in_fp32)
    now.drop("sum of rows", "sum")


def backward(sizes: Heads, ring: Ring) -> Script:
    """Return the script before the gradients of q, and of k and v together, are allocated."""
    size, now = _bytes(sizes), _Variables()
    now.bind("grad_query", size.queries_in_fp32)
    now.bind("grad_key", size.keys_in_fp32)
    now.bind("grad_value", size.keys_in_fp32)
    if _copied(sizes):
        now.bind("key", size.keys)
        now.bind("value", size.keys)
        now.alias("k", "key")
        now.alias("v", "value")
    by_head = ring.rank < ring.ranks - 1  # the merged output is a concatenation, with the layout by head
    for block in range(ring.ranks):
        partial = ring.is_partial(block)
        parts = 2 if partial else 1
        if block:
            now.alias("buffer", "received")
            now.alias("key", "buffer")
            now.alias("value", "buffer")
        if block < ring.ranks - 1:
            now.bind("next_kv", 2 * size.keys)
            if ring.rotation == "ring" or not block:
                now.bind("received", (1 if ring.rotation == "ring" else ring.ranks) * 2 * size.keys)
        if partial:
            now.bind("rows", size.log_sum_exps // parts)
            now.alias("lse", "rows")
            now.drop("rows")
        if block:
            now.alias("k", "key")
            now.alias("v", "value")
        keys = 1 if partial or not block else 2
        copies = [size.queries // parts] if by_head else []
        copies += [size.queries // parts] if partial and sizes.b > 1 else []
        for index, copy in enumerate(copies):
            now.bind(f"copy {index}", copy)
        now.bind("new query", size.queries // parts)
        now.bind("new key", size.keys // keys)
        now.bind("new value", size.keys // keys)
        now.run(attention.flash_backward(sizes._replace(s=sizes.s // parts, t=sizes.t // keys)))
        now.drop(*(f"copy {index}" for index in range(len(copies))))
        for name in ("query", "key", "value"):
            now.alias(f"grad_{name}_", f"new {name}")
            now.drop(f"new {name}")
        _add_to_keys(now, size, sizes, ring, block)
        now.bind("next_grad_kv", 2 * size.keys_in_fp32)
        now.drop("flat 1", "flat 0")
        now.bind("received gradients", 2 * size.keys_in_fp32)
        if partial:
            now.bind("grad_query", size.queries_in_fp32)
    return tuple(now.script)


def _add_to_keys(now: _Variables, size: _Bytes, sizes: Heads, ring: Ring, block: int) -> None:
    """Add a block's gradients of keys and values to the sums that arrive from the rank before."""
    if not block:
        if _copied(sizes):  # flatten() of a layout by token
            now.bind("flat 0", size.keys_in_fp32)
            now.bind("flat 1", size.keys_in_fp32)
        return
    now.alias("next_grad_kv", "received gradients")
    now.alias("grad_key", "next_grad_kv")
    now.alias("grad_value", "next_grad_kv")
    if not ring.is_partial(block):
        now.bind("grad_key", size.keys_in_fp32)
        now.bind("grad_value", size.keys_in_fp32)
