"""RoPE in transformers' families."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.architectures.huggingface.family import Family
from memcalc.programs.tape import Tensor


class Rotary(Family):
    """apply_rotary_pos_emb of llama, and its variants.

    Where the config rotates a part of each head, that part is split off, rotated, and concatenated with the rest.
    """

    always_joins = False  # with the rest, even if it is empty
    joins_queries_first = False  # q is joined before k is rotated
    turns_in_fp32 = False  # q.float(), k.float(), each cast separately
    casts_to_turn = False  # q and k are both cast to fp32 before either is rotated

    def positioned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys: all of each head, or its first features."""
        ops, c = self.ops, self.c
        if c.layer.without_rope:
            return q, k
        if c.liger:
            return ops.liger_rope(q, "q"), ops.liger_rope(k, "k")
        tables = self.interleaved_tables()
        given = {"q": q, "k": k}
        if self.casts_to_turn:
            given = {name: ops.cast(x, "fp32", f"{name} in fp32") for name, x in given.items()}
        cut = {name: self.split_rotary(x, name) for name, x in given.items()}
        turned: dict[str, Tensor] = {}
        for names in (("q",), ("k",)) if self.joins_queries_first else (("q", "k"),):
            turned |= {name: self.rotated(cut[name][0], name, tables) for name in names}
            turned |= {name: self.joined(turned[name], cut[name][1], given[name], name) for name in names}
        found = [ops.cast(turned[name], x.dtype) if self.in_fp32 else turned[name] for name, x in (("q", q), ("k", k))]
        if self.in_fp32:  # until apply_rotary_pos_emb returns both
            self.tape.still_referenced(*turned.values(), *given.values())
        self.tape.still_referenced(*tables)
        return found[0], found[1]

    @property
    def in_fp32(self) -> bool:
        """Whether RoPE is applied in fp32 and the result is cast back."""
        return self.wide_tables or self.turns_in_fp32 or self.casts_to_turn

    @property
    def rotated_by_head(self) -> bool:
        """Whether rotated queries and keys are contiguous by head: concatenated ones are."""
        return self.always_joins or self.c.position.partial_rotary

    def interleaved_tables(self) -> tuple[Tensor, ...]:
        """repeat_interleave of the first halves of the model's cos/sin cache."""
        if not self.spreads_tables:
            return ()
        shape = (*self.rows, self.rotated_size)
        return tuple(self.ops.table(name, shape, self.table_dtype) for name in ("cosines of pairs", "sines of pairs"))

    def split_rotary(self, x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        """The rotary part, and the rest of each head."""
        if self.c.position.partial_rotary:
            return self.ops.slices(x, ((*x.shape[:-1], "d_rot"), (*x.shape[:-1], "d_h-d_rot")), name)  # type: ignore[return-value]
        if not self.always_joins:
            return x, None
        # A slice of everything is an alias of x; the rest is an empty view with a zero gradient as large as x.
        all_of_it = self.ops.viewed(x, x.shape, f"{name}, all features")
        return all_of_it, self.ops.slices(x, ((*x.shape[:-1], "0"),), name)[0]

    def joined(self, turned: Tensor, passed: Tensor | None, x: Tensor, name: str) -> Tensor:
        """Both parts in one tensor, in the wider dtype."""
        if passed is None:
            return turned
        return self.ops.concatenate((turned, passed), x.shape, f"{name} joined")

    def rotated(self, x: Tensor, name: str, tables: tuple[Tensor, ...]) -> Tensor:
        """x * cos + rotate_half(x) * sin."""
        ops = self.ops

        def times(x: Tensor, name: str, which: int) -> Tensor:
            return (
                ops.mul(x, tables[which], name)
                if tables
                else ops.mul_table(x, name, self.table_dtype, self.tables[which])
            )

        if self.turns_in_fp32:
            return self._rotated_in_fp32(x, name, times)
        straight = times(x, f"{name} * cos", 0)
        return ops.add(straight, times(self.swapped(x, name), f"turned {name} * sin", 1), f"rotated {name}")

    def _rotated_in_fp32(self, x: Tensor, name: str, times: Callable[[Tensor, str, int], Tensor]) -> Tensor:
        """Ernie4_5's variant: q.float() * cos + rotate_half(q).float() * sin."""
        ops = self.ops
        straight = times(ops.cast(x, "fp32", f"{name} in fp32"), f"{name} * cos", 0)
        swapped = ops.cast(self.swapped(x, name), "fp32", f"turned {name} in fp32")
        return ops.add(straight, times(swapped, f"turned {name} * sin", 1), f"rotated {name}")

    def swapped(self, x: Tensor, name: str) -> Tensor:
        """rotate_half: the second half (or the odd features), negated, before the first."""
        ops = self.ops
        half = (*x.shape[:-1], f"{x.shape[-1]}/2")
        first, second = ops.slices(x, (half, half), f"{name} halves")
        return ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")

    def rotated_pairs(self, x: Tensor, name: str, first: Tensor, second: Tensor) -> Tensor:
        """first * cos - second * sin, and second * cos + first * sin."""
        ops, dtype, (cosines, sines) = self.ops, self.table_dtype, self.tables
        straight = ops.mul_table(first, f"{name} first * cos", dtype, cosines)
        low = ops.subtract(straight, ops.mul_table(second, f"{name} second * sin", dtype, sines), f"{name} low")
        straight = ops.mul_table(second, f"{name} second * cos", dtype, cosines)
        high = ops.add(straight, ops.mul_table(first, f"{name} first * sin", dtype, sines), f"{name} high")
        return ops.concatenate((low, high), x.shape, f"{name} turned")
