"""Number of elements that an operator selects when the deciding values do not exist.

The rule: a choice among E options is evenly distributed, so a mask of the elements that chose one option holds for one
in E elements. A mask about which nothing is known selects every element. The first case is balanced routing of
experts, the second an upper bound. PyTorch itself rejects such operators on fake tensors, because their outputs' sizes
depend on values.

What is known of a tensor is a fraction: of indices, how many equal any given index; of a mask (or of weights that are
mostly zero), how many are not zero. Operators that choose (top-k, sort, argmax) create fractions; operators that
compare, copy, scatter or pick propagate them. Fractions belong to storages, so views need no rule.
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


class KnownValues(NamedTuple):
    """Known facts about the values of a storage."""

    share: Fraction
    indices: bool  # whether these are indices; else a mask


class Selections:
    """The choices of a run so far, and the sizes of its selections."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._known: dict[int, tuple[KnownValues, weakref.ref[Any]]] = {}  # by address of the storage's C++ object

    def output(self, operator: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Return the output of an operator with a data-dependent size; NotImplemented for all others."""
        rule = SELECTING.get(operator.overloadpacket)
        return NotImplemented if rule is None else rule(self, args, kwargs)

    def note(self, operator: Any, args: Arguments, kwargs: Keywords, output: Any) -> None:
        """Store what is known about an operator's output."""
        rule = LEARNING.get(operator.overloadpacket)
        if rule is not None:
            rule(self, args, kwargs, output)

    def known(self, tensor: Any) -> KnownValues | None:
        """Return what is known about a tensor's values; None: nothing."""
        found = self._known.get(identity(tensor.untyped_storage())) if isinstance(tensor, Tensor) else None
        return None if found is None else found[0]

    def learn(self, tensor: Tensor, share: Fraction, *, indices: bool = False) -> None:
        """Store the fraction of a tensor's storage."""
        key = identity(tensor.untyped_storage())
        self._known[key] = (
            KnownValues(share, indices),
            weakref.ref(tensor.untyped_storage(), lambda _: self._known.pop(key, None)),
        )

    def count(self, mask: Tensor) -> int:
        """Return how many elements of a mask are true, rounded up."""
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
        """Return one row of positions for each element that is true."""
        mask: Tensor = args[0]
        return mask.new_empty((self.count(mask), mask.dim()), dtype=torch.long)

    def masked_select(self, args: Arguments, _: Keywords) -> Tensor:
        """Return the elements where a mask is true."""
        x, mask = args
        times = torch.broadcast_tensors(x, mask)[0].numel() // max(mask.numel(), 1)  # type: ignore[no-untyped-call]
        return x.new_empty((self.count(mask) * times,))  # type: ignore[no-any-return]

    def index(self, args: Arguments, _: Keywords) -> Any:
        """Return x[indices]; a mask among the indices becomes its positions, one index tensor per dimension."""
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
        """Return unique values: all of them, or at most E if they were chosen among E."""
        x: Tensor = args[0]
        known = self.known(x)
        count = x.numel() if known is None or not known.indices else min(x.numel(), int(1 / known.share))
        asked = (*args[1:], *kwargs.values())[-2:]  # return_inverse and return_counts come last in every overload
        inverse = x.new_empty(x.shape if asked and asked[0] else (0,), dtype=torch.long)
        counts = x.new_empty((count if asked and asked[-1] else 0,), dtype=torch.long)
        return x.new_empty((count,)), inverse, counts

    def bincount(self, args: Arguments, kwargs: Keywords) -> Tensor:
        """Return one count for each index that can occur."""
        known = self.known(args[0])
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        size = max(least, 1 if known is None else int(1 / known.share))
        return args[0].new_empty((size,), dtype=torch.long)  # type: ignore[no-any-return]

    def repeat_interleave(self, args: Arguments, kwargs: Keywords) -> Tensor:
        """Return `output_size` elements if it is given; else each element once."""
        size = kwargs.get("output_size")
        return args[0].new_empty((args[0].numel() if size is None else size,), dtype=torch.long)  # type: ignore[no-any-return]

    def ctc(self, args: Arguments, _: Keywords) -> tuple[Tensor, Tensor]:
        """Return the loss of each sequence, and log alpha of width 2 * longest target + 1 (native/cuda/LossCTC.cu)."""
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
        """Learn from the k best along an axis of extent E: any given position is one in E of them."""
        values, indices = output
        self._chosen(args[0], args[2] if len(args) > 2 else kwargs.get("dim", -1), indices)
        self.carry(args, kwargs, values)

    def order(self, args: Arguments, kwargs: Keywords, output: Any) -> None:
        """Learn from positions in sorted order: any given position is one in E of them."""
        self._chosen(args[0], kwargs.get("dim", next((arg for arg in args[1:] if type(arg) is int), -1)), output[1])
        self.carry(args, kwargs, output[0])

    def choose_one(self, args: Arguments, kwargs: Keywords, output: Tensor) -> None:
        """Learn from the best element along an axis, or of all."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        self._chosen(args[0].reshape(-1) if dim is None else args[0], -1 if dim is None else dim, output)

    def _chosen(self, x: Tensor, dim: int, indices: Tensor) -> None:
        if x.dim() and x.shape[dim]:
            self.learn(indices, Fraction(1, x.shape[dim]), indices=True)

    def equal(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """Learn from indices compared with one of them, or with each in turn."""
        known = self.known(args[0])
        if known is not None:
            self.learn(output, known.share)

    def positive(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """Learn from a mask compared with zero."""
        known = self.known(args[0])
        if known is not None and not known.indices and not isinstance(args[1], Tensor) and not args[1]:
            self.learn(output, known.share)

    def negate(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """Learn from the complement of a mask."""
        known = self.known(args[0])
        if known is not None and not known.indices:
            self.learn(output, 1 - known.share)

    def scatter(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """Learn from k marks along an axis of extent E."""
        x, dim, index = args[:3]
        if x.dim() and x.shape[dim]:
            self.learn(output, min(Fraction(index.shape[dim], x.shape[dim]), Fraction(1)))

    def carry(self, args: Arguments, _: Keywords, output: Tensor) -> None:
        """Learn from a copy of some or all of the same values."""
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
    aten._ctc_loss: Selections.ctc,  # noqa: SLF001 -- an operator's name
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
        (aten.clone, aten._to_copy, aten.index, aten.index_select, aten.gather, aten.cat, aten.stack),  # noqa: SLF001 -- an operator's name
        Selections.carry,
    ),
}
