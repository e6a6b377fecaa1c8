"""Megatron-DeepSpeed: Megatron's modules under DeepSpeed's engine, usually its pipeline engine.

Sources: bigscience-workshop/Megatron-DeepSpeed 8387ae1 (December 2023), megatron/model/gpt_model.py, transformer.py,
fused_softmax.py, optimizer/__init__.py; DeepSpeed 0.19 runtime/engine.py, runtime/pipe.
"""

from __future__ import annotations

from typing import Any

from memcalc.frameworks.deepspeed import place_zero
from memcalc.frameworks.draft import Draft
from memcalc.importers import deepspeed
from memcalc.importers.file_format import Meaning

CONFIG = "deepspeed-config"  # the argument, and the block of the file that it names
CAUSAL = "pretrain_gpt.py"  # the program with attention masks that stages do not pass on
LONGEST_FUSED = 4096  # keys: fused_softmax.py, is_kernel_available

_GATED = {"swiglu": "swiglu", "geglu": "geglu"}
_SPLITS = {"type:transformer": "layers", "type:transformer|embedding": "layers-and-ends"}

# The block of the configuration that the script writes for --deepspeed_config.
CONFIG_FIELDS: dict[str, Meaning] = {f"{CONFIG}.{path}": meaning for path, meaning in deepspeed.AS_PARTS.items()}


def runs_deepspeed(draft: Draft) -> bool:
    """Return whether the script has --deepspeed."""
    return draft.facts.get("deepspeed") is True


def place_deepspeed(draft: Draft) -> None:
    """Set the engine, its ZeRO stage and optimizer, the pipeline, and the modules."""
    facts, values = draft.facts, draft.values
    values["parallelism.engine"] = "deepspeed"
    pipelined = facts.get("unpipelined") is not True
    draft.default("training.optimizer_implementation", "fused")  # Apex's FusedAdam
    _place_optimizer(draft, pipelined=pipelined)
    _place_pipeline(draft, pipelined=pipelined)
    _place_modules(draft)
    if "model.moe.num_experts" in values:
        draft.limit("experts of Megatron-DeepSpeed", "Megatron-LM's are counted", holds_memory=True)
    # vocab_parallel_cross_entropy reads fp32 logits, which float16_to_fp32 returns from the last module.
    if values.get("parallelism.tensor_parallel", 1) != 1:
        draft.default("training.loss", "vocab-parallel")
    draft.default("training.logits_until", "backward" if pipelined else "loss")
    if values.get("training.dtype") != "fp32":
        draft.default("training.logits_dtype", "fp32")


def _place_optimizer(draft: Draft, *, pipelined: bool) -> None:
    """Set the recipe, by precision and ZeRO stage.

    With pipelines BF16_Optimizer updates bf16 weights at stages 0 and 1; it shards its states at both. Its sums were in
    fp32 until data_types.grad_accum_dtype set their dtype, which is bf16 by default: the larger ones are counted.
    """
    fields, values = draft.given_fields, draft.values
    zero = {path.removeprefix(f"{CONFIG}.zero_optimization."): value for path, value in fields.items()}
    place_zero(draft, {name: value for name, value in zero.items() if name not in fields})
    stage = zero.get("stage", draft.facts.get("zero_stage", 1))  # arguments.py: zero-stage
    stage = stage if type(stage) is int and 0 <= stage <= 3 else 1
    dtype = draft.given("training.dtype")
    if not fields.keys() & CONFIG_FIELDS.keys():
        draft.notes.append("the DeepSpeed config is not in the script: the defaults of its other fields are counted")
    if dtype == "bf16" and stage < 2 and pipelined:
        draft.default("training.recipe", "mixed-20")
        stage = 1
    else:
        draft.default("training.recipe", "fp32" if dtype in (None, "fp32") else "mixed-16")
    draft.default("parallelism.zero_stage", stage)
    # optimizer/__init__.py: norms and biases are a group of their own
    draft.default("parallelism.zero_optimization.separate_no_decay", True)
    if draft.given("parallelism.zero_stage") == 0 and dtype == "fp16":
        draft.default("parallelism.zero_optimization.own_adam", True)  # runtime/engine.py: Apex's FusedAdam, too
    if values.get("training.dtype") is None:
        values["training.dtype"] = "fp32"


def _place_pipeline(draft: Draft, *, pipelined: bool) -> None:
    facts = draft.facts
    if not pipelined:
        draft.default("parallelism.pipeline_tensors", "none")
        return
    causal = facts.get("program") == CAUSAL
    draft.default("parallelism.pipeline_tensors", "hidden-states" if causal else "with-masks")
    split: Any = facts.get("split", "type:transformer")  # gpt_model.py: the default
    if split in _SPLITS:
        draft.default("parallelism.pipeline_split", _SPLITS[split])
    else:
        what = f"the pipeline split {split}"
        draft.limit(what, "stages with equally many layers are counted", holds_memory=True)


def _place_modules(draft: Draft) -> None:
    """Set a gated MLP, which keeps its size, and note a softmax in fp32 that no fused kernel computes."""
    facts, values, fields = draft.facts, draft.values, draft.given_fields
    hidden = values.get("model.hidden_size")
    if type(hidden) is int:
        draft.default("model.intermediate_size", 4 * hidden)
    draft.default("model.embedding_norm", facts.get("embedding_norm") is True)
    gate = facts.get("gate")
    if gate in _GATED:
        values["model.mlp"] = _GATED[gate]
    elif gate is not None:
        values["model.mlp"] = "swiglu"
        draft.limit(f"the activation {gate}", "SwiGLU is counted", holds_memory=True)
    if "use-flash-attn" in fields:
        return
    draft.default("training.attention", "eager")
    length = draft.given("training.sequence_length")
    fused = type(length) is int and 16 < length <= LONGEST_FUSED and length % 4 == 0
    fused = fused and fields.get("no-masked-softmax-fusion") is not True
    scaled = "no-query-key-layer-scaling" not in fields and values.get("training.dtype") == "fp16"
    if not fused and (scaled or fields.get("attention-softmax-in-fp32") is True):
        draft.limit("the softmax of attention in fp32", "it is counted in the step's dtype", holds_memory=True)
