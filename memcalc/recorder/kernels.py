"""What a device does that its operators' signatures do not tell: the seam between the recorder and a device's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from memcalc.ledger.component import Component
from memcalc.workspaces import Script

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]

AFTER_ALL = 1000  # more than an operator has outputs


class Hidden(NamedTuple):
    """Memory that an operator takes and gives back inside, seen by no dispatcher.

    Args:
        script: of its blocks.
        at: how many of the operator's outputs have been made before.
        component: what the blocks are for.
    """

    script: Script
    at: int = AFTER_ALL
    component: Component = Component.TEMPORARIES


class Kernels:
    """A device that does what PyTorch says: nothing is steered, nothing is hidden."""

    @property
    def stream(self) -> int:
        """The stream that memory is taken for; 0 is the default one."""
        return 0

    def run(self, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        """The operator's outputs as this device makes them."""
        return operator(*args, **kwargs)

    def outputs(self, operator: Any, output: Any) -> Iterable[Tensor]:  # noqa: ARG002 -- other devices ask
        """The tensors among the outputs that the device makes, in the order in which it does."""
        return tensors(output)

    def hidden(self, operator: Any, args: Arguments, kwargs: Keywords, output: Any) -> Sequence[Hidden]:  # noqa: ARG002 -- likewise
        """What the operator allocates beside its outputs, in the order of `at`."""
        return ()


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an operator's arguments or outputs, lists opened."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
