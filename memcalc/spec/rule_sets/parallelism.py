"""Rules of Megatron-Core's modules and engine, of context, expert and pipeline parallelism, and of HSDP."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.layers import windows_among
from memcalc.spec.model_families.conversion import built_in_fp32
from memcalc.spec.recipes import RECIPES
from memcalc.spec.rule_sets.violations import Violation, divisors, only, setting, shown
from memcalc.spec.spec import Spec
from memcalc.spec.yaml_source import Path
from memcalc.spec.zero import bf16_optimizer_fields


def megatron(spec: Spec) -> Iterator[Violation]:
    """Yield violations: Megatron-LM keeps fp32 main gradients in one buffer, with any modules."""
    training, model, parallelism = spec.training, spec.model, spec.parallelism
    own = training.implementation == "megatron"
    recipe = "fp32-main" if own and training.dtype == "fp32" else "mixed-18"
    if own or parallelism.engine == "megatron":
        if training.recipe != recipe:
            yield Violation(
                ("training", "recipe"),
                f"recipe = {training.recipe} does not run with {'implementation' if own else 'engine'} = megatron, "
                f"which keeps fp32 main gradients: recipe {recipe}.",
                f"Set recipe: {recipe}, or another engine and implementation.",
            )
    elif training.recipe == "fp32-main":
        yield Violation(
            ("training", "recipe"),
            f"recipe = fp32-main needs implementation = megatron, not {training.implementation}.",
            "Set recipe: fp32, or implementation: megatron.",
        )
    if not own:
        return
    if training.dtype == "fp32" and training.attention != "eager":
        yield Violation(
            ("training", "attention"),
            f"attention = {training.attention} has no fused kernel for dtype = fp32.",
            "Set attention: eager, or dtype: bf16 or fp16.",
        )
    if parallelism.engine not in ("megatron", "ddp"):
        yield Violation(
            ("parallelism", "engine"),
            f"implementation = megatron does not support engine = {parallelism.engine}: its linear layers add to main "
            "gradients.",
            "Leave engine out, or set engine: megatron.",
        )
    if training.loss not in ("vocab-parallel", "fused"):
        yield Violation(
            ("training", "loss"),
            f"implementation = megatron does not support loss = {training.loss}: its loss shards the vocabulary.",
            "Set loss: vocab-parallel (Megatron-Core's own) or fused (Transformer Engine's).",
        )
    if training.attention == "memory-efficient":
        yield Violation(
            ("training", "attention"),
            f"implementation = megatron does not support attention = {training.attention}.",
            "Set attention: flash (Transformer Engine) or eager (Megatron-Core's own modules).",
        )
    if training.attention == "eager" and (model.moe or model.mla):
        yield Violation(
            ("training", "attention"),
            f"attention = eager is not modelled with implementation = megatron and "
            f"{'experts' if model.moe else 'latent attention'}.",
            "Set attention: flash, or implementation: plain.",
        )
    shape: dict[str, tuple[object, ...]] = {
        "model.position_embedding": ("rope", "learned", "none"),
        "model.norms_per_layer": (2,),
        "model.norm_placement": ("before",),
        "model.embedding_size": (model.hidden_size,),
        "model.qk_norm_width": ("head",),
        "model.attention_sinks": (False,),
        "model.embedding_norm": (False,),
    }
    yield from only(
        spec,
        shape,
        "{} is not modelled with implementation = megatron.",
        "implementation: plain",
        {} if model.qk_norm else {"model.qk_norm_width": "head"},
    )


# of models with experts that torchtitan has, see architectures/torchtitan_moe.py
TORCHTITAN_EXPERTS = ("deepseek_v2", "deepseek_v3", "llama4_text", "qwen3_moe")


def torchtitan(spec: Spec) -> Iterator[Violation]:
    """Yield violations: modelled are torchtitan's Llama, DeepSeek and Qwen3 with fp32 weights.

    With FSDP2, which gathers them in 16 bits and reduces in fp32; without it as torchtitan runs them: under autocast on
    one GPU and with DDP, in fp32 with tensor or pipeline parallelism. Tensor parallelism has sequence parallelism.
    """
    training, model, parallelism = spec.training, spec.model, spec.parallelism
    if training.implementation != "torchtitan":
        return
    fields: dict[str, tuple[object, ...]] = {
        "parallelism.engine": ("fsdp2", "ddp"),
        "training.recipe": ("fp32" if training.dtype == "fp32" else "amp",),
        "training.loss": ("materialized", "vocab-parallel"),
        "training.attention": ("math" if training.dtype == "fp32" else "flash",),
        "model.normalization": ("rmsnorm",),
        "model.mlp": ("swiglu",),
        "model.position_embedding": ("rope",),
        "model.norms_per_layer": (2,),
        "model.norm_placement": ("before",),
        "model.qkv_bias": (False,),
        "model.output_bias": (False,),
        "model.mlp_bias": (False,),
        "model.qk_norm_width": ("head",),
        "model.tie_word_embeddings": (False,),
        "model.parallel_block": (False,),
        "model.embedding_norm": (False,),
        "model.embedding_size": (model.hidden_size,),
        "model.final_norm": (True,),
        "model.architecture": (model.architecture,) if model.moe is None else TORCHTITAN_EXPERTS,
        "model.attention_sinks": (False,),
        "model.norm_weight": (True,),
        "parallelism.sequence_parallel": (True,),
        "parallelism.context_parallel": (1,) if model.mla is not None else (parallelism.context_parallel,),
        "parallelism.context_parallel_method": ("all-gather", "ring"),
    }
    split = parallelism.context_parallel > 1
    given = {
        "parallelism.context_parallel_method": parallelism.context_parallel_method if split else "ring",
        "model.qk_norm_width": model.qk_norm_width if model.qk_norm else "head",
        "parallelism.sequence_parallel": parallelism.sequence_parallel or parallelism.tensor_parallel == 1,
    }
    problem = "{} is not modelled with implementation = torchtitan."
    yield from only(spec, fields, problem, "implementation: plain", given)
    if parallelism.engine == "fsdp2" and parallelism.shards == 1:
        yield Violation(
            ("parallelism", "data_parallel"),
            "implementation = torchtitan needs several ranks for FSDP2, but data_parallel = 1.",
            "Set data_parallel: 2 or more, or engine: ddp.",
        )
    if parallelism.engine == "ddp" and (model.moe is not None or model.mla is not None):
        yield Violation(
            ("parallelism", "engine"),
            "implementation = torchtitan with experts or latent attention is modelled for engine = fsdp2, not ddp.",
            "Set engine: fsdp2, or implementation: plain.",
        )
    split = parallelism.tensor_parallel > 1 or parallelism.pipeline_parallel > 1
    if parallelism.engine == "ddp" and split and training.dtype != "fp32":
        yield Violation(
            ("training", "dtype"),
            "implementation = torchtitan computes in fp32 with tensor or pipeline parallelism and without FSDP2, but "
            f"dtype = {training.dtype}.",
            "Set dtype: fp32, or engine: fsdp2.",
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
            f"context_parallel = {c} needs attention = flash, not {spec.training.attention}: no rank has all keys at "
            "once.",
            "Set attention: flash.",
        )
    pieces = 2 * c * (t if spec.parallelism.sequence_parallel else 1)
    if length % pieces:
        yield Violation(
            key,
            f"sequence_length = {length} is not a multiple of 2 x {c} x {pieces // (2 * c)} = {pieces}, the chunks of "
            f"context_parallel = {c}.",
            f"Set sequence_length to a multiple of {pieces}, such as {max(1, length // pieces) * pieces}.",
        )
    heads = spec.model.num_attention_heads // t
    if spec.parallelism.context_parallel_method == "all-to-all" and heads % c:
        yield Violation(
            key,
            f"context_parallel = {c} does not divide the {heads} query heads of a rank, which all-to-all exchanges.",
            "Set context_parallel_method: ring, or lower context_parallel.",
        )
    if spec.training.implementation == "huggingface":
        yield from _context_of_transformers(spec)


def _context_of_transformers(spec: Spec) -> Iterator[Violation]:
    """Yield violations of Accelerate's context parallelism (accelerate 1.15, _attach_context_parallel_hooks)."""
    model, key = spec.model, ("parallelism", "context_parallel")
    given = f"context_parallel = {spec.parallelism.context_parallel}"
    remedy = "Set context_parallel: 1, or implementation: plain."
    if spec.parallelism.context_parallel_method == "all-to-all":
        yield Violation(
            ("parallelism", "context_parallel_method"),
            "context_parallel_method = all-to-all is not modelled with transformers' modules.",
            "Set context_parallel_method: all-gather, or implementation: plain.",
        )
    if windows_among(model)[0]:
        yield Violation(
            key,
            f"{given} drops the masks of attention, so Accelerate rejects layers with a sliding window.",
            remedy,
        )
    if model.mla is not None or model.linear_attention is not None or model.mamba is not None:
        yield Violation(
            key,
            f"{given} with transformers' modules is not modelled for latent or linear attention, or for Mamba-2.",
            remedy,
        )


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
            f"Each rank holds the same number of experts: try {divisors(moe.num_experts)}.",
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
            f"expert {e} x expert_tensor {parallelism.expert_width_ranks} does not divide "
            f"tensor {parallelism.tensor_parallel} x context {parallelism.context_parallel} x data "
            f"{parallelism.data_parallel} = {ranks} ranks.",
            "Change expert_parallel or data_parallel: groups of experts use the same ranks.",
        )
    if spec.training.implementation == "huggingface" and e > 1:
        yield Violation(
            ("parallelism", "expert_parallel"),
            f"expert_parallel = {e} is not modelled with transformers' modules.",
            "Set expert_parallel: 1, or implementation: plain.",
        )


def replicas(spec: Spec) -> Iterator[Violation]:
    """Yield violations: HSDP splits N ranks into groups of equal size, each of which has all parameters once."""
    parallelism = spec.parallelism
    groups, ranks = parallelism.data_parallel_replicate, parallelism.data_parallel
    if ranks % groups:
        yield Violation(
            ("parallelism", "data_parallel_replicate"),
            f"data_parallel_replicate = {groups} does not divide data_parallel = {ranks}.",
            f"All groups have the same size: try {divisors(ranks)}.",
        )
    if groups > 1 and parallelism.engine not in ("fsdp1", "fsdp2"):
        yield Violation(
            ("parallelism", "data_parallel_replicate"),
            f"data_parallel_replicate = {groups} needs engine = fsdp1 or fsdp2, not {parallelism.engine}.",
            "Set engine: fsdp2, which shards inside groups (HSDP), or leave data_parallel_replicate out.",
        )


def one_dtype(spec: Spec) -> Iterator[Violation]:
    """Yield violations: FSDP2 trains parameters of one dtype (torch 2.13 _fsdp_param_group.py, _init_mp_dtypes)."""
    training, parallelism = spec.training, spec.parallelism
    wide = built_in_fp32(spec.model.architecture) if training.implementation == "huggingface" else ()
    trained = training.finetune == "full" and RECIPES[training.recipe].weights != "fp32"
    if wide and trained and parallelism.engine == "fsdp2" and parallelism.shards > 1:
        yield Violation(
            ("training", "recipe"),
            f"recipe = {training.recipe} does not run under FSDP2, which rejects parameters of two dtypes: "
            f"transformers builds {', '.join(wide)} of {spec.model.architecture} in fp32.",
            "Set recipe: amp or fp32, another engine, or implementation: plain.",
        )


def bf16_optimizer(spec: Spec) -> Iterator[Violation]:
    """Yield violations: DeepSpeed's BF16_Optimizer shards the states of bf16 weights, if their sums are fp32."""
    if not spec.parallelism.zero_optimization.bf16_optimizer:
        return
    for key, (value, known) in bf16_optimizer_fields(spec).items():
        if value != known:
            yield Violation(
                key,
                f"zero_optimization.bf16_optimizer needs {key[-1]} = {known}, not {shown(value)}.",
                f"Set {setting(str(key[-1]), (known,))}, or bf16_optimizer: false.",
            )


def pipeline_engine(spec: Spec) -> Iterator[Violation]:
    """Yield violations: the tensors that DeepSpeed's pipeline engine keeps are those of its own schedule."""
    parallelism = spec.parallelism
    if parallelism.pipeline_tensors in (None, "none") or parallelism.has_pipeline_engine:
        return
    yield Violation(
        ("parallelism", "pipeline_tensors"),
        f"pipeline_tensors = {parallelism.pipeline_tensors} needs engine = deepspeed and schedule = 1f1b, not "
        f"{parallelism.engine} and {parallelism.schedule}.",
        "Set engine: deepspeed, or leave pipeline_tensors out.",
    )


def schedule(spec: Spec) -> Iterator[Violation]:
    """Yield violations: a stage has whole layers, in as many chunks as the schedule needs, and rounds are full."""
    parallelism, layers = spec.parallelism, spec.model.num_layers
    name, stages, virtual = parallelism.schedule, parallelism.pipeline_parallel, parallelism.virtual_stages
    key: Path = ("parallelism", "schedule")
    if virtual > 1 and name != "interleaved":
        yield Violation(
            ("parallelism", "virtual_stages"),
            f"virtual_stages = {virtual} needs schedule = interleaved, not {name}.",
            "Set schedule: interleaved, or leave virtual_stages out; V schedules always have two chunks per stage.",
        )
    if name == "1f1b":
        return
    if stages == 1:
        yield Violation(
            key,
            f"schedule = {name} needs several stages, but pipeline_parallel = 1.",
            "Leave schedule out, or raise pipeline_parallel.",
        )
    if parallelism.engine == "deepspeed":  # 0.19.8 runtime/pipe/engine.py: its pipeline engine runs TrainSchedule
        yield Violation(
            key,
            f"schedule = {name} does not run with engine = deepspeed, which has 1f1b only.",
            "Leave schedule out, or set engine: megatron (recipe mixed-18) or fsdp2.",
        )
    if name == "interleaved" and virtual == 1:
        yield Violation(
            key,
            "schedule = interleaved needs several chunks per stage, but virtual_stages = 1.",
            "Set virtual_stages: 2 or more.",
        )
    if name == "interleaved":
        yield from _rounds(spec)
    if name == "dualpipe" and stages % 2:
        yield Violation(
            key,
            f"schedule = dualpipe needs an even number of stages, but pipeline_parallel = {stages}.",
            f"Set pipeline_parallel: {stages + 1} or another even number.",
        )
    parts = stages * {"interleaved": virtual, "gpipe": 1, "zb-h1": 1, "zb-h2": 1, "dualpipe": 1}.get(name, 2)
    if parts > layers:
        yield Violation(
            key,
            f"schedule = {name} splits the model into {parts} chunks, but num_layers = {layers}.",
            "Lower pipeline_parallel or virtual_stages: a chunk needs at least one layer.",
        )


def _rounds(spec: Spec) -> Iterator[Violation]:
    """Yield a violation: an interleaved schedule takes the micro-batches of a step in equal rounds.

    PyTorch's rounds have at least as many micro-batches as there are stages, Megatron-LM's exactly as many. Sources:
    torch 2.13 distributed/pipelining/schedules.py, ScheduleInterleaved1F1B; Megatron-Core 0.16 pipeline_parallel/
    schedules.py, forward_backward_pipelining_with_interleaving.
    """
    stages, count = spec.parallelism.pipeline_parallel, spec.training.gradient_accumulation_steps
    rounds = count // stages
    if rounds == 0:
        return
    megatron = spec.parallelism.engine == "megatron"
    if count % (stages if megatron else rounds):
        multiple = f"a multiple of pipeline_parallel = {stages}"
        yield Violation(
            ("training", "gradient_accumulation_steps"),
            f"schedule = interleaved needs full rounds: gradient_accumulation_steps = {count} is not {multiple}"
            + ("." if megatron else f", nor of its {rounds} rounds."),
            f"Set gradient_accumulation_steps: {stages * rounds}, or schedule: 1f1b.",
        )
