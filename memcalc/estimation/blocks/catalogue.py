"""Programs of blocks by structure, compiled once and kept.

A run has blocks of one implementation: only its modules are imported.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from memcalc.estimation.blocks.context import over_context_ranks
from memcalc.estimation.blocks.plain import PlainBlock
from memcalc.estimation.blocks.plain_ends import plain_embedding, plain_head, shared_tables
from memcalc.estimation.blocks.structure import Structure, structure_of
from memcalc.estimation.compilation import compiled
from memcalc.estimation.program import END, START, Event, Program
from memcalc.estimation.saving import save_on_host
from memcalc.estimation.tape import Tape, Tensor
from memcalc.spec.spec import Spec

# "tables" is what all layers share, on a stage that has no embedding to make it.
Part = Literal["embedding", "tables", "dense layer", "expert layer", "head"]


class Gradients(NamedTuple):
    """What happens to a parameter's gradient when backward has made it."""

    kept: bool  # stays alive; else it is added to one that exists already, and dropped
    main_dtype: str | None  # dtype of a second copy made on arrival


def program(
    structure: Structure, part: Part, recomputed: bool, gradients: Gradients, runs_again: bool = False
) -> Program:
    """The compiled program of one part of the model.

    Args:
        structure: the choices.
        part: which part.
        recomputed: whether it keeps its input alone, and runs again by itself.
        gradients: what happens to a parameter's gradient.
        runs_again: whether it is one of several parts that run again together, and not the last one.

    Raises:
        InputError: the implementation of this family is not modelled.
    """
    read = structure.as_read_by_head() if part == "head" else structure.as_read_by_others()
    return compiled_part(read, part, recomputed, gradients, runs_again)


@lru_cache(maxsize=1024)
def compiled_part(
    structure: Structure, part: Part, recomputed: bool, gradients: Gradients, runs_again: bool
) -> Program:
    """As `program`, of a structure that has no choices which the part does not depend on."""
    if part == "tables":
        return _split(structure, _tables(structure))
    tape, output = _tape(structure, part)
    if recomputed:
        tape.recompute_all(tape.made_by(structure.recompute_keep))
    if tape.entry is not None and not tape.boundary and structure.cache is None:  # a layer
        tape.still_named(tape.entry)
    first = output if part == "embedding" and structure.cache is None else None
    if first is not None and not tape.names:  # a family of transformers knows whether it has a name
        tape.names.add(first.storage)  # what the layers begin with, until all of them have returned
    if structure.saves_on_host != "none":
        pinned = structure.saves_on_host == "pinned"
        save_on_host(tape, first, frees_tables=structure.frees_tables, pinned=pinned)
    if structure.evaluates:
        tape.forget_gradients()
    block = compiled(
        tape,
        output,
        keeps_gradients=gradients.kept,
        main_gradient_dtype=gradients.main_dtype,
        runs_again=runs_again,
        trains=structure.cache is None and not structure.evaluates,
        holds_output=part == "embedding" and structure.embedding_stays,
    )
    return _split(structure, block)


def _tape(structure: Structure, part: Part) -> tuple[Tape, Tensor | None]:
    """The tape of a part, and its output (None: it is the head, whose output is the loss)."""
    if structure.implementation == "huggingface" and has_own_tape(structure):
        from memcalc.estimation.blocks.huggingface import catalogue as huggingface

        return huggingface.write(structure, part)
    if structure.implementation == "torchtitan":
        from memcalc.estimation.blocks import torchtitan

        return torchtitan.write(structure, part)
    if structure.implementation == "megatron":
        from memcalc.estimation.blocks import megatron

        return megatron.write(structure, part)
    if part == "embedding":
        return plain_embedding(structure)
    if part == "head":
        return plain_head(structure)
    return PlainBlock(structure, experts=part == "expert layer").layer()


def has_formulas(spec: Spec) -> bool:
    """Whether the modules that train are written down: of transformers' not all families' are."""
    training = spec.training
    if training.implementation != "huggingface" or spec.inference is not None:
        return True
    from memcalc.estimation.blocks.huggingface import catalogue as huggingface

    return huggingface.is_written(structure_of(spec))


def has_own_tape(structure: Structure) -> bool:
    """Whether a family's modules are written down for themselves; for generation the plain block stands for others."""
    if structure.cache is None:
        return True
    from memcalc.estimation.blocks.huggingface import catalogue as huggingface

    return structure.family in huggingface.WITH_CACHE


def _split(structure: Structure, block: Program) -> Program:
    return over_context_ranks(block) if structure.context_split else block


def _tables(structure: Structure) -> Program:
    """The mask and the rotary tables alone: made when a micro-batch arrives, let go when its backward has passed."""
    tape = Tape()
    if structure.implementation == "huggingface" and has_own_tape(structure):
        from memcalc.estimation.blocks.huggingface import catalogue as huggingface

        tape = huggingface.write_shared_tables(structure)
    elif structure.implementation in ("plain", "huggingface"):  # of the others the table is the module's
        shared_tables(tape, structure)
    made = tuple(Event(index, 1, START) for index in sorted(tape.held | tape.names))
    gone = tuple(Event(index, -1, END) for index in sorted(tape.held))
    read_by = tuple(sorted(tape.read_by.items()))
    return Program(tuple(tape.storages), made, (), gone, names=tuple(sorted(tape.names)), read_by=read_by)
