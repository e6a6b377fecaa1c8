"""What follows from a run, found once for all runs that agree in the fields which it reads.

A grid of layouts asks the same questions again and again: the weights of a stage do not depend on what is recomputed,
nor most rules on anything that varies. What a function reads of a run is watched when it is first called, so nobody has
to say what it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from memcalc.spec.model import Block
from memcalc.spec.spec import Spec
from memcalc.spec.training import ParallelismSpec, TrainingSpec

Found = TypeVar("Found")
Watched = TypeVar("Watched", bound=Block)
Field = tuple[str, str]  # a block, "" for the run itself, and its field

# What a batch is made of, in the order in which results are computed: fields of `training`.
BATCH = ("micro_batch_size", "sequence_length", "gradient_accumulation_steps")

_UNKNOWN = object()


class _Node:
    """What is known once some fields have been read: the field that is read next, or the result."""

    __slots__ = ("children", "field", "read", "result")

    def __init__(self) -> None:
        self.field: Field | None = None
        self.read: Callable[[Spec], Any] | None = None  # what gives its value
        self.children: dict[Any, _Node] = {}
        self.result: Any = _UNKNOWN


class Reader:
    """Remembers what functions have found of runs."""

    def __init__(self) -> None:
        self._first: Spec | None = None
        self._met: dict[int, Block] = {}
        self._know({("training", field) for field in BATCH})
        self._trees: dict[object, _Node] = {}
        self._same: dict[object, Any] = {}
        self._known = 0

    def __len__(self) -> int:
        """How many results are kept."""
        return self._known

    def meet(self, specs: Iterable[Spec]) -> None:
        """Learn which fields differ among runs; of others nothing may be asked, but for other batches of these."""
        varied = set(self._varied)
        for spec in specs:
            first = self._first = self._first or spec
            for block, one, other in (
                ("training", first.training, spec.training),
                ("parallelism", first.parallelism, spec.parallelism),
                ("", first, spec),
            ):
                if one is other or id(other) in self._met:
                    continue
                self._met[id(other)] = other
                for field, value in one.__dict__.items():
                    mine = other.__dict__[field]
                    if field not in _BLOCKS and value is not mine and value != mine:
                        varied.add((block, field))
        if len(varied) > len(self._varied):
            self._know(varied)
            self._trees.clear()
            self._known = 0

    def _know(self, varied: set[Field]) -> None:
        self._varied = varied
        self._behind = {block: {field for where, field in varied if where == block} for block in ("", *_BLOCKS)}

    def same(self, key: object, value: Found) -> Found:
        """The first value that was given for this key."""
        found: Found = self._same.setdefault(key, value)
        return found

    def find(self, key: object, spec: Spec, function: Callable[[Spec], Found]) -> Found:
        """What a function gives for a run.

        Args:
            key: the function, and whatever else its result depends on.
            spec: the run.
            function: asked if no run that agrees with this one has been met. It gets a run that watches it.
        """
        root = self._trees.get(key)
        if root is None:
            root = self._trees[key] = _Node()
        node = root
        while node.read is not None:
            following = node.children.get(node.read(spec))
            if following is None:
                break
            node = following
        if node.result is _UNKNOWN:
            node = self._learn(root, spec, function)
        found: Found = node.result
        return found

    def _learn(self, node: _Node, spec: Spec, function: Callable[[Spec], object]) -> _Node:
        read: dict[Field, None] = {}
        result = function(_watched(spec, self._behind, read))
        for field in read:
            assert node.field in (None, field), "it reads what it read before, in the same order"
            node.field, node.read = field, _VALUE[field]
            node = node.children.setdefault(_VALUE[field](spec), _Node())
        node.result = result
        self._known += 1
        return node


def changed(spec: Spec, **training: Any) -> Spec:
    """The run with other values of fields of `training`, arrays among them; a run that watches goes on with it."""
    block = _like(spec.training, spec.training.__dict__ | training, type(spec.training))
    return _like(spec, spec.__dict__ | {"training": block}, type(spec))


_BLOCKS = ("training", "parallelism")

# What an instance of Pydantic's has beside its fields.
_SLOTS = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")


def _like(block: Block, values: dict[str, Any], kind: type[Watched]) -> Watched:
    """A copy with these values, which are not checked."""
    copy = kind.__new__(kind)
    object.__setattr__(copy, "__dict__", values)
    for slot in _SLOTS:
        object.__setattr__(copy, slot, getattr(block, slot))
    return copy


def _watched(spec: Spec, behind: Mapping[str, set[str]], read: dict[Field, None]) -> Spec:
    """The run; what is read of some fields of its blocks is noted, in order."""

    def without(name: str, block: Block) -> dict[str, Any]:
        """Its values but for those that are watched."""
        values = dict(block.__dict__)
        for field in behind[name]:
            values.pop(field, None)
        values[_BEHIND] = name, block, read
        return values

    blocks = {
        "training": _like(spec.training, without("training", spec.training), _Training),
        "parallelism": _like(spec.parallelism, without("parallelism", spec.parallelism), _Parallelism),
    }
    return _like(spec, without("", spec) | blocks, _Run)


_BEHIND = "behind"  # where a block has that which it watches; what it has not itself is looked up there


def _look_up(self: Block, field: str) -> Any:
    name, block, read = self.__dict__[_BEHIND]
    if (name, field) not in _FIELDS:
        private = block.__pydantic_private__ or {}  # notes and limits of the source, which no configuration changes
        if field not in private:
            raise AttributeError(field)
        return private[field]
    read.setdefault((name, field))
    found = self.__dict__[field] = getattr(block, field)  # from now on it has it itself
    return found


class _Training(TrainingSpec):
    __getattr__ = _look_up


class _Parallelism(ParallelismSpec):
    __getattr__ = _look_up


class _Run(Spec):
    __getattr__ = _look_up


_FIELDS = frozenset(
    (name, field)
    for name, block in (("training", TrainingSpec), ("parallelism", ParallelismSpec), ("", Spec))
    for field in block.model_fields
)

# What gives the value of a field of a run.
_VALUE = {(block, name): attrgetter(f"{block}.{name}" if block else name) for block, name in _FIELDS}
