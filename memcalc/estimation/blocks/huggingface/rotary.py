"""How families turn queries and keys by their position."""

from __future__ import annotations

from memcalc.estimation.blocks.huggingface.family import Family
from memcalc.estimation.tape import Tensor


class Rotary(Family):
    """apply_rotary_pos_emb of llama, and what other families make of it.

    Where the config rotates a part of each head, that part is cut out, turned, and joined with the rest.
    """

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """Queries or keys, turned: all of each head or its first features."""
        ops = self.ops
        if self.c.liger:
            return ops.liger_rope(x, name)
        if not self.c.rotates_part:
            return self.turned(x, name)
        parts = ((*x.shape[:-1], "d_rot"), (*x.shape[:-1], "d_h-d_rot"))
        turning, passing = ops.slices(x, parts, name)
        return ops.concatenate((self.turned(turning, name), passing), x.shape, f"{name} joined")

    def rotated_pair(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, of which a part is cut out and joined again in any case; what comes of it lies by head."""
        ops, parts = self.ops, {}
        for name, x in (("q", q), ("k", k)):
            rest = ((*x.shape[:-1], "d_h-d_rot"),)
            if self.c.rotates_part:
                parts[name] = ops.slices(x, ((*x.shape[:-1], "d_rot"), *rest), name)
            else:  # all of a tensor is that tensor; the rest is there, if empty
                parts[name] = (x, *ops.slices(x, rest, name))
        turned = {name: self.turned(part, name) for name, (part, _) in parts.items()}
        joined = [
            ops.concatenate((turned[name], passing), x.shape, f"{name} joined")
            for (name, (_, passing)), x in zip(parts.items(), (q, k), strict=True)
        ]
        return joined[0], joined[1]

    def turned(self, x: Tensor, name: str) -> Tensor:
        """x * cos + rotate_half(x) * sin."""
        ops, dtype = self.ops, self.table_dtype
        straight = ops.mul_table(x, f"{name} * cos", dtype)
        swapped = self.swapped(x, name)
        return ops.add(straight, ops.mul_table(swapped, f"turned {name} * sin", dtype), f"rotated {name}")

    def swapped(self, x: Tensor, name: str) -> Tensor:
        """rotate_half: the second half, negated, before the first."""
        ops = self.ops
        half = (*x.shape[:-1], f"{x.shape[-1]}/2")
        first, second = ops.slices(x, (half, half), f"{name} halves")
        return ops.concatenate((ops.scale(second, f"-{name} half"), first), x.shape, f"turned {name}")
