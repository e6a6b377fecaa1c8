"""Fields that follow from several Megatron-LM arguments: precision, vocabulary, sizes, experts, layers and ranks."""

from __future__ import annotations

import re
from typing import Any

from memcalc.errors import InputError
from memcalc.frameworks.draft import Draft
from memcalc.importers.vocabulary import NULL, entries_of, place_vocabulary

_CONTEXT_METHODS = {"p2p": "ring", "a2a": "all-to-all"}
_PATTERN = re.compile(r"(\[[01,\s]+\])\s*(?:\*\s*(\d{1,4}))?")  # pattern of layers: ([0]*3+[1]*58)
SEGMENTS = "several layers in one checkpoint segment", "each layer is counted as one segment"  # a limit
_MOST = 10_000  # layers that are listed separately


def place_precision(draft: Draft) -> None:
    """Set the dtypes of the step and of gradient accumulation (arguments.py)."""
    facts, values = draft.facts, draft.values
    if "training.dtype" not in values and "training.dtype" not in draft.overridden:
        values["training.dtype"] = "fp32"  # neither bf16 nor fp16 is set
    if facts.get("reduce_bf16") is True and values.get("training.dtype") == "bf16":
        draft.default("training.gradient_dtype", "bf16")
    if (
        "fp16" in draft.given_fields
        and values.get("training.dtype") == "fp16"
        and facts.get("accumulates_in_fp32") is not True
    ):
        draft.default("training.gradient_dtype", "fp16")  # arguments.py: in fp32 by default for bf16 alone


def _counts(*values: Any) -> bool:
    """Return whether all values are valid counts of layers or stages."""
    return all(type(value) is int and 0 < value <= _MOST for value in values)


def place_rows(draft: Draft) -> None:
    """Set the padded vocabulary from --vocab-size, else from the tokenizer (tokenizer.py)."""
    facts = draft.facts
    if "model.vocab_size" in draft.values:  # the padded one is given
        return
    kind, count = facts.get("tokenizer_type"), facts.get("vocabulary")
    if count is not None:
        null = kind == NULL and type(count) is int
        place_vocabulary(draft, count + 1 if null else count, f"{count:,} entries and an end token" if null else "")
        return
    name = facts.get("tokenizer_model") if kind == "HuggingFaceTokenizer" else kind
    entries = entries_of(name)
    if entries is not None:
        place_vocabulary(draft, entries, f"that of {name}")


def place_widths(draft: Draft) -> None:
    """Set the MLP size: 4 hidden sizes; if gated two thirds of that, a multiple of 64 (arguments.py)."""
    values, size = draft.values, draft.values.get("model.hidden_size")
    if type(size) is int:
        gated = values.get("model.mlp") == "swiglu"
        draft.default("model.intermediate_size", int(4 * size * 2 / 3 / 64) * 64 if gated else 4 * size)


def place_experts(draft: Draft) -> None:
    """Set the layers with experts, their sizes, and the number of experts per token."""
    facts, values = draft.facts, draft.values
    draft.default("model.moe.num_experts_per_token", 2)  # arguments.py: moe_router_topk
    if "model.intermediate_size" in values:
        draft.default("model.moe.expert_intermediate_size", values["model.intermediate_size"])
    every, layers = facts.get("expert_layers", 1), values.get("model.num_layers", 0)
    pattern = _pattern_layers(every)
    if pattern and len(pattern) == layers:
        dense = [layer for layer, experts in enumerate(pattern) if not experts]
        if dense:
            values["model.moe.dense_layers"] = dense
    elif _counts(every, layers):
        dense = [layer for layer in range(layers) if layer % every]  # gpt_layer_specs.py: the first one has experts
        if dense:
            values["model.moe.dense_layers"] = dense
    elif type(every) is not int:
        draft.notes.append(
            "moe-layer-freq has an unsupported pattern: all layers are counted with experts; set the number of dense "
            "first layers with --set model.moe.first_dense_layers="
        )
    if facts.get("dispatcher", "alltoall") not in ("alltoall", "alltoall_seq", "flex"):
        draft.limit(f"the dispatcher {facts['dispatcher']}", "all-to-all is counted", holds_memory=True)
    # NeMo's names have underscores, after the name of a block.
    arguments = {path.rpartition(".")[2].replace("_", "-"): value for path, value in draft.given_fields.items()}
    padded = arguments.get("moe-pad-expert-input-to-capacity") is True
    if padded and _is_above_one(arguments.get("moe-expert-capacity-factor")):
        draft.limit("expert inputs padded to a capacity", "balanced ones are counted", holds_memory=True)


def _pattern_layers(pattern: Any) -> list[int]:
    """Return 1 for each layer with experts, else 0, from `([0]*3+[1]*58)`; empty for other patterns."""
    text = str(pattern).strip().removeprefix("(").removesuffix(")")
    found: list[int] = []
    for term in text.split("+"):
        match = _PATTERN.fullmatch(term.strip())
        if match is None or len(found) > _MOST:
            return []
        found += [int(digit) for digit in re.findall(r"[01]", match[1])] * int(match[2] or 1)
    return found


def place_recompute(draft: Draft) -> None:
    """Set the recomputed layers from granularity, method and number of layers."""
    facts, values = draft.facts, draft.values
    modules = facts.get("modules")
    if "activations-checkpoint-method" in draft.given_fields:
        draft.default("training.recompute", "full")
    if modules and values.get("training.recompute") == "selective":
        values["training.recompute_modules"] = modules if isinstance(modules, list) else [modules]
    if facts.get("together", 1) not in (0, 1) and values.get("training.recompute") == "full":
        draft.limit(*SEGMENTS, holds_memory=True)
    layers, of = facts.get("recomputed", 1), values.get("model.num_layers")
    parts = [values.get(f"parallelism.{name}", 1) for name in ("pipeline_parallel", "virtual_stages")]
    if values.get("training.recompute") == "full" and facts.get("method") == "block":
        if _counts(layers, of, *parts) and of % (chunks := parts[0] * parts[1]) == 0:
            size = of // chunks  # the first layers of every chunk: transformer_block.py
            values["training.recompute"] = [
                chunk * size + layer for chunk in range(chunks) for layer in range(min(layers, size))
            ]
        else:
            what, why = "recomputation of some layers in blocks", "all are counted as recomputed"
            draft.limit(what, why, holds_memory=True)
    elif facts.get("method") == "uniform" and type(layers) is int and layers > 1:
        # Fewer inputs stay allocated, but all activations of a group are live during its backward.
        draft.limit(*SEGMENTS, holds_memory=True)


def place_ranks(draft: Draft) -> None:
    """Set replicas, their batch, context parallelism and pipeline chunks.

    Raises:
        InputError: the launched GPUs are not a multiple of those of one copy of the model.
    """
    facts, values = draft.facts, draft.values
    kinds = ("tensor", "pipeline", "context")
    size = 1
    for kind in kinds:
        degree = draft.given(f"parallelism.{kind}_parallel")
        size *= degree if _counts(degree) else 1
    per_node, nodes = facts.get("per_node"), facts.get("nodes", None if "nnodes" in draft.given_fields else 1)
    if type(per_node) is int and type(nodes) is int:
        world = per_node * nodes
        if world % size == 0:
            draft.default("parallelism.data_parallel", world // size)
        elif draft.given("parallelism.data_parallel") is None:
            raise InputError(
                f"GPUs launched: {world}, which is not a multiple of tensor x pipeline x context parallel = {size}.",
                f"Launch a multiple of {size} GPUs, or add --set data_parallel=N.",
            )
    total = facts.get("global")
    micro, replicas = values.get("training.micro_batch_size", 1), values.get("parallelism.data_parallel")
    # If the number of replicas is unknown, one replica runs all micro-batches: the most are in flight.
    if type(total) is int and (replicas is not None or (type(micro) is int and micro > 0 and total % micro == 0)):
        values["training.global_batch_size"] = total
    if facts.get("context_method") and values.get("parallelism.context_parallel", 1) != 1:
        method = _CONTEXT_METHODS.get(str(facts["context_method"]))
        if method is None:
            draft.limit(f"cp-comm-type {facts['context_method']}", "a ring is counted", holds_memory=True)
        else:
            draft.default("parallelism.context_parallel_method", method)
    chunk, layers = facts.get("chunk"), values.get("model.num_layers")
    stages = values.get("parallelism.pipeline_parallel", 1)
    if type(facts.get("virtual")) is int and facts["virtual"] > 1:
        values["parallelism.virtual_stages"] = facts["virtual"]
        values["parallelism.schedule"] = "interleaved"
    elif _counts(chunk, layers, stages) and layers % (stages * chunk) == 0 and layers > stages * chunk:
        values["parallelism.virtual_stages"] = layers // stages // chunk
        values["parallelism.schedule"] = "interleaved"


def place_attention(draft: Draft) -> None:
    """Set unfused attention if the file sets it, or in fp32, which no fused kernel supports.

    gpt_layer_specs.py: the local implementation has no other; Transformer Engine's unfused one saves the same tensors.
    """
    facts, fields, values = draft.facts, draft.given_fields, draft.values
    kernel = str(facts.get("attention", "auto")).rpartition(".")[2]
    local = facts.get("transformer_impl") == "local"
    if not (local or kernel in ("unfused", "local") or draft.given("training.dtype") == "fp32"):
        return
    split = values.get("parallelism.context_parallel", 1) != 1
    if "model.moe.num_experts" in values or facts.get("latent") is True or split:
        what = "unfused attention"
        draft.limit(what, "it materializes the attention matrix; one fused kernel is counted", holds_memory=True)
        if draft.given("training.dtype") == "fp32" and "training.dtype" not in draft.overridden:
            values["training.dtype"] = "bf16"
            draft.limit("Megatron-LM in fp32", "assuming bf16", holds_memory=True)
        return
    draft.default("training.attention", "eager")
    if local and fields.get("no-gradient-accumulation-fusion") is True:
        # optimizer/__init__.py: without Transformer Engine and Apex, which have the fused kernel, Adam is PyTorch's
        draft.default("training.optimizer_implementation", "foreach")
    wide = any(fields.get(name) is True for name in ("attention-softmax-in-fp32", "apply-query-key-layer-scaling"))
    if wide and fields.get("no-masked-softmax-fusion") is True and draft.given("training.dtype") != "fp32":
        draft.limit("the softmax of attention in fp32", "it is counted in the step's dtype", holds_memory=True)


def _is_above_one(value: Any) -> bool:
    try:
        return float(value) > 1
    except (TypeError, ValueError):
        return False
