"""Programs of blocks by structure, compiled once and cached.

A run has blocks of one implementation, so only its modules are imported.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from memcalc.architectures.context_parallel import over_context_ranks
from memcalc.architectures.plain import PlainBlock
from memcalc.architectures.plain_embedding_head import plain_embedding, plain_head, shared_tables
from memcalc.architectures.structure import BlockStructure, block_structure
from memcalc.layout.stages import LayerModules
from memcalc.programs.activation_offload import offload_saved_tensors
from memcalc.programs.program import END, Program, StorageEvent
from memcalc.programs.tape import Tape, Tensor
from memcalc.programs.tape_compiler import compiled
from memcalc.spec.spec import Spec

# "tables" are the tensors shared by all layers, on a stage without an embedding, which otherwise creates them.
Part = Literal["embedding", "tables", "dense layer", "expert layer", "head"]


class GradientPolicy(NamedTuple):
    """Handling of a parameter's gradient after backward has produced it."""

    kept: bool  # stays allocated; otherwise it is added to an existing gradient and freed
    main_dtype: str | None  # dtype of a second copy of each produced gradient
    update: tuple[str, ...] = ()  # dtypes of the temporaries, of its size, with which the optimizer updates at once


def program(
    structure: BlockStructure, part: Part, recomputed: bool, gradients: GradientPolicy, recomputes: bool = False
) -> Program:
    """Return the compiled program of one part of the model.

    Args:
        structure: the options of the modules.
        part: the part of the model.
        recomputed: whether it keeps only its input and is recomputed as a separate checkpoint.
        gradients: the policy for produced gradients.
        recomputes: whether it is recomputed with other parts as one checkpoint segment; with `recomputed` as the last.

    Raises:
        InputError: the implementation of this family is not modelled.
    """
    read = structure.as_read_by_head() if part == "head" else structure.as_read_by_others()
    return compiled_part(read, part, recomputed, gradients, recomputes)


@lru_cache(maxsize=1024)
def compiled_part(
    structure: BlockStructure, part: Part, recomputed: bool, gradients: GradientPolicy, recomputes: bool
) -> Program:
    """Return the program for a structure without options that the part does not depend on; see `program`."""
    if part == "tables":
        return _split(structure, _tables(structure))
    tape, output = _tape(structure, part)
    if recomputed:
        tape.recompute_all(tape.allocated_by(structure.saving.kept_results), follows=recomputes)
    if tape.entry is not None and not tape.boundary and structure.cache is None:  # a layer
        tape.still_referenced(tape.entry)
    first = output if part == "embedding" and structure.cache is None else None
    if first is not None and not tape.live.names:  # transformers' families set whether a variable references it
        tape.live.names.add(first.storage)  # input of the first layer, referenced until all layers have returned
    if structure.saving.on_host != "none":
        pinned = structure.saving.on_host == "pinned"
        offload_saved_tensors(tape, first, frees_tables=structure.saving.frees_tables, pinned=pinned)
    if structure.saving.without_gradients or structure.cache is not None:
        tape.forget_gradients()
    block = compiled(
        tape,
        output,
        keeps_gradients=gradients.kept,
        main_gradient_dtype=gradients.main_dtype,
        update=gradients.update,
        recomputes=recomputes,
        trains=structure.cache is None and not structure.saving.without_gradients,
        holds_output=part == "embedding" and structure.embedding.stays,
    )
    return _split(structure, block)


def _tape(structure: BlockStructure, part: Part) -> tuple[Tape, Tensor | None]:
    """Return the tape of a part, and its output (None for the head, which ends with the loss)."""
    if structure.implementation == "huggingface" and has_own_tape(structure):
        from memcalc.architectures.huggingface import catalogue as huggingface

        return huggingface.write(structure, part)
    if structure.implementation == "torchtitan":
        from memcalc.architectures import torchtitan

        return torchtitan.write(structure, part)
    if structure.implementation == "megatron":
        from memcalc.architectures import megatron

        return megatron.write(structure, part)
    if part == "embedding":
        return plain_embedding(structure)
    if part == "head":
        return plain_head(structure)
    return PlainBlock(structure, experts=part == "expert layer").layer()


@lru_cache(maxsize=256)
def called_modules(structure: BlockStructure, modules: LayerModules) -> tuple[str, ...]:
    """Return the modules with parameters that a layer calls, in forward order, by their names in the layer."""
    part: Part = "expert layer" if modules.experts else "dense layer"
    tape, _ = _tape(structure.of_layers(modules), part)
    return tuple(dict.fromkeys(node.module for node in tape.nodes if node.module))


def has_formulas(spec: Spec) -> bool:
    """Return whether the run's modules have formulas; some families of transformers have none."""
    training = spec.training
    if training.implementation != "huggingface" or spec.inference is not None:
        return True
    from memcalc.architectures.huggingface import catalogue as huggingface

    return huggingface.is_written(block_structure(spec))


def has_own_tape(structure: BlockStructure) -> bool:
    """Return whether a family has its own tape; for generation other families use the plain block."""
    if structure.cache is None:
        return True
    from memcalc.architectures.huggingface import catalogue as huggingface

    return structure.family in huggingface.WITH_CACHE


def _split(structure: BlockStructure, block: Program) -> Program:
    return over_context_ranks(block) if structure.sharding.context_parallel else block


def _tables(structure: BlockStructure) -> Program:
    """Return the shared mask and RoPE tables alone: created for each micro-batch, freed after its backward."""
    tape = Tape()
    if structure.implementation == "huggingface" and has_own_tape(structure):
        from memcalc.architectures.huggingface import catalogue as huggingface

        tape = huggingface.write_shared_tables(structure)
    # in the other implementations the table belongs to the module
    elif structure.implementation in ("plain", "huggingface"):
        shared_tables(tape, structure)
    made = compiled(tape, None, keeps_gradients=False, main_gradient_dtype=None, trains=False).forward
    held, read_by = tuple(sorted(tape.live.held)), tuple(sorted(tape.live.read_by.items()))
    frees = tuple(StorageEvent(index, -1, END) for index in held)
    storages, names = tuple(tape.storages), tuple(sorted(tape.live.names))
    return Program(storages, made, (), frees, names=names, read_by=read_by, held=held)
