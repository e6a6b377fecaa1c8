"""Process groups whose other ranks are not there: PyTorch's fake ones, and those of a rank that runs alone.

A fake group stands for one of NCCL's, whose buffers are device memory: they are counted by the same rule
(memcalc/nullcuda/cards.py), and as NCCL makes them: with a group's first collective.

With --world-size one process is one rank of many, of a program that knows nothing of it: its process groups are
NCCL's, of the size asked for, and nobody answers.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Callable, Iterator  # noqa: UP035 -- runs on Python 3.9 too

# ruff: noqa: INP001 -- a folder for PYTHONPATH, no package

# Methods of ProcessGroup that talk; releases differ in what they call them (_allgather_base, all_gather_single).
COLLECTIVE = re.compile(r"_?(all|reduce|broadcast|gather|scatter|send|recv)\w*|barrier")

# What the operators of DTensor and of compiled code get their group from: by release the one of them, or both.
RESOLUTIONS = ("_resolve_group", "_resolve_group_name")

ID_BYTES = 128  # of ncclUniqueId: what another rank would have put in the store


def count_fake_groups(torch: Any, library: Any) -> None:
    """Called when PyTorch's fake process group has been imported: each one's first collective is counted."""
    c10d = torch.distributed.distributed_c10d
    functional = importlib.import_module("torch.distributed._functional_collectives")
    counted: set[str] = set()

    def note(group: Any) -> None:
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)  # noqa: SLF001 -- what the collective itself would call
        if group.group_name not in counted:
            counted.add(group.group_name)
            if torch.cuda.is_initialized() and c10d.get_backend(group) == "fake":
                library.null_communicator(group.size())

    note._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001 -- called while compiling, not compiled

    def collective(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *rest: Any, **named: Any) -> Any:
            note(group)
            return function(group, *rest, **named)

        return call

    def resolution(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*rest: Any, **named: Any) -> Any:
            group = function(*rest, **named)
            note(group)
            return group

        return call

    wrap(torch.distributed.ProcessGroup, filter(COLLECTIVE.fullmatch, dir(torch.distributed.ProcessGroup)), collective)
    wrap(functional, RESOLUTIONS, resolution)


def wrap(owner: Any, names: Any, wrapper: Callable[[Any], Any]) -> None:
    """Put something around those of a class's or module's functions that it has."""
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, wrapper(getattr(owner, name)))


def leave_alone(torch: Any, rank: int, ranks: int) -> None:
    """This process is one rank of a run of which no other is started."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    c10d = torch.distributed.distributed_c10d

    class Store(torch.distributed.Store):  # type: ignore[misc] # known at run time
        """What ranks tell each other before they can talk, of which this one's own words are all there is."""

        def __init__(self) -> None:
            super().__init__()
            self.words: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self.words[key] = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key: str) -> bytes:
            return self.words.get(key, bytes(ID_BYTES))

        def add(self, key: str, number: int) -> int:
            total = int(self.words.get(key, b"0")) + number
            self.words[key] = b"%d" % total
            return total

        def wait(self, *_: Any) -> None:
            """Nobody comes."""

        def check(self, keys: Any) -> bool:
            return all(key in self.words for key in keys)

        def delete_key(self, key: str) -> bool:
            return self.words.pop(key, None) is not None

    store = Store()

    def alone(*_: Any, **__: Any) -> Iterator[Any]:
        yield store, rank, ranks

    for scheme in list(rendezvous._rendezvous_handlers):  # noqa: SLF001 -- a handler cannot be registered twice
        rendezvous._rendezvous_handlers[scheme] = alone  # noqa: SLF001 -- likewise
    make = c10d._new_process_group_helper  # noqa: SLF001 -- what every new group goes through

    def make_without_gloo(size: int, mine: int, members: Any, backend: Any, *rest: Any, **named: Any) -> Any:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        kind = str(backend).lower()
        kind = "cpu:fake,cuda:nccl" if kind in {"none", "undefined"} else kind.replace("gloo", "fake")
        kinds = c10d.Backend(kind) if ":" not in kind else kind
        return make(size, mine, members, kinds, *rest, **named)

    c10d._new_process_group_helper = make_without_gloo  # noqa: SLF001 -- Gloo would wait for the other ranks


def vote_alone(stages: Any) -> None:
    """Called when torch.distributed.pipelining.stage has been imported, in a rank that runs alone.

    Stages vote whether the shapes that they were made with suffice, or whether they tell each other. The product of the
    votes is made by kernels, and nobody would tell: as if every stage had voted as this one does.
    """
    kind = stages.PipelineStage
    if not hasattr(kind, "_warmup_forward_vote"):
        return  # releases before 2.13 do not vote
    vote, result = kind._warmup_forward_vote, kind._warmup_backward_result  # noqa: SLF001 -- no public place

    def cast(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
        stage.suffices = not stages.InferenceMode.needs_dynamic(stage._user_meta, has_backward)  # noqa: SLF001
        return vote(stage, has_backward, received_acc)

    def counted(stage: Any, received_result: Any = None) -> Any:
        result(stage, received_result)
        return stages.torch.tensor([int(stage.suffices)])

    kind._warmup_forward_vote, kind._warmup_backward_result = cast, counted  # noqa: SLF001 -- likewise
