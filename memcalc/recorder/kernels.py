"""Effects of a device that operators' signatures do not show: the recorder's interface to a device's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from memcalc.ledger.component import Component
from memcalc.workspaces import Script

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]

AFTER_ALL = 1000  # more than the outputs of any operator


class Hidden(NamedTuple):
    """Memory that an operator allocates and frees internally, invisible to the dispatcher."""

    script: Script  # sizes in bytes in the order of allocation; a negative size frees a block
    at: int = AFTER_ALL  # number of the operator's outputs that are allocated before
    component: Component = Component.TEMPORARIES  # component of the blocks


class Kernels:
    """A device without special rules: operators run unchanged, and none has internal blocks."""

    @property
    def stream(self) -> int:
        """The CUDA stream of allocations; 0 is the default stream."""
        return 0

    def run(self, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        """Return the operator's outputs on this device."""
        return operator(*args, **kwargs)

    def outputs(self, operator: Any, output: Any) -> Iterable[Tensor]:  # noqa: ARG002 -- other devices use it
        """Return the output tensors that the device allocates, in the order of allocation."""
        return tensors(output)

    def hidden(self, operator: Any, args: Arguments, kwargs: Keywords, output: Any) -> Sequence[Hidden]:  # noqa: ARG002 -- as above
        """Return the blocks that the operator allocates besides its outputs, ordered by `at`."""
        return ()


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments or outputs, including those in lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
