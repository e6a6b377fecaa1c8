"""Sharding of parameters, gradients and optimizer states across ranks. All divisions by ranks are here.

Tensor parallelism first shards an axis of each tensor (Shoeybi et al., arXiv 1909.08053). ZeRO then shards the result
across data-parallel ranks (Rajbhandari et al., arXiv 1910.02054, figure 1): optimizer states and fp32 master weights
from stage 1, gradients from stage 2, weights at stage 3. Shards are rounded up, as the engines pad them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple

from memcalc.layout.adapters import Adapters, adapters_of, keeps_qkv_apart
from memcalc.layout.parameters import (
    Axis,
    Parameter,
    formula_of,
    layers_by_prefix,
    parameter_table,
    trains_with_text,
)
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import Stage, one_in_flight
from memcalc.layout.symbols import model_values
from memcalc.layout.weight_layout import TRANSPOSED, table_gradient_is_unsharded, weight_layout
from memcalc.spec.finetuning import base_dtype
from memcalc.spec.fp32_modules import in_fp32
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import built_in_fp32
from memcalc.spec.spec import Spec
from memcalc.spec.towers import tower_trains


class LocalParameter(NamedTuple):
    """A parameter tensor on one rank of a stage before ZeRO, after tensor parallelism.

    Args:
        module: its module.
        tensor: its name within the module.
        axes: (symbol, size) of each axis on this rank.
        count: number of such tensors.
        where: the part of the model: embedding, layer or head.
        dtype: its dtype, where it differs from the recipe's; "": the recipe's.
        trains: whether it gets a gradient.
        gradient: axes of its gradient, where autograd makes it larger than the parameter.
        beside: whether engines leave it whole on every rank: a property of a parameter, or a parameter they ignore.
        unused: whether no forward reads it, so that it gets no gradient although an optimizer has it.
        replica: whether another pipeline stage has it, too, and counts it in norms.
    """

    module: str
    tensor: str
    axes: tuple[Axis, ...]
    count: int  # type: ignore[assignment] # hides tuple.count, which nothing here needs
    where: str
    dtype: str = ""
    trains: bool = True
    gradient: tuple[Axis, ...] = ()
    beside: bool = False
    unused: bool = False
    replica: bool = False

    @property
    def routed(self) -> bool:
        """Whether it belongs to routed experts, which expert parallelism shards."""
        return ".experts." in self.module

    @property
    def adapts(self) -> bool:
        """Whether it is a matrix of a low-rank adapter."""
        return ".lora_" in self.module

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(size for _, size in self.axes)

    @property
    def elements(self) -> int:
        """Elements of one such tensor."""
        return prod(self.shape)

    @property
    def gradient_elements(self) -> int:
        """Elements of the gradient that autograd makes."""
        return prod(size for _, size in self.gradient) if self.gradient else self.elements

    @property
    def formula(self) -> str:
        """Elements of one such tensor in symbols."""
        return formula_of(self.axes)


class LocalParameters(tuple[LocalParameter, ...]):
    """Parameters of a stage. Equal only to itself, so caches do not hash every axis again."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Compare by identity: `stage_parameters` returns the same object for the same stage."""
        return self is other


@lru_cache(maxsize=1024)
def without_companions(parameters: LocalParameters) -> LocalParameters:
    """Return the parameters without their properties, which engines do not shard."""
    return LocalParameters(parameter for parameter in parameters if not parameter.beside)


def shard_shape(shape: tuple[int, ...], ranks: int, engine: str) -> tuple[int, ...]:
    """Return the shape of one rank's shard: rows of axis 0 (FSDP2, DTensor's Shard(0)) or a flat slice (DeepSpeed).

    A scalar has no axis and is replicated.
    """
    if ranks == 1 or not shape:
        return shape
    if engine == "fsdp2":
        return (-(-shape[0] // ranks), *shape[1:])
    return (-(-prod(shape) // ranks),)


class Split(NamedTuple):
    """Number of ranks that parameters are sharded across before ZeRO."""

    tensor: int
    expert: int  # ranks that experts are distributed across
    expert_width: int  # ranks that one expert's weights are sharded across
    unsharded_embedding_gradient: bool  # the embedding's gradient is unsharded


class Precision(NamedTuple):
    """Dtypes of the stored weights, and whether those of a vision tower train."""

    base: str
    fp32_modules: tuple[str, ...]  # modules with fp32 weights, for any `base`
    trains_tower: bool = False  # whether a vision tower trains


def stage_parameters(spec: Spec, stage: Stage) -> LocalParameters:
    """Return the parameters of a stage on one tensor-parallel rank."""
    known = _known_parameters(spec)
    if stage not in known:
        known[stage] = _parameters_of(spec, stage)
    return known[stage]


@cached_by_spec
def _known_parameters(spec: Spec) -> dict[Stage, LocalParameters]:  # noqa: ARG001
    """Return an empty table for the parameters of a run, the same one while the run is remembered."""
    return {}


def _parameters_of(spec: Spec, stage: Stage) -> LocalParameters:
    return _stage_parameters(
        spec.model,
        implementation=spec.training.implementation,
        split=Split(
            spec.parallelism.tensor_parallel,
            spec.parallelism.expert_parallel,
            spec.parallelism.expert_width_ranks,
            table_gradient_is_unsharded(spec),
        ),
        pipeline=spec.parallelism.pipeline_parallel > 1,
        ties_module=spec.parallelism.has_pipeline_engine,
        stage=_alike(spec.model, stage),
        adapters=adapters_of(spec),
        apart=keeps_qkv_apart(spec),
        precision=Precision(
            base_dtype(spec.training), spec.training.fp32_modules, tower_trains(spec.model, spec.training)
        ),
    )


def _alike(model: ModelSpec, stage: Stage) -> Stage:
    """Return the stage without fields irrelevant to its parameters; of identical layers, positions do not matter."""
    differ = model.linear_attention is not None or model.full_attention is not None or bool(model.layer_pattern)
    if model.moe is None and not differ:
        return Stage(0, 0, stage.layers, stage.has_embedding, stage.has_head, 1)
    return one_in_flight(stage)._replace(pieces=tuple(map(one_in_flight, stage.pieces)))


@lru_cache(maxsize=1024)
def _stage_parameters(
    model: ModelSpec,
    *,
    implementation: str,
    split: Split,
    pipeline: bool,
    ties_module: bool,
    stage: Stage,
    adapters: Adapters | None,
    apart: bool,
    precision: Precision,
) -> LocalParameters:
    model = weight_layout(model, implementation, split.tensor, apart=apart)
    shares = model_values(model, split.tensor)
    layers = stage.layers
    here = layers_by_prefix(model, ((piece.first, piece.stop) for piece in stage.chunks))
    rows: list[LocalParameter] = []
    wide = built_in_fp32(model.architecture) if implementation == "huggingface" and precision.base != "fp32" else ()
    table = parameter_table(model)
    for row in table if implementation not in ("plain", "torchtitan") else chain.from_iterable(map(_apart, table)):
        count = row.count if row.part == "embedding" else 1
        if row.part == "layer":
            count = next((n for prefix, n in here.items() if row.module.startswith(prefix)), layers)
        elif (row.part == "embedding" and not stage.has_embedding) or (row.part == "head" and not stage.has_head):
            count = 0
        if count:
            gradient = row.shape if split.unsharded_embedding_gradient and row.module == "embed_tokens" else ()
            axes = _split(row, split, shares)
            own = (wide and row.module.endswith(wide)) or in_fp32(row.module, precision.fp32_modules)
            dtype = "fp32" if own else ""
            trains = precision.trains_tower or trains_with_text(row.module)
            rows.append(LocalParameter(row.module, row.tensor, axes, count, row.part, dtype, trains, gradient))
    if pipeline and stage.has_head and model.tie_word_embeddings:
        # Tied embeddings are stored on the first and the last stage (Megatron-LM, arXiv 1909.08053).
        width = ("d_e", model.embedding_size) if model.embedding_size != model.hidden_size else ("d", model.hidden_size)
        tied = Parameter("lm_head", "weight", (("V", model.vocab_size), width), 1, "head", "vocab")
        axes = _split(tied, split, shares)
        rows.append(LocalParameter(tied.module, tied.tensor, axes, 1, "head", replica=ties_module))
        if ties_module:
            rows += _beside_tied(table)
    if adapters is not None:
        from memcalc.layout.peft_parameters import with_adapters  # imports Parameters from this module

        rows = list(with_adapters(rows, adapters, precision.base, model))
    if implementation == "huggingface" and model.architecture in TRANSPOSED:
        rows = [_transposed(row) for row in rows]
    return LocalParameters(rows)


def _beside_tied(table: Iterable[Parameter]) -> Iterator[LocalParameter]:
    """Yield the position embedding in the module with a tied LM head, which no forward reads there.

    Source: gpt_model.py of bigscience-workshop/Megatron-DeepSpeed and gpt2_model.py of EleutherAI/gpt-neox:
    TiedLayerSpec of EmbeddingPipe. The first stage counts it in norms (DeepSpeed 0.19 runtime/pipe/module.py,
    _index_tied_modules).
    """
    for row in table:
        if row.module == "embed_positions":
            yield LocalParameter(row.module, row.tensor, row.shape, 1, "head", unused=True, replica=True)


def _transposed(row: LocalParameter) -> LocalParameter:
    """Return a layer's matrix as (in, out); the matrices of adapters are those of linear layers."""
    is_matrix = row.where == "layer" and row.tensor == "weight" and len(row.axes) == 2
    return row._replace(axes=row.axes[::-1]) if is_matrix and not row.adapts else row


def _apart(row: Parameter) -> tuple[Parameter, ...]:
    """Split gate_up_proj of routed experts: two tensors in torchtitan and in the reference decoder.

    Source: step/reference/mlp.py.
    """
    if not row.module.endswith(".experts.gate_up_proj"):
        return (row,)
    shape = tuple((symbol.removeprefix("2·"), size // 2 if symbol == "2·F_e" else size) for symbol, size in row.shape)
    modules = (row.module.replace("gate_up_proj", name) for name in ("gate_proj", "up_proj"))
    return tuple(replace(row, module=module, shape=shape) for module in modules)


def _split(row: Parameter, ranks: Split, shares: Mapping[str, int]) -> tuple[Axis, ...]:
    if row.split == "expert":
        return tuple(_expert_share(symbol, size, ranks) for symbol, size in row.shape)
    if ranks.tensor == 1 or row.split == "replicated":
        return row.shape
    axis = 0 if row.split in ("column", "vocab") else 1
    symbol, size = row.shape[axis]
    share = (f"{symbol}/t", shares.get(f"{symbol}/t", -(-size // ranks.tensor)))
    return (*row.shape[:axis], share, *row.shape[axis + 1 :])


def _expert_share(symbol: str, size: int, ranks: Split) -> Axis:
    """Return one rank's axis of an expert: E across e ranks, F_e across t_e; the down projection's bias is full."""
    if symbol == "E" and ranks.expert > 1:
        return "E/e", -(-size // ranks.expert)
    if "F_e" in symbol and ranks.expert_width > 1:
        return f"{symbol}/{'t' if ranks.expert_width == ranks.tensor else 't_e'}", -(-size // ranks.expert_width)
    return symbol, size
