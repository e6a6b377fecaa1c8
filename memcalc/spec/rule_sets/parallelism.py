"""Rules of Megatron-Core's modules and engine, of context, expert and pipeline parallelism, and of HSDP."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.model_families.conversion import built_in_fp32
from memcalc.spec.recipes import RECIPES
from memcalc.spec.rule_sets.violations import Violation, divisors
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path


def megatron(spec: Spec) -> Iterator[Violation]:
    """Yield violations: Megatron-LM keeps fp32 main gradients in one buffer, with any modules."""
    training, model, parallelism = spec.training, spec.model, spec.parallelism
    own = training.implementation == "megatron"
    recipe = "fp32-main" if own and training.dtype == "fp32" else "mixed-18"
    if own or parallelism.engine == "megatron":
        if training.recipe != recipe:
            yield Violation(
                ("training", "recipe"),
                f"recipe = {training.recipe}, but Megatron-LM keeps fp32 main gradients: recipe {recipe}.",
                f"Set recipe: {recipe}, or another engine and implementation.",
            )
    elif training.recipe == "fp32-main":
        yield Violation(
            ("training", "recipe"),
            f"recipe = fp32-main is Megatron-LM's, but implementation = {training.implementation}.",
            "Set recipe: fp32, or implementation: megatron.",
        )
    if not own:
        return
    if training.dtype == "fp32" and training.attention != "eager":
        yield Violation(
            ("training", "attention"),
            f"attention = {training.attention} with dtype = fp32: no fused kernel supports it.",
            "Set attention: eager.",
        )
    if parallelism.engine not in ("megatron", "ddp"):
        yield Violation(
            ("parallelism", "engine"),
            f"engine = {parallelism.engine} with implementation megatron: its linear layers add to main gradients.",
            "Leave engine out, or set engine: megatron.",
        )
    if training.loss not in ("vocab-parallel", "fused"):
        yield Violation(
            ("training", "loss"),
            f"loss = {training.loss} with implementation megatron: its loss shards the vocabulary.",
            "Set loss: vocab-parallel (Megatron-Core's own) or fused (Transformer Engine's).",
        )
    if training.attention == "memory-efficient":
        yield Violation(
            ("training", "attention"),
            f"attention = {training.attention} with implementation megatron: its fused kernel is flash attention.",
            "Set attention: flash (Transformer Engine) or eager (Megatron-Core's own modules).",
        )
    if training.attention == "eager" and (model.moe or model.mla):
        yield Violation(
            ("training", "attention"),
            f"attention = eager with implementation megatron and {'experts' if model.moe else 'latent attention'} is "
            "not modelled.",
            "Set attention: flash, or implementation: plain.",
        )
    shape = {
        "position_embedding": (model.position_embedding, ("rope", "learned", "none")),
        "norms_per_layer": (model.norms_per_layer, (2,)),
        "norm_placement": (model.norm_placement, ("before",)),
        "embedding_size": (model.embedding_size, (model.hidden_size,)),
        "qk_norm_width": (model.qk_norm_width if model.qk_norm else "head", ("head",)),
        "attention_sinks": (model.attention_sinks, (False,)),
        "embedding_norm": (model.embedding_norm, (False,)),
    }
    for field, (value, known) in shape.items():
        if value not in known:
            yield Violation(
                ("model", field),
                f"{field} = {value} is not modelled with implementation megatron.",
                f"Modelled: {', '.join(map(str, known))}; or set implementation: plain.",
            )


def torchtitan(spec: Spec) -> Iterator[Violation]:
    """Yield violations: modelled is torchtitan's Llama with defaults:

    FSDP2, fp32 shards, 16-bit gathers, fp32 reduction.
    """
    training, model, parallelism = spec.training, spec.model, spec.parallelism
    if training.implementation != "torchtitan":
        return
    fields: dict[Path, tuple[object, tuple[object, ...]]] = {
        ("parallelism", "engine"): (parallelism.engine, ("fsdp2",)),
        ("training", "recipe"): (training.recipe, ("amp",)),
        ("training", "loss"): (training.loss, ("materialized",)),
        ("training", "attention"): (training.attention, ("flash",)),
        ("model", "normalization"): (model.normalization, ("rmsnorm",)),
        ("model", "mlp"): (model.mlp, ("swiglu",)),
        ("model", "position_embedding"): (model.position_embedding, ("rope",)),
        ("model", "norms_per_layer"): (model.norms_per_layer, (2,)),
        ("model", "norm_placement"): (model.norm_placement, ("before",)),
        ("model", "qkv_bias"): (model.qkv_bias, (False,)),
        ("model", "output_bias"): (model.output_bias, (False,)),
        ("model", "mlp_bias"): (model.mlp_bias, (False,)),
        ("model", "qk_norm"): (model.qk_norm, (False,)),
        ("model", "tie_word_embeddings"): (model.tie_word_embeddings, (False,)),
        ("model", "parallel_block"): (model.parallel_block, (False,)),
        ("model", "embedding_norm"): (model.embedding_norm, (False,)),
        ("model", "embedding_size"): (model.embedding_size, (model.hidden_size,)),
        ("model", "final_norm"): (model.final_norm, (True,)),
        ("model", "moe"): (model.moe and "experts", (None,)),
        ("model", "mla"): (model.mla and "latent attention", (None,)),
        ("model", "attention_sinks"): (model.attention_sinks, (False,)),
        ("model", "norm_weight"): (model.norm_weight, (True,)),
        ("parallelism", "tensor_parallel"): (parallelism.tensor_parallel, (1,)),
        ("parallelism", "pipeline_parallel"): (parallelism.pipeline_parallel, (1,)),
        ("parallelism", "context_parallel"): (parallelism.context_parallel, (1,)),
    }
    for key, (value, known) in fields.items():
        if value not in known:
            yield Violation(
                key,
                f"{key[-1]} = {value} is not modelled with implementation torchtitan.",
                f"Modelled: {', '.join(map(str, known))}; or set implementation: plain.",
            )
    if parallelism.shards == 1:
        yield Violation(
            ("parallelism", "data_parallel"),
            "implementation torchtitan with data_parallel = 1: FSDP2 has no ranks to shard over.",
            "Set data_parallel: 2 or more.",
        )


def context(spec: Spec) -> Iterator[Violation]:
    """Yield violations: each of c ranks has two chunks of every sequence, one from the front and one from the back."""
    c, t = spec.parallelism.context_parallel, spec.parallelism.tensor_parallel
    if c == 1:
        return
    key: Path = ("parallelism", "context_parallel")
    length = spec.training.sequence_length
    if spec.training.attention != "flash":
        yield Violation(
            ("training", "attention"),
            f"attention = {spec.training.attention} with context_parallel = {c}: no rank has all keys at once.",
            "Set attention: flash.",
        )
    pieces = 2 * c * (t if spec.parallelism.sequence_parallel else 1)
    if length % pieces:
        yield Violation(
            key,
            f"sequence_length = {length} cannot be split into 2 x {c} x {pieces // (2 * c)} = {pieces} chunks.",
            "Each rank gets a chunk from the front and one from the back, to balance causal attention.",
        )
    heads = spec.model.num_attention_heads // t
    if spec.parallelism.context_parallel_method == "all-to-all" and heads % c:
        yield Violation(
            key,
            f"context_parallel = {c} does not divide the {heads} query heads of a rank, which all-to-all exchanges.",
            "Set context_parallel_method: ring, or fewer ranks.",
        )
    if spec.training.implementation == "huggingface":
        yield Violation(key, f"context_parallel = {c} with transformers' modules is not modelled.", "Set it to 1.")


def experts(spec: Spec) -> Iterator[Violation]:
    """Yield violations: experts are sharded over e ranks, each expert over t_e; t·c·N must be a multiple of e·t_e."""
    parallelism, moe = spec.parallelism, spec.model.moe
    e, width = parallelism.expert_parallel, parallelism.expert_tensor_parallel
    if moe is None:
        for field, value in (("expert_parallel", e), ("expert_tensor_parallel", width or 1)):
            if value > 1:
                yield Violation(
                    ("parallelism", field), f"{field} = {value}, but the model has no experts.", f"Leave {field} out."
                )
        return
    if moe.num_experts % e:
        yield Violation(
            ("parallelism", "expert_parallel"),
            f"expert_parallel = {e} does not divide num_experts = {moe.num_experts}.",
            f"Each rank holds as many experts: try {divisors(moe.num_experts)}.",
        )
    if width is not None and moe.expert_intermediate_size % width:
        yield Violation(
            ("parallelism", "expert_tensor_parallel"),
            f"expert_tensor_parallel = {width} does not divide "
            f"expert_intermediate_size = {moe.expert_intermediate_size}.",
            f"Try {divisors(moe.expert_intermediate_size)}.",
        )
    ranks = parallelism.tensor_parallel * parallelism.context_parallel * parallelism.data_parallel
    if ranks % (e * parallelism.expert_width_ranks):
        yield Violation(
            ("parallelism", "expert_parallel"),
            f"tensor {parallelism.tensor_parallel} x context {parallelism.context_parallel} x data "
            f"{parallelism.data_parallel} = {ranks} ranks are not a multiple of expert {e} x expert_tensor "
            f"{parallelism.expert_width_ranks}.",
            "Expert parallelism uses the same ranks, so its groups must fit in them.",
        )
    if spec.training.implementation == "huggingface" and e > 1:
        yield Violation(
            ("parallelism", "expert_parallel"),
            f"expert_parallel = {e} with transformers' modules is not modelled.",
            "Set it to 1.",
        )


def replicas(spec: Spec) -> Iterator[Violation]:
    """Yield violations: HSDP splits N ranks into groups of equal size, each of which has all parameters once."""
    parallelism = spec.parallelism
    groups, ranks = parallelism.data_parallel_replicate, parallelism.data_parallel
    if ranks % groups:
        yield Violation(
            ("parallelism", "data_parallel_replicate"),
            f"data_parallel_replicate = {groups} does not divide data_parallel = {ranks}.",
            f"Groups are of one size: try {divisors(ranks)}.",
        )
    if groups > 1 and parallelism.engine != "fsdp2":
        yield Violation(
            ("parallelism", "data_parallel_replicate"),
            f"data_parallel_replicate = {groups} with engine {parallelism.engine}.",
            "Only fsdp2 shards inside groups (HSDP).",
        )


def one_dtype(spec: Spec) -> Iterator[Violation]:
    """Yield violations: FSDP2 trains parameters of one dtype (torch 2.13 _fsdp_param_group.py, _init_mp_dtypes)."""
    training, parallelism = spec.training, spec.parallelism
    wide = built_in_fp32(spec.model.architecture) if training.implementation == "huggingface" else ()
    trained = training.finetune == "full" and RECIPES[training.recipe].weights != "fp32"
    if wide and trained and parallelism.engine == "fsdp2" and parallelism.data_parallel > 1:
        yield Violation(
            ("training", "recipe"),
            f"recipe = {training.recipe} with FSDP2: transformers builds {', '.join(wide)} of "
            f"{spec.model.architecture} in fp32, and FSDP2 refuses parameters of two dtypes.",
            "Set recipe: amp or fp32, another engine, or implementation: plain.",
        )


def schedule(spec: Spec) -> Iterator[Violation]:
    """Yield violations: a stage has whole layers, in as many chunks as the schedule needs."""
    parallelism, layers = spec.parallelism, spec.model.num_layers
    name, stages, virtual = parallelism.schedule, parallelism.pipeline_parallel, parallelism.virtual_stages
    key: Path = ("parallelism", "schedule")
    if virtual > 1 and name != "interleaved":
        yield Violation(
            ("parallelism", "virtual_stages"),
            f"virtual_stages = {virtual} with schedule {name}.",
            "Set schedule: interleaved for several chunks per stage; the V schedules always have two.",
        )
    if name == "1f1b":
        return
    if stages == 1:
        yield Violation(key, f"schedule = {name}, but pipeline_parallel = 1.", "Leave schedule out, or add stages.")
    if name == "interleaved" and virtual == 1:
        yield Violation(key, "schedule = interleaved, but virtual_stages = 1.", "Set virtual_stages: 2 or more.")
    if name == "dualpipe" and stages % 2:
        yield Violation(
            key, f"schedule = dualpipe with {stages} stages.", "It runs in both directions: set an even number."
        )
    parts = stages * {"interleaved": virtual, "gpipe": 1, "zb-h1": 1, "zb-h2": 1, "dualpipe": 1}.get(name, 2)
    if parts > layers:
        yield Violation(
            key,
            f"schedule = {name} splits the model into {parts} chunks, but num_layers = {layers}.",
            "A chunk needs at least one layer: use fewer stages or virtual_stages.",
        )
