"""Location of a running operator: module, line of code, and whether it is forward, backward or recomputation.

Backward has no modules and no lines. Autograd numbers its nodes in the order in which forward creates them, so the
location that forward recorded for a node's number also applies to its backward. The component of a storage follows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from memcalc.ledger.component import Component
from memcalc.recorder.storages import Number

# Frames of these directories are not the model's code.
OURS = Path(__file__).parents[2]
MACHINERY = tuple(
    str(folder) for folder in (Path(torch.__file__).parent, OURS / "memcalc" / "recorder", OURS / "memcalc" / "tracing")
)

# Files that call a user's module: frames above them do not belong to the module.
CALLERS = tuple(str(OURS / "memcalc" / "step" / file) for file in ("module_run.py", "meta_modules.py"))

# The part of the machinery that replicates or shards a model over ranks.
ENGINES = tuple(str(Path(torch.__file__).parent / part) for part in ("distributed/fsdp", "nn/parallel"))

# The part of DTensor that redistributes a tensor over the ranks.
COLLECTIVES = tuple(
    str(Path(torch.__file__).parent / "distributed" / file)
    for file in ("_functional_collectives.py", "tensor/_redistribute.py", "tensor/placement_types.py")
)

Line = tuple[str, int]  # file and line number
NOWHERE: Line = ("", 0)


@lru_cache(maxsize=1024)
def shown_file(file: str) -> str:
    """Return a file relative to site-packages, to memcalc's root, or to the working directory."""
    path = Path(file)
    for root in (*(Path(entry) for entry in sys.path if entry.endswith("site-packages")), OURS, Path.cwd()):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return file


class OperatorLocation(NamedTuple):
    """The place of an operator in the model and in its source, which attributes the memory that it allocates."""

    module: str = ""  # path in the model; "" outside of it
    line: Line = NOWHERE
    after_layers: bool = False  # after the last layer: final norm, LM head, loss
    backward: bool = False
    recomputed: bool = False
    role: DistributedRole | None = None


class DistributedRole(Enum):
    """Role of an operator in a model that is distributed over ranks."""

    ENGINE = "engine"  # gathered parameters, buckets
    COLLECTIVE = "collective"  # a layer's input or output in transit between ranks


def _spread() -> DistributedRole | None:
    """Return which distributed code of PyTorch is on the stack between the operator and the model's code."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 -- as below
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ENGINES):
            return DistributedRole.ENGINE
        # Operators on a result that has not been waited for pass through __torch_dispatch__ of the async tensor, which
        # waits.
        if file in COLLECTIVES and frame.f_code.co_name != "__torch_dispatch__":
            return DistributedRole.COLLECTIVE
        if not file.startswith(MACHINERY) and not file.startswith("<"):
            return None
        frame = frame.f_back
    return None


def newest_node() -> int:
    """Return the number of autograd's newest node. An operator's node is created and numbered before its kernel."""
    return torch._C._autograd._get_sequence_nr() - 1  # noqa: SLF001 -- no public name


class LocationTracker:
    """Tracks modules through forward hooks, and backward through autograd's node numbers.

    Args:
        layer_ended: called with each layer's output.
    """

    def __init__(self, layer_ended: Callable[[Any], None]) -> None:
        self._layer_ended = layer_ended
        self._engines = False
        self.machinery: tuple[str, ...] = MACHINERY
        self._names: dict[int, str] = {}
        self._layers: set[int] = set()
        self._parameters: dict[int, str] = {}  # by id: path of the module that has it
        self._stack: list[str] = []
        self._tail = False
        self._noted: dict[int, OperatorLocation] = {}  # by autograd's node number

    def name(self, model: nn.Module) -> None:
        """Register the names of a model's modules, and its layers: the modules of the longest ModuleList.

        Those of a vision-language model are the layers of its language model, however many its vision tower has.
        """
        self._names = {id(module): name for name, module in model.named_modules()}
        for path, module in model.named_modules():
            self._parameters.update({id(p): path for p in module.parameters(recurse=False)})
        named = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        language = [module for path, module in named if "language_model." in path]
        lists = language or [module for _, module in named]
        longest = max(lists, key=len, default=nn.ModuleList())
        self._layers = {id(layer) for layer in longest}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track every module that runs inside the context."""
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def track_engines(self) -> None:
        """Distinguish allocations of PyTorch's sharding from those of the model, for a run on several ranks."""
        self._engines = True

    def start(self) -> None:
        """Begin a forward pass: no operator is after the last layer yet."""
        self._tail = False

    def here(self, newest: int) -> OperatorLocation:
        """Return the location of the running operator.

        Args:
            newest: `newest_node()` from before the operator's kernel ran: its own node, if it has one.
        """
        node = torch._C._current_autograd_node()  # noqa: SLF001 -- no public name
        # In backward, gradients are enabled and modules run only during recomputation.
        recomputed = node is not None and (torch.is_grad_enabled() or bool(self._stack))
        spread = _spread() if self._engines else None
        if node is not None and not recomputed:
            return self._of_node(node)._replace(role=spread)
        module = self._stack[-1] if self._stack else ""
        tail = self._tail
        if recomputed and not module:
            noted = self._of_node(node)
            module, tail = noted.module, noted.after_layers
        place = OperatorLocation(module, self._line(), tail, backward=recomputed, recomputed=recomputed, role=spread)
        # The first operator seen with a new number is the one that owns the node.
        self._noted.setdefault(newest, place)
        return place

    def accumulates(self) -> bool:
        """Return whether a gradient is being accumulated into its parameter's `.grad`."""
        node = torch._C._current_autograd_node()  # noqa: SLF001 -- no public name
        return node is not None and type(node).__name__ == "AccumulateGrad"

    def _of_node(self, node: Any) -> OperatorLocation:
        if type(node).__name__ == "AccumulateGrad":
            variable = getattr(node, "variable", None)
            return OperatorLocation(self._parameters.get(id(variable), ""), backward=True)
        noted = self._noted.get(node._sequence_nr(), OperatorLocation())  # noqa: SLF001 -- no public name
        return noted._replace(backward=True, recomputed=False)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._layers:
            self._tail = False
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        if id(module) in self._layers:
            self._tail = True
            self._layer_ended(output)

    def _line(self) -> Line:
        """Return the innermost line that is neither PyTorch's nor memcalc's."""
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 -- a tenth of the cost of inspect.stack()
        while frame is not None:
            file = frame.f_code.co_filename
            if file in CALLERS:
                return NOWHERE
            if not file.startswith(self.machinery) and not file.startswith("<"):
                return file, frame.f_lineno
            frame = frame.f_back
        return NOWHERE


# A later mark does not change these: a tied weight, a gradient that the optimizer also holds.
FIRST_COME = frozenset({Component.WEIGHTS, Component.LIBRARY_WORKSPACE, Component.INPUTS})

GENERATION = ("prefill", "decode")  # phases of step/generation.py, without their numbers


class StorageOrigin(NamedTuple):
    """Where and when a storage was allocated."""

    phase_name: str  # phase without its number: "forward"
    place: OperatorLocation


class StorageComponents:
    """The component of every storage, settled at the end of the run.

    Tensors that the run knows are marked: weights, gradients, optimizer states, inputs, logits. The others follow from
    their lifetime. A storage allocated in forward and live when forward ends was saved for backward: an activation. A
    storage that does not outlive its phase is a temporary. After the last layer both count as logits and loss, as in
    the estimate.
    """

    def __init__(self) -> None:
        self._births: dict[Number, StorageOrigin] = {}
        self._marked: dict[Number, Component] = {}
        self._here: dict[Number, None] = {}  # allocated in the current phase, and live
        self._outlived: set[Number] = set()

    def begin_phase(self, name: str) -> None:
        """Forget live storages of earlier phases; forward and loss count as one phase, since both save for backward."""
        if not name.startswith("loss"):
            self._here.clear()

    def end_phase(self) -> None:
        """Record that the live storages of the current phase have outlived it."""
        self._outlived.update(self._here)

    def born(self, number: Number, phase: str, place: OperatorLocation) -> None:
        """Record that a storage was allocated."""
        self._births[number] = StorageOrigin(phase.rpartition("_")[0] or phase, place)
        self._here[number] = None

    def freed(self, number: Number) -> None:
        """Record that a storage was freed."""
        self._here.pop(number, None)

    def mark(self, number: Number, component: Component) -> None:
        """Set the component of a storage."""
        before = self._marked.get(number)
        if before not in FIRST_COME:
            self._marked[number] = component

    def marked(self, number: Number) -> Component | None:
        """Return the component set for a storage so far; None if none was set."""
        return self._marked.get(number)

    def settled(self) -> dict[Number, Component]:
        """Return every storage's component."""
        return {number: self._marked.get(number) or self._of(number, birth) for number, birth in self._births.items()}

    def _of(self, number: Number, birth: StorageOrigin) -> Component:
        if birth.phase_name in ("forward", "loss", "backward") and self._is_buffer(number, birth):
            return Component.COMMUNICATION_BUFFERS
        if birth.phase_name in GENERATION:
            return Component.LOGITS_AND_LOSS if birth.place.after_layers else Component.TEMPORARIES
        if birth.phase_name not in ("forward", "loss", "backward"):
            return Component.TEMPORARIES
        if birth.phase_name == "loss" or birth.place.after_layers:
            return Component.LOGITS_AND_LOSS
        if birth.place.recomputed or birth.phase_name == "forward":
            return Component.ACTIVATIONS if number in self._outlived else Component.TEMPORARIES
        return Component.TEMPORARIES

    def _is_buffer(self, number: Number, birth: StorageOrigin) -> bool:
        """Return whether a storage is a communication buffer; a gathered input saved for backward is an activation."""
        if birth.place.role is DistributedRole.COLLECTIVE:
            kept = birth.phase_name != "backward" or birth.place.recomputed
            return not (kept and number in self._outlived)
        return birth.place.role is DistributedRole.ENGINE
