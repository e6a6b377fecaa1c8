"""Programs of blocks with numbers: bytes of their storages, and the peaks of their streams.

Many runs share both: layouts that differ only in data parallelism or pipeline stages have the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.symbols import symbol_values
from memcalc.programs.operator_workspaces import script_of
from memcalc.programs.program import Program, Stream, highest
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.spec import Spec
from memcalc.workspaces import Script


class SizedProgram:
    """A program with values for its symbols; results are computed on first use."""

    def __init__(self, program: Program, values: Mapping[str, int]) -> None:
        self.program = program
        self._values = values
        self._sums: dict[tuple[int, ...], int] = {}

    @cached_property
    def exact(self) -> list[int]:
        """Requested bytes of each storage."""
        return self.program.sizes(self._values)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each storage, rounded up to allocator blocks."""
        blocks = {size: rounded(size) for size in {*self.exact}}
        return [blocks[size] for size in self.exact]

    @cached_property
    def scripts(self) -> dict[int, Script]:
        """Separate buffers of the storages that represent an operator's workspace."""
        storages = enumerate(self.program.storages)
        return {index: script_of(each.rule, self._values) for index, each in storages if each.rule is not None}

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each storage; empty where a rule gives its bytes."""
        return self.program.shapes(self._values)

    def bytes_of(self, storages: tuple[int, ...]) -> int:
        """Return the total rounded bytes of some storages."""
        if storages not in self._sums:
            sizes = self.sizes
            self._sums[storages] = sum([sizes[storage] for storage in storages])
        return self._sums[storages]

    def highest(self, stream: Stream) -> int:
        """Return the position of a stream's peak."""
        return highest(self.program.stream(stream), self.sizes).position


class ProgramSizer:
    """Cache of sized programs for one set of symbols.

    `memcalc.sweeping` has a subclass for symbols with one value per batch.
    """

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = values
        self._known: dict[Program, SizedProgram] = {}

    def sized(self, program: Program) -> SizedProgram:
        """Return the program with these sizes."""
        if program not in self._known:
            self._known[program] = SizedProgram(program, self._values)
        return self._known[program]


def sizer_of(values: Mapping[str, int]) -> ProgramSizer:
    """Return the sizer for some symbols; cached for equal symbols."""
    return _sizer_of(tuple(values.items()))


def run_sizer(spec: Spec, gpu: GpuSpec | None, rank_in_ring: int | None = None) -> ProgramSizer:
    """Return the sizer for the symbols of a run.

    Args:
        spec: the run.
        gpu: its GPU; None: the one that workspaces are assumed for.
        rank_in_ring: the rank in the ring of context parallelism; None: the one that allocates most.
    """
    values = symbol_values(spec, gpu)
    return sizer_of(values if rank_in_ring is None else values | {"c_i": rank_in_ring})


@lru_cache(maxsize=64)
def _sizer_of(values: tuple[tuple[str, int], ...]) -> ProgramSizer:
    return ProgramSizer(dict(values))
