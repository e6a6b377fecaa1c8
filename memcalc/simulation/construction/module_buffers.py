"""Buffers of a model's modules, where its constructors allocate them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.sharding.engine import is_output
from memcalc.simulation.construction.initial_tensors import InitialTensor, InitialTensors
from memcalc.spec.model_families.conversion import family_buffers
from memcalc.spec.spec import Spec
from memcalc.states.persistent import CAUSAL_MASKS, ROTARY_TABLES


class ModuleBuffers:
    """Buffers of transformers' and torchtitan's modules, and their position among the parameters.

    Sources: transformers 5.23, the constructors of models/<family>/modeling_<family>.py; torch 2.13 torch/nn/modules/
    module.py, _apply, by which to_empty allocates the buffer of torchtitan's model after the parameters of its modules;
    torchtitan 0.2.2 torchtitan/models/{llama3,qwen3}/model/model.py, init_weights, which computes another in its place.

    Args:
        spec: the run.
        items: the buffers, and an LM head that is allocated before it is tied.
    """

    def __init__(self, spec: Spec, items: Sequence[RowDraft]) -> None:
        self.model = spec.model
        self.family = spec.model.architecture if spec.training.implementation == "huggingface" else None
        self.own = family_buffers(spec.model.architecture)
        self.of_torchtitan = spec.training.implementation == "torchtitan"
        in_layers = {ROTARY_TABLES} if self.own.sinusoids else set()
        in_layers |= {CAUSAL_MASKS} if self.own.masks == "layer" else set()
        self.of_layers = next((item for item in items if item.tensor in in_layers), None)
        self.rest = [item for item in items if item is not self.of_layers]

    def among(
        self, ordered: Sequence[LocalParameter], weights: Iterable[tuple[InitialTensors, ...]]
    ) -> Iterator[InitialTensors]:
        """Yield the weights with the buffers where modules create them."""
        before, behind = "", self.own.sinusoids
        weighted = list(zip(ordered, weights, strict=True))
        ends = max(
            (at for at, (held, _) in enumerate(weighted) if self.of_torchtitan or not is_output(held)), default=-1
        )
        for at, (parameter, made) in enumerate(weighted):
            here = parameter.module.rpartition("*.")[2].partition(".")[0]
            if self.of_layers is not None and (before if behind else here) == "attention" and here != before:
                yield InitialTensors(self.of_layers.mask, (self._of_a_layer(),))
            before = here
            yield from made
            if self.family == "mpt" and "norm" in parameter.module:  # its bias is set to None
                yield from (InitialTensors(mask_of("model"), (each.tensors[0]._replace(stays=False),)) for each in made)
            if at == ends:
                yield from self._after_the_layers()

    def _after_the_layers(self) -> Iterator[InitialTensors]:
        head: list[InitialTensors] = []  # LM head before it is tied
        again: list[InitialTensor] = []  # buffers that _init_weights copies
        for item in self.rest:
            if self.of_torchtitan and item.tensor == ROTARY_TABLES:
                yield InitialTensors(item.mask, (InitialTensor(item.each),), groups=(ROTARY_TABLES,))
                yield InitialTensors(item.mask, (self._recomputed(item.each),), frees=ROTARY_TABLES)
                continue
            made = _mask(item.each) if item.tensor == CAUSAL_MASKS else InitialTensor(item.each)
            made = made._replace(component=item.component)
            again += [made._replace(stays=False)] * item.count if made.before else []
            built = InitialTensors(item.mask, (made,) * item.count)
            if item.component is Component.TEMPORARIES:
                head.append(InitialTensors(item.mask, (made._replace(stays=False),) * item.count))
            else:
                yield built
        if self.of_layers is not None:
            again += [self._of_a_layer()._replace(stays=False)] * self.model.num_layers
        if again:
            yield InitialTensors(mask_of("model"), tuple(again))
        yield from head

    def _recomputed(self, size: int) -> InitialTensor:
        """Return torchtitan's RoPE cache: complex numbers of angles and ones, or Qwen3's cosines and sines, joined."""
        angles = (size // 4, *(size // 2,) * 3) if self.model.qk_norm and self.model.mla is None else (size // 2,) * 2
        return InitialTensor(size, before=angles)

    def _of_a_layer(self) -> InitialTensor:
        positions, rotated = self.model.max_position_embeddings, self.model.rotary_dim
        return _sinusoids(positions, rotated) if self.own.sinusoids else _mask(positions**2)


def _mask(elements: int) -> InitialTensor:
    """Return a causal mask: torch.tril(torch.ones(...)), of dtype bool."""
    return InitialTensor(elements, (elements,))


def _sinusoids(positions: int, width: int) -> InitialTensor:
    """Return a tensor of sines and cosines, with its temporaries (create_sinusoidal_positions of codegen and gptj)."""
    angles = 4 * positions * (width // 2)
    counted = (8 * positions, 4 * positions, -8 * positions, angles, -4 * positions)
    return InitialTensor(4 * positions * width, (*counted, angles, angles))
