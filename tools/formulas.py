"""Generate the tables of docs/explanations/formulas.md: every term of `estimate`, read from the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import memcalc
from memcalc.allocator.pytorch import block_sizes
from memcalc.architectures.catalogue import GradientPolicy, Part, program
from memcalc.architectures.huggingface.catalogue import FAMILIES
from memcalc.architectures.structure import BlockStructure, block_structure
from memcalc.estimation import outside_allocator
from memcalc.estimation.estimate import estimate
from memcalc.estimation.limits import TRAINING
from memcalc.layout import schedules
from memcalc.layout.parameters import Parameter, count_parameters, parameter_table
from memcalc.layout.stages import Stage, stages_of
from memcalc.layout.symbols import MEANINGS, symbol_values
from memcalc.layout.weight_layout import weight_layout
from memcalc.ledger import textbook
from memcalc.ledger.component import Component
from memcalc.ledger.row import Row
from memcalc.ledger.row_drafts import PHASES, RowDraft, phases_of
from memcalc.programs import operator_workspaces
from memcalc.programs.program import Program, highest, live_storages_after
from memcalc.programs.sized_program import run_sizer
from memcalc.simulation.recorded_step import ChunkPasses, of_engine
from memcalc.spec.hardware.gpus import all_gpus, find_gpu
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import attends_eagerly
from memcalc.spec.optimizers import OPTIMIZERS
from memcalc.spec.presets import preset_names
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.spec.spec import Spec
from memcalc.states import communication_buffers, megatron_buffers, megatron_grad_buffer, pipelining
from memcalc.states.model_states import state_rows
from memcalc.stream.requests import EngineTensor
from tools.markdown import table
from tools.polynomial import ZERO, Polynomial, axes_product

MODULES: dict[str, ModuleType] = {
    "allocation": block_sizes,
    "communication": communication_buffers,
    "pipelining": pipelining,
    "schedules": schedules,
    "megatron": megatron_buffers,
    "gradient-buffer": megatron_grad_buffer,
    "outside": outside_allocator,
    "textbook": textbook,
    "workspaces": operator_workspaces,
}
ON_ARRIVAL = GradientPolicy(kept=True, main_dtype=None)
NOT_RECOMPUTED = False
MIB = 2**20


# -- functions -------------------------------------------------------------------------------------------------------


def functions_of(module: str) -> dict[str, Callable[..., Any]]:
    """The public functions that a module of memcalc.estimation defines, in the order of its text."""
    found = inspect.getmembers(MODULES[module], inspect.isfunction)
    own = [(name, f) for name, f in found if f.__module__ == MODULES[module].__name__ and not name.startswith("_")]
    return dict(sorted(own, key=lambda pair: pair[1].__code__.co_firstlineno))


def functions_list(module: str) -> str:
    """Each function with its docstring: the formula first, then where it comes from."""
    return "".join(f"- **`{name}`**: {_prose(function)}\n" for name, function in functions_of(module).items())


def _prose(function: Callable[..., Any]) -> str:
    text = (inspect.getdoc(function) or "").partition("\nArgs:")[0]
    first, _, rest = text.partition("\n")
    sentences = re.sub(r"(?<=[a-z0-9)]\.) (?=[A-Z])", "\n", " ".join(rest.split()))
    first = first if first.endswith((".", ":")) else f"{first}."
    return "\n  ".join([first, *sentences.splitlines()])


# -- symbols ---------------------------------------------------------------------------------------------------------


def symbols_table() -> str:
    """Every symbol of the formulas."""
    return table(["symbol", "meaning"], [[f"`{symbol}`", meaning] for symbol, meaning in MEANINGS.items()])


def _sizes(spec: Spec, used: Iterable[str]) -> str:
    """The values of the symbols that some formulas use, in words."""
    values = symbol_values(spec, None)
    names = [symbol for symbol in MEANINGS if symbol in set(used)]
    return ", ".join(f"{name} = {values[name]:,}" for name in names)


def _symbols(shapes: Iterable[Iterable[str]]) -> set[str]:
    return {name for shape in shapes for axis in shape for name in re.findall(r"[A-Za-z_]+", axis)}


# -- parameters ------------------------------------------------------------------------------------------------------


def parameters_table(preset: str) -> str:
    """Every parameter of a model, and the sum over one layer in symbols."""
    model = weight_layout(memcalc.load(preset).model, "plain")
    rows = parameter_table(model)
    body = table(
        ["module", "tensor", "elements", "each", "times", "over t ranks"],
        [[f"`{r.module}`", r.tensor, r.formula, f"{r.elements:,}", r.count, r.split] for r in rows],
    )
    square = model.query_size == model.hidden_size
    sums = [f"- {name}: {_elements(part, square=square)}\n" for name, part in _parts(rows)]
    return f"{body}\n{''.join(sums)}- the whole of `{preset}`: {count_parameters(model):,} parameters\n"


def _parts(rows: Iterable[Parameter]) -> list[tuple[str, list[Parameter]]]:
    """The parameters of each kind of layer, and of what is in no layer."""
    parts: dict[str, list[Parameter]] = {}
    for row in rows:
        kind = f"`{row.module.partition('*')[0]}*`" if row.part == "layer" else "outside the layers"
        parts.setdefault(kind if row.part != "layer" else f"a layer of {kind}", []).append(row)
    return list(parts.items())


def _elements(rows: list[Parameter], *, square: bool) -> str:
    total = sum((axes_product(symbol for symbol, _ in row.shape) for row in rows), ZERO)
    if square:
        total = total.replaced(("h", "d_h"), ("d",))
    return f"{total} = {sum(row.elements for row in rows):,}"


# -- model states ----------------------------------------------------------------------------------------------------


def _when(phases: tuple[str, ...]) -> str:
    """Phases in few words."""
    if phases == PHASES[PHASES.index(phases[0]) :]:
        return f"from `{phases[0]}` on"
    return ", ".join(f"`{phase}`" for phase in phases)


def _matrix(*overrides: str) -> list[Row]:
    """The state rows of one matrix, an MLP's, and those that all parameters share."""
    spec = memcalc.load("llama-3-8b", *overrides)
    rows = state_rows(spec, stages_of(spec)[0]).rows
    return [row for row in rows if row.module == "layers.*.mlp.up_proj"]


def _of_one_parameter(*overrides: str) -> str:
    """What a loop over parameters has alive at once, in elements of the one that it is at and of those before it."""
    spec = memcalc.load("llama-3-8b", *overrides)
    rows = state_rows(spec, stages_of(spec)[0]).rows
    passing = [row for row in rows if row.component is Component.TEMPORARIES and "optimizer_step_2" in row.phases]
    return "; ".join(f"{row.tensor.removeprefix('weight ')} {row.formula} of {row.module}" for row in passing) or "-"


STATES = (Component.WEIGHTS, Component.MASTER_WEIGHTS, Component.GRADIENTS)


# What a recipe needs besides its name.
NEEDED = {"fp32": ("dtype=fp32",), "fp32-main": ("dtype=fp32", "implementation=megatron", "attention=eager")}


def copies_table() -> str:
    """Return a table of the copies of one weight matrix in each recipe, and their phases."""
    rows = [
        [f"`{recipe}`", row.tensor, row.formula, _when(row.phases), row.citation]
        for recipe in RECIPES
        for row in _matrix(f"recipe={recipe}", *NEEDED.get(recipe, ()))
        if row.component in STATES
    ]
    return table(["recipe", "copy of an F×d matrix", "bytes", "live", "source"], rows)


VARIANTS: list[tuple[str, tuple[str, ...]]] = [
    ("momentum", ("nesterov=true",)),
    ("sgd", ("weight_decay=0.1",)),
    ("adamw", ("amsgrad=true",)),
    ("rmsprop", ("centered=true", "momentum=0.9")),
    ("adamw", ("paged=true",)),
]


def optimizers_table() -> str:
    """The states of each optimizer for one matrix in fp32, and what its step makes and drops."""
    rows: list[list[str]] = []
    plain = [(optimizer, ()) for optimizer in OPTIMIZERS]
    for optimizer, options in sorted([*plain, *VARIANTS], key=lambda variant: list(OPTIMIZERS).index(variant[0])):
        paged = "paged=true" in options
        for how in ("for-loop",) if paged else OPTIMIZERS[optimizer].implementations:
            overrides = [f"optimizer={optimizer}", f"optimizer_implementation={how}"]
            overrides += [f"optimizer_options.{option}" for option in options]
            found = _matrix("recipe=amp", *overrides)
            kinds = (Component.OPTIMIZER_STATE, Component.TEMPORARIES)
            states, passing = ([row for row in found if row.component is kind] for kind in kinds)
            rows.append(
                [
                    ", ".join([f"`{optimizer}`", *(f"`{option}`" for option in options)]),
                    how,
                    _joined(states),
                    _joined(passing) if how == "foreach" else _of_one_parameter("recipe=amp", *overrides),
                    "; ".join(dict.fromkeys(row.citation for row in (*states, *passing))) or "-",
                ]
            )
    return table(["optimizer", "implementation", "states", "allocated and freed in the step", "source"], _merged(rows))


def _joined(rows: list[Row]) -> str:
    return ", ".join(f"{row.tensor.removeprefix('weight ')} {row.formula}" for row in rows) or "-"


def _merged(rows: list[list[str]]) -> list[list[str]]:
    """Rows of the same optimizer that differ in nothing but the implementation, as one."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for optimizer, how, *rest in rows:
        merged.setdefault((optimizer, *rest), []).append(how)
    return [[optimizer, ", ".join(hows), *rest] for (optimizer, *rest), hows in merged.items()]


# -- activations -----------------------------------------------------------------------------------------------------


def _layer(spec: Spec) -> Part:
    return "expert layer" if spec.model.moe is not None else "dense layer"


def _program(spec: Spec, part: Part) -> Program:
    return program(block_structure(spec), part, NOT_RECOMPUTED, ON_ARRIVAL)


def kept_table(preset: str, *overrides: str) -> str:
    """What one layer keeps from its forward to its backward: tensor by tensor, then as a sum in symbols."""
    spec = memcalc.load(preset, *overrides)
    layer = _program(spec, _layer(spec))
    sizes = layer.sizes(symbol_values(spec, None))
    storages = [layer.storages[index] for index in layer.kept]
    body = table(
        ["saved tensor", "bytes in symbols", "bytes", "source"],
        [
            [layer.storages[i].name, layer.storages[i].formula, f"{sizes[i]:,}", layer.storages[i].citation]
            for i in layer.kept
        ],
    )
    total = f"{sum(sizes[index] for index in layer.kept):,}"
    at = _sizes(spec, _symbols(storage.shape for storage in storages))
    return f"{body}\nIn total **{kept_sum(spec)}** = {total} bytes per layer, at {at}.\n"


def kept_sum(spec: Spec) -> str:
    """What one layer keeps, as a sum in symbols."""
    structure = block_structure(spec)
    layer = _program(spec, _layer(spec))
    storages = [layer.storages[index] for index in layer.kept]
    total = sum((axes_product(s.shape, DTYPE_BYTES[s.dtype]) for s in storages if s.rule is None), ZERO)
    by_rule = [layer.storages[index].formula for index in layer.kept if layer.storages[index].rule is not None]
    return " + ".join([str(_simplified(total, structure)), *by_rule])


def _simplified(total: Polynomial, structure: BlockStructure) -> Polynomial:
    """The same with h·d_h written d where the two are equal, and E·R, the rows of all experts, written b·s·k."""
    if not structure.attention.grouped:
        total = total.replaced(("h_kv",), ("h",))
    if structure.attention.square:
        total = total.replaced(("h", "d_h"), ("d",))
    return total.replaced(("E", "R"), ("b", "s", "k"))


def highest_table(preset: str, *overrides: str) -> str:
    """The peak of one layer's backward: what is alive beside the layer's kept tensors."""
    spec = memcalc.load(preset, *overrides)
    layer = _program(spec, _layer(spec))
    sizes = layer.sizes(symbol_values(spec, None))
    moment = highest(layer.backward, sizes)
    alive = live_storages_after(layer.backward[: moment.position], layer.kept)
    rows = [
        [layer.storages[i].name, layer.storages[i].formula, f"{sizes[i]:,}", str(layer.storages[i].component)]
        for i in sorted(alive, key=lambda index: -sizes[index])
        if i not in layer.kept and sizes[i]
    ]
    still = sum(sizes[index] for index in alive if index in layer.kept)
    all_kept = sum(sizes[index] for index in layer.kept)
    return (
        f"Inside `{layer.backward[moment.position - 1].operator.label}`, "
        f"{still:,} of the {all_kept:,} bytes that the layer saved are still live, in addition to:\n\n"
        + table(["tensor", "bytes in symbols", "bytes", "component"], rows)
    )


def loss_table(preset: str, *overrides: str) -> str:
    """The tensors as large as the logits, and at which phase's peak each is alive."""
    spec = memcalc.load(preset, *overrides)
    head = _program(spec, "head")
    sizes = head.sizes(symbol_values(spec, None))
    moments = {
        "forward": live_storages_after(head.forward[: highest(head.forward, sizes).position]),
        "loss": live_storages_after(head.loss[: highest(head.loss, sizes).position], head.after_forward),
        "backward": live_storages_after(head.backward[: highest(head.backward, sizes).position], head.kept),
    }
    rows: list[list[object]] = []
    totals = dict.fromkeys(moments, 0)
    for index, storage in enumerate(head.storages):
        alive = {phase: index in there for phase, there in moments.items()}
        if "s" not in storage.shape or "V" not in storage.shape or not any(alive.values()):
            continue
        item_bytes = DTYPE_BYTES[storage.dtype]
        rows.append([storage.name, item_bytes, *("live" if is_there else "" for is_there in alive.values())])
        totals = {phase: totals[phase] + item_bytes * alive[phase] for phase in moments}
    rows.append(["**bytes per logit, together**", "", *(f"**{total}**" for total in totals.values())])
    return table(["tensor", "bytes per logit", *(f"peak of {phase}" for phase in moments)], rows)


# -- workspaces, buffers, constants ----------------------------------------------------------------------------------


def scratch_table(preset: str, *overrides: str) -> str:
    """What the rules of `workspaces` come to in one run."""
    spec = memcalc.load(preset, *overrides)
    values = symbol_values(spec, None)
    rows = []
    for part in ("embedding", _layer(spec), "head"):
        compiled = _program(spec, part)
        for storage, size in zip(compiled.storages, compiled.sizes(values), strict=True):
            if storage.rule is not None:
                rule = storage.rule.func.__name__  # type: ignore[attr-defined] # `workspaces.named` makes partials
                rows.append([part, storage.name, f"`{rule}`", f"{size:,}"])
    return table(["part", "buffer", "rule", "bytes"], rows)


ENGINES = (("ddp", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp2", 2), ("fsdp2", 3))


def _within_passes(spec: Spec, stage: Stage) -> Iterator[RowDraft]:
    """The first tensor of each kind that an engine allocates in a step, and the largest of gathered parameters."""
    step = ChunkPasses(spec, stage, lambda run: run_sizer(run, None)).step(stage, exist=False)
    sizes: dict[EngineTensor, list[int]] = {}
    for label, requested, _ in step.stream.made:
        if isinstance(label, EngineTensor):
            sizes.setdefault(label, []).append(requested)
    for label, several in sizes.items():
        of_one = several[: label.pieces] if label.pieces > 1 else [max(several)]
        yield of_engine(label, [(size, 1) for size in of_one], 0)


def buffers_table(preset: str) -> str:
    """The communication buffers of each engine over 8 ranks."""
    rows = []
    for engine, stage in ENGINES:
        spec = memcalc.load(preset, f"engine={engine}", f"zero_stage={stage}", "data_parallel=8", "recipe=mixed-16")
        place = next(iter(stages_of(spec)))
        steady = communication_buffers.communication_buffers(spec, place)
        found = [(item, _when(phases_of(item.mask))) for item in steady]
        found += [(item, "within a pass") for item in _within_passes(spec, place)]
        for item, when in dict.fromkeys(found):
            each = f"{item.each:,}"
            rows.append([f"`{engine}`, {stage}", item.tensor, item.formula, each, when, item.citation])
    return table(["engine, ZeRO stage", "buffer", "bytes in symbols", "bytes", "live", "source"], rows)


def outside_table() -> str:
    """Return a table of defaults for device memory outside allocated blocks."""
    contexts = sorted({card.context_bytes // MIB for card in all_gpus()})
    workspaces_of = {name: _cublas(name) for name in ("a100-80gb", "h100-80gb")}
    nccl = outside_allocator
    groups = {
        "NCCL, the first group of ranks": (nccl.FIRST_GROUP_BYTES, nccl.LEAST_FIRST_GROUP_BYTES),
        "NCCL, each further group": (nccl.FURTHER_GROUP_BYTES, nccl.LEAST_FURTHER_GROUP_BYTES),
    }
    rows = [
        *([name, f"{most // MIB:,} MiB, at least {least // MIB:,} MiB"] for name, (most, least) in groups.items()),
        ["CUDA context", f"{' or '.join(f'{size:,}' for size in contexts)} MiB, by GPU"],
        *([f"cuBLAS workspace of a thread, {find_gpu(c).label}", f] for c, f in workspaces_of.items()),
    ]
    return table(["memory", "default"], rows)


def _cublas(card: str) -> str:
    rows = memcalc.estimate("gpt2", gpu=card).ledger.rows
    row = next(row for row in rows if row.component is Component.LIBRARY_WORKSPACE)
    return f"{row.formula} = {row.bytes:,} bytes"


def not_modelled_list() -> str:
    """What every estimate leaves out."""
    return "".join(f"- {what}\n" for what in TRAINING)


# -- sources ---------------------------------------------------------------------------------------------------------


def sources_table() -> str:
    """Every source that a tensor of some estimate cites, with the tensors that cite it."""
    cited: dict[str, dict[str, None]] = {}
    for spec in every_kind_of_run():
        for name, citation in cited_by(spec):
            cited.setdefault(citation, {})[re.sub(r"^(attention|mlp)\.(experts\.|shared_experts\.)?", "", name)] = None
    rows = [[citation, _some(list(names))] for citation, names in sorted(cited.items(), key=lambda kv: kv[0].lower())]
    return table(["source", "tensors"], rows)


def _some(names: list[str]) -> str:
    shown, more = names[:3], len(names) - 3
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def cited_by(spec: Spec) -> Iterator[tuple[str, str]]:
    """Every tensor of a run's blocks, and every row of its ledger, with its citation."""
    structure = block_structure(spec)
    parts: tuple[Part, ...] = ("embedding", "dense layer", _layer(spec), "head")
    for part in parts:
        for gradients in (ON_ARRIVAL, GradientPolicy(kept=True, main_dtype="fp32")):
            for storage in program(structure, part, NOT_RECOMPUTED, gradients).storages:
                yield storage.name, storage.citation
    for row in estimate(spec).ledger.rows:  # by formulas alone
        yield row.tensor, row.citation


def presets_by_family() -> tuple[str, ...]:
    """Return one preset of each family of transformers with modelled modules, if there is one."""
    found: dict[str | None, str] = {}
    for preset in preset_names():
        found.setdefault(memcalc.load(preset).model.architecture, preset)
    return tuple(preset for family, preset in found.items() if family in FAMILIES)


def _has_flash(model: ModelSpec) -> bool:
    """Whether there are formulas of transformers' modules with PyTorch's flash attention.

    It wants values as wide as keys, and no mask, which transformers always gives to Falcon's.
    """
    masked = model.architecture == "falcon"
    return not attends_eagerly(model.architecture, "huggingface") and model.mla is None and not masked


KINDS = (
    "gpt2 dropout=0.1 attention=eager",
    "gpt2 dropout=0.1 attention=memory-efficient recipe=amp optimizer=adam-8bit",
    "gpt2 optimizer=momentum recipe=mixed-16 optimizer_implementation=for-loop",
    "codegen-350m recipe=mixed-18 optimizer=lion",
    "llama-3.2-1b recipe=amp optimizer=adafactor",
    "qwen3-0.6b optimizer=adafactor optimizer_implementation=for-loop",
    "mixtral-8x7b recipe=amp",
    "deepseek-v3 tensor_parallel=2 sequence_parallel=true engine=deepspeed",
    "llama-3.2-1b tensor_parallel=2",
    "llama-3-8b tensor_parallel=2 sequence_parallel=true loss=vocab-parallel",
    "llama-3-8b tensor_parallel=2 data_parallel=2 engine=fsdp2 zero_stage=3",
    "llama-3.2-1b optimizer_implementation=for-loop data_parallel=8",
    "llama-3.2-1b data_parallel=8 zero_stage=2 optimizer_implementation=fused",
    "llama-3.2-1b data_parallel=8 zero_stage=3 engine=deepspeed optimizer=lion optimizer_implementation=for-loop",
    *(f"llama-3.2-1b data_parallel=8 zero_stage={stage} engine=deepspeed" for stage in (1, 2, 3)),
    "llama-3.2-1b data_parallel=8 zero_stage=3",
    "gpt2 data_parallel=8 optimizer=adam optimizer_implementation=for-loop",
    *(f"gpt2 optimizer={optimizer}" for optimizer in OPTIMIZERS),
    *(
        f"{preset} implementation=huggingface attention={attention}"
        for preset in presets_by_family()
        for attention in ("eager", "flash")
        if attention == "eager" or _has_flash(memcalc.load(preset).model)
    ),
)


def every_kind_of_run() -> Iterator[Spec]:
    """Runs that between them use every operator, recipe, optimizer and engine."""
    for words in KINDS:
        yield memcalc.load(*words.split())


TABLES: dict[str, Callable[..., str]] = {
    "buffers": buffers_table,
    "copies": copies_table,
    "functions": functions_list,
    "highest": highest_table,
    "kept": kept_table,
    "loss": loss_table,
    "not-modelled": not_modelled_list,
    "optimizers": optimizers_table,
    "outside": outside_table,
    "parameters": parameters_table,
    "scratch": scratch_table,
    "sources": sources_table,
    "symbols": symbols_table,
}
