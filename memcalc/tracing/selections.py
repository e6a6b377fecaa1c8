"""How many elements an operator selects when the values that decide do not exist.

One rule: what is chosen among E is spread evenly over the E, so a mask of the elements that chose one of them holds for
one in E; of a mask about which nothing is known, every element is selected. The first is balanced routing of experts,
the second the largest that can happen. PyTorch itself refuses such operators on fake tensors, because their outputs'
sizes depend on values.

What is known of a tensor is its share: of indices, how many equal any given one; of a mask (or of weights, most of
them zero), how many are not zero. It starts at the operators that choose (top-k, sort, argmax) and goes along with
those that compare, copy, scatter or pick. Shares belong to storages, so that views need no rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memcalc.recorder.storages import identity
from memcalc.tracing.values import Values

aten = torch.ops.aten

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


class Known(NamedTuple):
    """What is known of the values of a storage."""

    share: Fraction
    indices: bool  # else a mask


class Selections:
    """What a run has chosen so far, and what its selections come to.

    Args:
        values: those that are known.
    """

    def __init__(self, values: Values) -> None:
        self._values = values
        self._known: dict[int, tuple[Known, weakref.ref[Any]]] = {}  # by the address of the storage's C++ object

    def output(self, operator: Any, args: Arguments, kwargs: Keywords) -> Any:
        """The output of an operator whose size depends on values; NotImplemented for all others."""
        rule = SELECTING.get(operator.overloadpacket)
        return NotImplemented if rule is None else rule(self, args, kwargs)

    def note(self, operator: Any, args: Arguments, kwargs: Keywords, output: Any) -> None:
        """Keeps what is known of an operator's output."""
        rule = LEARNING.get(operator.overloadpacket)
        if rule is not None:
            rule(self, args, kwargs, output)

    def known(self, tensor: Any) -> Known | None:
        """What is known of a tensor's values."""
        found = self._known.get(identity(tensor.untyped_storage())) if isinstance(tensor, Tensor) else None
        return None if found is None else found[0]

    def learn(self, tensor: Tensor, share: Fraction, *, indices: bool = False) -> None:
        """From now on this is known."""
        key = identity(tensor.untyped_storage())
        self._known[key] = (
            Known(share, indices),
            weakref.ref(tensor.untyped_storage(), lambda _: self._known.pop(key, None)),
        )

    def count(self, mask: Tensor) -> int:
        """How many elements of a mask hold, rounded up."""
        real = self._values.of(mask)
        if real is not None:
            with _disable_current_modes():
                return int(real.count_nonzero())
        known = self.known(mask)
        if known is None:
            return mask.numel()
        return ceil(mask.numel() * (1 - known.share if known.indices else known.share))

    # -- selecting ---------------------------------------------------------------------------------------------------

    def nonzero(self, args: Arguments, _: Keywords) -> Tensor:
        """One row of positions for each element that holds."""
        mask: Tensor = args[0]
        return mask.new_empty((self.count(mask), mask.dim()), dtype=torch.long)

    def masked_select(self, args: Arguments, _: Keywords) -> Tensor:
        """The elements where a mask holds."""
        x, mask = args
        times = torch.broadcast_tensors(x, mask)[0].numel() // max(mask.numel(), 1)  # type: ignore[no-untyped-call]
        return x.new_empty((self.count(mask) * times,))  # type: ignore[no-any-return]

    def index(self, args: Arguments, _: Keywords) -> Any:
        """A mask among the indices stands for the positions where it holds, one index tensor a dimension."""
        x, given = args
        if not any(isinstance(index, Tensor) and index.dtype in MASKS for index in given):
            return NotImplemented
        positions: list[Tensor | None] = []
        for index in given:
            if index is not None and index.dtype in MASKS:
                count = self.count(index)
                positions += [index.new_empty((count,), dtype=torch.long) for _ in range(index.dim())]
            else:
                positions.append(index)
        return aten.index.Tensor(x, positions)

    def unique(self, args: Arguments, kwargs: Keywords) -> tuple[Tensor, Tensor, Tensor]:
        """Every value is another one; where values were chosen among E, at most E."""
        x: Tensor = args[0]
        known = self.known(x)
        count = x.numel() if known is None or not known.indices else min(x.numel(), int(1 / known.share))
        asked = (*args[1:], *kwargs.values())[-2:]  # the inverse and the counts: the last two of every overload
        inverse = x.new_empty(x.shape if asked and asked[0] else (0,), dtype=torch.long)
        counts = x.new_empty((count if asked and asked[-1] else 0,), dtype=torch.long)
        return x.new_empty((count,)), inverse, counts

    def bincount(self, args: Arguments, kwargs: Keywords) -> Tensor:
        """One number for each index that can occur."""
        known = self.known(args[0])
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        size = max(least, 1 if known is None else int(1 / known.share))
        return args[0].new_empty((size,), dtype=torch.long)  # type: ignore[no-any-return]

    def repeat_interleave(self, args: Arguments, kwargs: Keywords) -> Tensor:
        """As many as the caller says; else each once."""
        size = kwargs.get("output_size")
        return args[0].new_empty((args[0].numel() if size is None else size,), dtype=torch.long)  # type: ignore[no-any-return]

    def ctc(self, args: Arguments, _: Keywords) -> tuple[Tensor, Tensor]:
        """The loss of each sequence, and log alpha: twice the longest target and one wide (native/cuda/LossCTC.cu)."""
        scores, targets, _, lengths = args[:4]
        steps, batch, _ = scores.shape
        known = self._values.of(lengths) if isinstance(lengths, Tensor) else lengths
        if known is None:
            longest = targets.shape[-1] if targets.dim() > 1 else ceil(targets.numel() / batch)
        else:
            with _disable_current_modes():
                longest = max(int(length) for length in known)
        return scores.new_empty((batch,)), scores.new_empty((batch, steps, 2 * longest + 1))

    # -- learning ----------------------------------------------------------------------------------------------------

    def choose_best(self, args: Arguments, kwargs: Keywords, output: Any) -> None:
        """The k best along an axis of extent E: any given position is one in E of them."""
        values, indices = output
        self._chosen(args[0], args[2] if len(args) > 2 else kwargs.get("dim", -1), indices)
        self.carry(args, kwargs, values)

    def order(self, args: Arguments, kwargs: Keywords, output: Any) -> None:
        """Positions in sorted order, likewise."""
        self._chosen(args[0], kwargs.get("dim", next((arg for arg in args[1:] if type(arg) is int), -1)), output[1])
        self.carry(args, kwargs, output[0])

    def choose_one(self, args: Arguments, kwargs: Keywords, output: Tensor) -> None:
        """The best along an axis, or of all."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        self._chosen(args[0].reshape(-1) if dim is None else args[0], -1 if dim is None else dim, output)

    def _chosen(self, x: Tensor, dim: int, indices: Tensor) -> None:
        if x.dim() and x.shape[dim]:
            self.learn(indices, Fraction(1, x.shape[dim]), indices=True)

    def equal(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """Indices compared with one of them, or with all in turn."""
        known = self.known(args[0])
        if known is not None:
            self.learn(output, known.share)

    def positive(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """A mask compared with zero."""
        known = self.known(args[0])
        if known is not None and not known.indices and not isinstance(args[1], Tensor) and not args[1]:
            self.learn(output, known.share)

    def negate(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """The rest of a mask."""
        known = self.known(args[0])
        if known is not None and not known.indices:
            self.learn(output, 1 - known.share)

    def scatter(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """k marks along an axis of extent E."""
        x, dim, index = args[:3]
        if x.dim() and x.shape[dim]:
            self.learn(output, min(Fraction(index.shape[dim], x.shape[dim]), Fraction(1)))

    def carry(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """The same values elsewhere, some of them or all."""
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        known = self.known(first)
        if known is not None:
            self.learn(output, known.share, indices=known.indices)


MASKS = (torch.bool, torch.uint8)

SELECTING: dict[Any, Callable[[Selections, Arguments, Keywords], Any]] = {
    aten.nonzero: Selections.nonzero,
    aten.masked_select: Selections.masked_select,
    aten.index: Selections.index,
    aten._unique2: Selections.unique,  # noqa: SLF001 -- an operator's name
    aten.unique_consecutive: Selections.unique,
    aten.bincount: Selections.bincount,
    aten.repeat_interleave: Selections.repeat_interleave,
    aten._ctc_loss: Selections.ctc,  # noqa: SLF001 -- the name of an operator
}
LEARNING: dict[Any, Callable[[Selections, Arguments, Keywords, Any], None]] = {
    aten.topk: Selections.choose_best,
    aten.sort: Selections.order,
    aten.argmax: Selections.choose_one,
    aten.eq: Selections.equal,
    **dict.fromkeys((aten.gt, aten.ne), Selections.positive),
    **dict.fromkeys((aten.logical_not, aten.bitwise_not), Selections.negate),
    **dict.fromkeys((aten.scatter, aten.scatter_, aten.scatter_add), Selections.scatter),
    **dict.fromkeys(
        (aten.clone, aten._to_copy, aten.index, aten.index_select, aten.gather, aten.cat, aten.stack),  # noqa: SLF001 -- the name of an operator
        Selections.carry,
    ),
}
