"""Rules that relate fields, each checked once, when a configuration is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from memcalc.errors import InputError, raise_all
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.matmuls import saved_matmuls_rules
from memcalc.spec.model import EXPERTS, MAMBA
from memcalc.spec.model_families.conversion import family_of, rules_of
from memcalc.spec.model_families.transformers_fallback import fallback_family
from memcalc.spec.recompute_plan import Segment, has_segments, in_order, leaves
from memcalc.spec.rule_sets import fsdp, offload, parallelism
from memcalc.spec.rule_sets.fake_quantization import fake_quantization
from memcalc.spec.rule_sets.finetuning import finetuning
from memcalc.spec.rule_sets.fp8 import fp8
from memcalc.spec.rule_sets.inference import inference
from memcalc.spec.rule_sets.kernels import kernels
from memcalc.spec.rule_sets.losses import labels, loss, rollouts, teacher
from memcalc.spec.rule_sets.optimizers import optimizing
from memcalc.spec.rule_sets.violations import Violation, divisors
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path, YamlSource

Rule = Callable[[Spec], Iterable[Violation]]

GPU: Path = ("hardware", "gpu")

SHOWN = 20  # letters of a pattern in messages
MOST_LAYERS = 1024  # a search replays the allocations of every layer dozens of times; published models have up to 1,000


def check_rules(spec: Spec, source: YamlSource) -> None:
    """Raise the violations: the first one per rule and per field.

    Raises:
        InputError: with key, value, rule and remedy; also for an unknown GPU.
        InputErrors: several rules are violated.
    """
    found: dict[Path, InputError] = {}
    for rule in RULES if spec.inference is None else INFERENCE_RULES:
        violation = next(iter(rule(spec)), None)
        if violation is not None:
            found.setdefault(
                violation.key, InputError(violation.problem, violation.remedy, source.where(violation.key))
            )
    if spec.hardware.gpu is not None:
        try:
            find_gpu(spec.hardware.gpu)
        except InputError as error:
            found[GPU] = error.located(source.where(GPU))
    raise_all(list(found.values()))


def _heads(spec: Spec) -> Iterator[Violation]:
    model = spec.model
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    if heads % groups:
        yield Violation(
            ("model", "num_key_value_heads"),
            f"num_key_value_heads = {groups} does not divide num_attention_heads = {heads}.",
            f"Each key/value head serves the same number of query heads: try {divisors(heads)}.",
        )
    if model.full_attention is not None and heads % (groups := model.full_attention.num_key_value_heads):
        yield Violation(
            ("model", "full_attention"),
            f"full_attention.num_key_value_heads = {groups} does not divide num_attention_heads = {heads}.",
            f"Each key/value head serves the same number of query heads: try {divisors(heads)}.",
        )
    if not model.parallel_block and not model.layer_pattern and model.norms_per_layer == 1:
        yield Violation(
            ("model", "norms_per_layer"),
            "norms_per_layer = 1 needs parallel_block: true.",
            "Set parallel_block: true, or norms_per_layer: 2.",
        )
    if model.norm_placement == "after" and model.norms_per_layer != 2:
        yield Violation(
            ("model", "norm_placement"),
            f"norm_placement = after places 2 norms, but norms_per_layer = {model.norms_per_layer}.",
            "Set norms_per_layer: 2, or leave norm_placement out; 4 norms are before and after attention and MLP.",
        )
    if model.tie_word_embeddings and model.moe is None and model.embedding_size > model.hidden_size * 64:
        yield Violation(
            ("model", "embedding_size"),
            f"embedding_size = {model.embedding_size} is more than 64 times hidden_size = {model.hidden_size}.",
            f"Set embedding_size: {model.hidden_size}, the usual value, or untie the LM head.",
        )


def _experts(spec: Spec) -> Iterator[Violation]:
    moe = spec.model.moe
    if moe is None:
        return
    if moe.num_experts_per_token > moe.num_experts:
        yield Violation(
            ("model", "moe", "num_experts_per_token"),
            f"num_experts_per_token = {moe.num_experts_per_token} is more than num_experts = {moe.num_experts}.",
            f"Set at most {moe.num_experts}: a token uses each expert at most once.",
        )
    if moe.first_dense_layers > spec.model.num_layers:
        yield Violation(
            ("model", "moe", "first_dense_layers"),
            f"first_dense_layers = {moe.first_dense_layers} is more than num_layers = {spec.model.num_layers}.",
            f"Set at most {spec.model.num_layers}.",
        )
    if moe.dense_layers and max(moe.dense_layers) >= spec.model.num_layers:
        yield Violation(
            ("model", "moe", "dense_layers"),
            f"dense_layers names layer {max(moe.dense_layers)}, but the layers are 0 to {spec.model.num_layers - 1}.",
            f"Remove layer {max(moe.dense_layers)}, or raise num_layers.",
        )


def _foreign(spec: Spec) -> Iterator[Violation]:
    training = spec.training
    if spec.model.transformers_config is None:
        return
    family = fallback_family(spec.model)
    if training.implementation != "huggingface":
        yield Violation(
            ("training", "implementation"),
            f"implementation = {training.implementation}, but only transformers knows {family}.",
            "Set implementation: huggingface.",
        )
    if training.sequence_length > spec.model.max_position_embeddings:
        yield Violation(
            ("training", "sequence_length"),
            f"sequence_length = {training.sequence_length} is longer than the {spec.model.max_position_embeddings} "
            "positions of the config.json.",
            f"Set sequence_length: {spec.model.max_position_embeddings} or less, or raise max_position_embeddings "
            "there.",
        )
    if training.dropout is not None:
        yield Violation(
            ("training", "dropout"),
            f"dropout = {training.dropout}, but {family} takes its rates from config.json only.",
            "Set the rates there, and leave dropout out.",
        )


def _sequence(spec: Spec) -> Iterator[Violation]:
    positions, length = spec.model.max_position_embeddings, spec.training.sequence_length
    if spec.model.position_embedding == "learned" and length > positions:
        yield Violation(
            ("training", "sequence_length"),
            f"sequence_length = {length} is longer than the {positions} learned positions.",
            f"Set sequence_length: {positions} or less, or raise model.max_position_embeddings.",
        )


def _precision(spec: Spec) -> Iterator[Violation]:
    recipe, dtype = spec.training.recipe, spec.training.dtype
    if recipe in ("fp32", "fp32-main") and dtype not in ("fp32", spec.parallelism.fsdp.param_dtype):
        yield Violation(
            ("training", "recipe"),
            f"recipe = {recipe} computes in fp32, but dtype = {dtype}.",
            "Set dtype: fp32, or recipe: amp to compute in 16 bits with fp32 weights.",
        )
    if spec.training.autocasts and recipe != "amp" and "fp32" in (recipe, dtype):
        yield Violation(
            ("training", "autocast"),
            f"autocast = true computes in 16 bits, but recipe = {recipe} and dtype = {dtype}.",
            "Set recipe: amp and dtype: bf16 or fp16, or leave autocast out.",
        )
    if recipe == "amp" and not spec.training.autocasts:
        yield Violation(
            ("training", "autocast"),
            "autocast = false contradicts recipe = amp, which is autocast over fp32 weights.",
            "Leave autocast out, or set recipe: fp32 or pure.",
        )
    yield from _weight_dtype(spec)
    yield from _fp32_modules(spec)
    if (recipe == "amp" or recipe.startswith("mixed")) and dtype == "fp32":
        yield Violation(
            ("training", "recipe"),
            f"recipe = {recipe} computes in 16 bits, but dtype = fp32.",
            "Set dtype: bf16 or fp16, or recipe: fp32.",
        )


def _weight_dtype(spec: Spec) -> Iterator[Violation]:
    training, weights = spec.training, spec.training.weight_dtype
    if weights in (None, training.dtype):
        return
    frozen = training.lora is not None and training.lora.base_dtype == "compute"
    if not training.autocasts or (training.recipe != "pure" and not frozen):
        yield Violation(
            ("training", "weight_dtype"),
            f"weight_dtype = {weights} is not dtype = {training.dtype}, but recipe = {training.recipe} computes in the "
            "dtype of the weights.",
            "Set recipe: pure and autocast: true, or leave weight_dtype out.",
        )
    elif spec.parallelism.zero_stage or spec.parallelism.tensor_parallel > 1 or training.fp8 != "none":
        yield Violation(
            ("training", "weight_dtype"),
            f"weight_dtype = {weights} is not modelled with dtype = {training.dtype} for sharded weights or FP8.",
            "Leave weight_dtype out, or set zero_stage: 0, tensor_parallel: 1 and fp8: none.",
        )


def _fp32_modules(spec: Spec) -> Iterator[Violation]:
    training, modules = spec.training, spec.training.fp32_modules
    if not modules:
        return
    own = training.recipe == "pure" and training.autocasts and training.lora is None
    if not own or training.implementation != "huggingface" or spec.parallelism.zero_stage or training.fp8 != "none":
        yield Violation(
            ("training", "fp32_modules"),
            f"fp32_modules = {', '.join(modules)} is modelled only for transformers' modules trained in 16 bits under "
            "autocast, without sharding.",
            "Set implementation: huggingface, recipe: pure, autocast: true and zero_stage: 0, or leave fp32_modules "
            "out.",
        )
    elif spec.model.tie_word_embeddings and ("embed_tokens" in modules) != ("lm_head" in modules):
        yield Violation(
            ("training", "fp32_modules"),
            f"fp32_modules = {', '.join(modules)}, but the embedding and the LM head share one weight.",
            "Name both embed_tokens and lm_head, or neither.",
        )


def _layers(spec: Spec) -> Iterator[Violation]:
    if spec.model.num_layers > MOST_LAYERS:
        yield Violation(
            ("model", "num_layers"),
            f"num_layers = {spec.model.num_layers} is more than {MOST_LAYERS:,}, the limit of memcalc.",
            f"Set at most {MOST_LAYERS:,}.",
        )
    layers, stages = spec.model.num_layers, spec.parallelism.pipeline_parallel
    with_ends = spec.parallelism.pipeline_split == "layers-and-ends"
    if stages > layers + 2 * with_ends:
        ends = " and 2 for embedding and LM head" if with_ends else ""
        yield Violation(
            ("parallelism", "pipeline_parallel"),
            f"pipeline_parallel = {stages} is more than num_layers = {layers}{ends}.",
            f"Set at most {layers + 2 * with_ends}: a stage needs at least one {'of them' if with_ends else 'layer'}.",
        )
    recompute = spec.training.recompute
    yield from saved_matmuls_rules(spec)
    if isinstance(recompute, tuple):
        named = [*leaves(recompute)]
        if any(layer >= layers for layer in named):
            yield Violation(
                ("training", "recompute"),
                f"recompute names layer {max(named)}, but the layers are 0 to {layers - 1}.",
                f"Remove layer {max(named)}, or raise num_layers.",
            )
        elif has_segments(recompute):
            yield from _segments(spec, recompute)


def _segments(spec: Spec, recompute: Segment) -> Iterator[Violation]:
    if not in_order(recompute):
        yield Violation(
            ("training", "recompute"),
            "recompute: the layers of a segment must be consecutive and unique.",
            'Write [0, 1, 2] or "0-2".',
        )
    if spec.parallelism.pipeline_parallel > 1:
        yield Violation(
            ("training", "recompute"),
            f"recompute has segments of several layers, but pipeline_parallel = {spec.parallelism.pipeline_parallel}.",
            "Set pipeline_parallel: 1, or recompute each layer separately.",
        )


def _tensor_parallel(spec: Spec) -> Iterator[Violation]:
    ranks, model = spec.parallelism.tensor_parallel, spec.model
    key: Path = ("parallelism", "tensor_parallel")
    if model.num_attention_heads % ranks:
        yield Violation(
            key,
            f"tensor_parallel = {ranks} does not divide num_attention_heads = {model.num_attention_heads}.",
            f"Tensor parallelism splits attention by head: try {divisors(model.num_attention_heads)}.",
        )
    elif model.mla is None and model.num_key_value_heads % ranks and ranks % model.num_key_value_heads:
        groups = model.num_key_value_heads
        yield Violation(
            key,
            f"tensor_parallel = {ranks} and num_key_value_heads = {groups}: neither divides the other.",
            f"A rank needs whole key/value heads, or a copy of one: try {divisors(groups)}, or a multiple of {groups}.",
        )
    widths = {"intermediate_size": model.intermediate_size}
    if model.moe is not None:
        widths["expert_intermediate_size"] = model.moe.expert_intermediate_size
        widths["shared_expert_intermediate_size"] = model.moe.shared_expert_intermediate_size
    for name, width in widths.items():
        if width % ranks:
            yield Violation(
                key, f"tensor_parallel = {ranks} does not divide {name} = {width}.", f"Try {divisors(width)}."
            )
    if spec.parallelism.sequence_parallel and spec.training.sequence_length % ranks:
        length = spec.training.sequence_length
        yield Violation(
            ("parallelism", "sequence_parallel"),
            f"tensor_parallel = {ranks} does not divide sequence_length = {length}.",
            f"Set sequence_length to a multiple of {ranks}, or sequence_parallel: false.",
        )


def _engine(spec: Spec) -> Iterator[Violation]:
    engine, stage = spec.parallelism.engine, spec.parallelism.zero_stage
    supported = {"ddp": (0,), "fsdp1": (2, 3), "fsdp2": (2, 3), "deepspeed": (0, 1, 2, 3), "megatron": (0, 1)}
    stages = supported[engine]
    if stage not in stages:
        # FSDP1 is deprecated, so no message suggests it.
        others = [other for other, own in supported.items() if stage in own and other != "fsdp1"]
        yield Violation(
            ("parallelism", "engine"),
            f"engine = {engine} supports zero_stage {' and '.join(map(str, stages))}, not {stage}.",
            f"Set zero_stage: {' or '.join(map(str, stages))}, or engine: {' or '.join(others)}.",
        )
    if spec.parallelism.pipeline_parallel > 1 and stage >= 2 and engine != "fsdp2":
        yield Violation(
            ("parallelism", "zero_stage"),
            f"zero_stage = {stage} is not modelled with pipeline_parallel = {spec.parallelism.pipeline_parallel} and "
            f"engine = {engine}: gradients would be sharded while later micro-batches still add to them.",
            "Set engine: fsdp2, which reduces them after the last one, zero_stage: 0 or 1, or pipeline_parallel: 1.",
        )


def _zero(spec: Spec) -> Iterator[Violation]:
    engine = spec.parallelism.engine
    if engine != "deepspeed" and not spec.parallelism.zero_optimization.is_default:
        yield Violation(
            ("parallelism", "zero_optimization"),
            f"the block zero_optimization needs engine = deepspeed, but engine = {engine}.",
            "Set engine: deepspeed, or leave zero_optimization out.",
        )
        return
    yield from parallelism.bf16_optimizer(spec)


def _pattern(spec: Spec) -> Iterator[Violation]:
    """Yield violations of `model.layer_pattern`: letters without their block, and families without such layers."""
    model, key = spec.model, ("model", "layer_pattern")
    for letter, block in ((MAMBA, "mamba"), (EXPERTS, "moe")):
        if letter in model.mixers and getattr(model, block) is None:
            problem = f"layer_pattern has the letter {letter}, but model.{block} is not set."
            yield Violation(key, problem, f"Set model.{block}, or leave the letter out.")
    theirs = spec.training.implementation == "huggingface" and model.architecture is not None
    if model.layer_pattern and theirs and "layer_pattern" not in rules_of(family_of(model.architecture or "")):
        shown = model.layer_pattern if len(model.layer_pattern) <= SHOWN else f"{model.layer_pattern[:SHOWN]}..."
        problem = f"layer_pattern = {shown!r}, which modules of {model.architecture} do not have."
        yield Violation(key, problem, "Leave it out, or set architecture: nemotron_h.")


def _of_transformers(spec: Spec) -> Iterator[Violation]:
    """Yield a violation where a model has a part that only transformers' modules have here."""
    if spec.inference is None and spec.training.implementation == "huggingface":
        return
    model = spec.model
    parts = {
        "linear attention": model.linear_attention is not None,
        "other heads in full attention": model.full_attention is not None,
        "a dense MLP in addition to experts": model.moe is not None and model.moe.dense_mlp,
        "xIELU": model.mlp == "xielu",
        "layers of a single module": bool(model.layer_pattern),
    }
    for what, is_so in parts.items():
        if not is_so:
            continue
        if spec.inference is not None:
            remedy = "Dry-run its generation script: `memcalc dry-run --gpu GPU -- python script.py`."
            yield Violation(("inference",), f"generation of a model with {what} is not modelled.", remedy)
        else:
            problem = f"implementation = {spec.training.implementation} does not support {what}."
            yield Violation(("training", "implementation"), problem, "Set implementation: huggingface.")


def _modelled(spec: Spec) -> Iterator[Violation]:
    training, parallelism = spec.training, spec.parallelism
    if training.implementation == "huggingface" and parallelism.tensor_parallel > 1:
        yield Violation(
            ("parallelism", "tensor_parallel"),
            f"tensor_parallel = {parallelism.tensor_parallel} is not modelled with transformers' modules.",
            "Set tensor_parallel: 1, or implementation: plain.",
        )


RULES: tuple[Rule, ...] = (
    _heads,
    _experts,
    _pattern,
    _of_transformers,
    _foreign,
    _sequence,
    _precision,
    _layers,
    _tensor_parallel,
    _engine,
    parallelism.megatron,
    parallelism.torchtitan,
    parallelism.context,
    parallelism.experts,
    parallelism.replicas,
    parallelism.one_dtype,
    fsdp.policy,
    fsdp.pipelined,
    fsdp.flat_parameters,
    _zero,
    offload.offload,
    offload.activations,
    parallelism.schedule,
    parallelism.pipeline_engine,
    finetuning,
    fp8,
    fake_quantization,
    kernels,
    loss,
    labels,
    rollouts,
    teacher,
    optimizing,
    _modelled,
)

# Rules for generation: those that do not concern a training step.
INFERENCE_RULES: tuple[Callable[[Spec], Iterator[Violation]], ...] = (
    inference,
    _heads,
    _experts,
    _of_transformers,
    _layers,
    _tensor_parallel,
    parallelism.experts,
)
