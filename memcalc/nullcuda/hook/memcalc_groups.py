"""Process groups without other ranks: PyTorch's fake groups, and the groups of a rank that runs alone.

A fake group replaces an NCCL group. The buffers of that group are device memory. They are counted by the same rule
(memcalc/nullcuda/gpu_description.py), and at the same time: with a group's first collective.

With --world-size one process is one rank of a multi-rank job. Its program is not changed: its process groups are
NCCL's, of the requested size, and no other rank responds.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Callable, Iterator  # noqa: UP035 -- for Python 3.9

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package

# Communicating methods of ProcessGroup; their names differ between versions (_allgather_base, all_gather_single).
COLLECTIVE = re.compile(r"_?(all|reduce|broadcast|gather|scatter|send|recv)\w*|barrier")

# Lookups of the group by DTensor's operators and by compiled code; a version has one of them, or both.
RESOLUTIONS = ("_resolve_group", "_resolve_group_name")

ID_BYTES = 128  # size of ncclUniqueId, which another rank would have put in the store


def count_fake_groups(torch: Any, library: Any) -> None:
    """Patch PyTorch's fake process group after its import: count each group at its first collective."""
    c10d = torch.distributed.distributed_c10d
    functional = importlib.import_module("torch.distributed._functional_collectives")
    counted: set[str] = set()

    def note(group: Any) -> None:
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)  # noqa: SLF001 -- as the collective itself does
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
    """Wrap the named functions that a class or module has."""
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, wrapper(getattr(owner, name)))


def leave_alone(torch: Any, rank: int, ranks: int) -> None:
    """Make this process one rank of a job in which no other rank is started."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    c10d = torch.distributed.distributed_c10d

    class Store(torch.distributed.Store):  # type: ignore[misc]  # a class known at run time only
        """The store by which ranks exchange data before they can communicate; it has only this rank's entries."""

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
            """Do nothing: no other rank will write."""

        def check(self, keys: Any) -> bool:
            return all(key in self.words for key in keys)

        def delete_key(self, key: str) -> bool:
            return self.words.pop(key, None) is not None

    store = Store()

    def alone(*_: Any, **__: Any) -> Iterator[Any]:
        yield store, rank, ranks

    for scheme in list(rendezvous._rendezvous_handlers):  # noqa: SLF001 -- a handler cannot be registered twice
        rendezvous._rendezvous_handlers[scheme] = alone  # noqa: SLF001 -- as above
    make = c10d._new_process_group_helper  # noqa: SLF001 -- every new group is made by it

    def make_without_gloo(size: int, mine: int, members: Any, backend: Any, *rest: Any, **named: Any) -> Any:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        kind = str(backend).lower()
        kind = "cpu:fake,cuda:nccl" if kind in {"none", "undefined"} else kind.replace("gloo", "fake")
        kinds = c10d.Backend(kind) if ":" not in kind else kind
        return make(size, mine, members, kinds, *rest, **named)

    c10d._new_process_group_helper = make_without_gloo  # noqa: SLF001 -- Gloo would wait for the other ranks


def vote_alone(stages: Any) -> None:
    """Patch torch.distributed.pipelining.stage after its import, in a rank that runs alone.

    Stages vote whether the shapes that they were made with suffice, or whether they exchange shapes. Kernels would
    reduce
    the votes, and no other rank votes, so the result is as if every stage had voted like this one.
    """
    kind = stages.PipelineStage
    if not hasattr(kind, "_warmup_forward_vote"):
        return  # versions before 2.13 do not vote
    vote, result = kind._warmup_forward_vote, kind._warmup_backward_result  # noqa: SLF001 -- no public name

    def cast(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
        stage.suffices = not stages.InferenceMode.needs_dynamic(stage._user_meta, has_backward)  # noqa: SLF001
        return vote(stage, has_backward, received_acc)

    def counted(stage: Any, received_result: Any = None) -> Any:
        result(stage, received_result)
        return stages.torch.tensor([int(stage.suffices)])

    kind._warmup_forward_vote, kind._warmup_backward_result = cast, counted  # noqa: SLF001 -- as above
