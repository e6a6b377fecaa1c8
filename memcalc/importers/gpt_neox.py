"""GPT-NeoX's YAML: DeepSpeed's fields and a model's, with underscores or hyphens in their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.importers import deepspeed
from memcalc.importers.file_format import (
    BATCH,
    REPLICAS,
    FileFormat,
    Meaning,
    fact,
    lacking,
    nothing,
    overcounted,
    place_dropout,
    to,
)
from memcalc.importers.vocabulary import entries_of, place_vocabulary

_NEOX, _NEOX_ENTRIES = "20B_tokenizer", 50_277  # of GPT-NeoX-20B and Pythia
# SiLU saves its input, as GELU does.
_ACTIVATIONS = {"gelu": "gelu", "silu": "gelu", "relu": "relu", "geglu": "geglu", "swiglu": "swiglu"}
_NORMS = {
    "layernorm": "layernorm",
    "te_layernorm": "layernorm",
    "rmsnorm": "rmsnorm",
    "te_rmsnorm": "rmsnorm",
}
_POSITIONS = {"learned": "learned", "rotary": "rope", "alibi": "alibi", "none": "none", "sinusoidal": "none"}
_PRECISIONS = {"fp16": "fp16", "bfloat16": "bf16", "fp32": None}

# EleutherAI/gpt-neox at ea7aefd (May 2026), megatron/neox_arguments: neox_args.py, deepspeed_args.py.
_FIELDS: dict[str, Meaning] = {
    "num_layers": to("model.num_layers"),
    "hidden_size": to("model.hidden_size"),
    "intermediate_size": fact("inner", "model.intermediate_size"),
    "expansion_factor": fact("expansion", "model.intermediate_size"),
    "mlp_multiple_of": fact("multiple", "model.intermediate_size"),
    "num_attention_heads": to("model.num_attention_heads"),
    "num_kv_heads": to("model.num_key_value_heads"),
    "max_position_embeddings": to("model.max_position_embeddings"),
    "padded_vocab_size": to("model.vocab_size"),
    "make_vocab_size_divisible_by": fact("divisible", "model.vocab_size"),
    "tokenizer_type": fact("tokenizer", "rows of the vocabulary"),
    "vocab_file": fact("vocabulary", "rows of the vocabulary"),
    "pos_emb": to("model.position_embedding", _POSITIONS),
    "rotary_pct": fact("rotated", "model.rotary_dim"),
    "rotary*": nothing("no effect on memory"),
    "norm": to("model.normalization", _NORMS),
    "activation": to("model.mlp", _ACTIVATIONS),
    "no_weight_tying": fact("untied", "model.tie_word_embeddings"),
    "gpt_j_residual": to("model.parallel_block"),
    "gpt_j_tied": overcounted("activations", "one norm before attention and MLP"),
    "use_bias_in_norms": to("model.norm_bias"),
    "use_bias_in_attn_linear": fact("attention_bias", "model.qkv_bias, model.output_bias"),
    "use_bias_in_mlp": to("model.mlp_bias"),
    "use_qk_layernorm": to("model.qk_norm"),
    "attention_config": fact("attention", "training.attention"),
    "sparsity_config*": lacking("sparse attention", overcounts="activations"),
    "sliding_window_width": nothing("saved activations do not depend on it"),
    "moe_num_experts": lacking("experts of GPT-NeoX"),
    "moe*": nothing("part of the experts"),
    "te_*": lacking("Transformer Engine's modules"),
    "gmlp_attn_dim": lacking("gMLP"),
    "mamba*": lacking("Mamba's layers"),
    "seq_length": to("training.sequence_length"),
    "hidden_dropout": fact("hidden_dropout", "training.dropout"),
    "attention_dropout": fact("attention_dropout", "training.dropout"),
    "precision": fact("precision", "training.dtype: precision of the step", reads_auto=True),
    "data_types*": nothing("changes the implementation only"),
    # megatron/model/utils.py, reduce_weight_grads_from_model_parallel_region
    "fp32_allreduce": nothing("casts the gradients of norms alone"),
    "checkpoint_activations": to("training.recompute", {True: "full", False: "none"}),
    "checkpoint_num_layers": fact("together", "training.recompute"),
    "partition_activations": overcounted("activations", "checkpoints that are split over tensor-parallel ranks"),
    "checkpoint_in_cpu": overcounted("activations", "checkpoints offloaded to the CPU"),
    "pipe_parallel_size": fact("stages", "parallelism.pipeline_parallel"),
    "pipe_partition_method": fact("split", "parallelism.pipeline_split"),
    "model_parallel_size": to("parallelism.tensor_parallel"),
    "sequence_parallel": to("parallelism.sequence_parallel"),
    "global_num_gpus": fact("gpus", "parallelism.data_parallel"),
    "use_bnb_optimizer": overcounted("states", "optimizers of bitsandbytes"),
    **{
        f"{stem}*": nothing("no effect on memory")
        for stem in (
            *(
                "scaled_",
                "bias_gelu_fusion",
                "bias_dropout_fusion",
                "rope_fusion",
                "layernorm_fusion",
                "rmsnorm_fusion",
            ),
            *("layernorm_epsilon", "rms_norm_epsilon", "output_layer", "init_method", "use_flashattn_swiglu", "mup_"),
            *("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "contiguous_checkpointing", "clip_grad"),
            *("synchronize_each_layer", "lr", "min_lr", "decay_lr_to", "warmup", "weight_decay", "override_lr"),
            *("train_iters", "train_epochs", "eval_", "do_", "checkpoint_", "extra_save_iters", "keep_last", "save"),
            *("load", "iteration", "finetune", "data_", "train_data", "valid_data", "test_data", "split", "vocab_file"),
            *("merge_file", "tokenizer_type", "num_workers", "log_", "tensorboard", "use_wandb", "wandb", "use_comet"),
            *("comet", "distributed_backend", "launcher", "hostfile", "deepspeed_", "seed", "profile", "prof"),
            *("memory_profiling", "hysteresis", "loss_scale", "initial_scale_power", "min_scale"),
            *("git_hash", "comment", "user_script", "short_seq_prob", "eod_mask_loss", "verbose", "weight_by_num"),
        )
    },
    **{
        f"{stem}*": nothing("generation is not estimated")
        for stem in (
            "text_gen",
            "temperature",
            "top_",
            "maximum_tokens",
            "sample_",
            "num_samples",
            "prompt_",
            "recompute",
        )
    },
}


def _spelled(fields: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """Return the table with each name also spelled with hyphens in its first word, as in files."""
    found = dict(fields)
    for name, meaning in fields.items():
        first, dot, rest = name.partition(".")
        found.setdefault(first.replace("_", "-") + dot + rest, meaning)
    return found


FIELDS = _spelled({**deepspeed.FIELDS, **_FIELDS})


def _finish(draft: Draft) -> None:
    facts, values = draft.facts, draft.values
    draft.default("training.implementation", "plain")
    _precision(draft)
    draft.default("model.position_embedding", "learned")
    draft.default("model.normalization", "layernorm")
    values["model.tie_word_embeddings"] = facts.get("untied") is not True
    for name in ("qkv_bias", "output_bias"):
        values[f"model.{name}"] = facts.get("attention_bias") is not False
    draft.default("model.mlp_bias", True)
    _pipeline(draft)
    place_dropout(draft, 0)
    _attention(draft)
    _inner_size(draft)
    _rotated(draft)
    if facts.get("together", 1) not in (0, 1) and values.get("training.recompute") == "full":
        draft.limit(
            "several layers in one checkpoint segment", "each layer is counted as one segment", holds_memory=True
        )
    _replicas(draft)
    owns = str(facts.get("vocabulary", "")).endswith(f"{_NEOX}.json")
    name = _NEOX if owns else str(facts.get("tokenizer"))
    entries = _NEOX_ENTRIES if name == _NEOX else entries_of(name)
    if "model.vocab_size" not in values and entries is not None:
        place_vocabulary(draft, entries, f"that of {name}")
    draft.default("training.optimizer", "adam")
    # megatron/model/utils.py, get_params_for_weight_decay_optimization
    draft.default("parallelism.zero_optimization.separate_no_decay", True)
    draft.facts["pipelined"] = facts.get("stages", 1) != 0
    deepspeed.finish_deepspeed(draft)


def _precision(draft: Draft) -> None:
    said = draft.facts.get("precision")
    if said is not None:
        draft.translate("training.dtype", said, _PRECISIONS)
        draft.facts[str(draft.values.get("training.dtype", ""))] = True


def _pipeline(draft: Draft) -> None:
    """Set the stages, and what DeepSpeed's pipeline engine keeps; it does not run with pipe_parallel_size: 0.

    megatron/model/gpt2_model.py: modules pass the mask on. megatron/training.py: forward_step returns the loss alone.
    """
    stages, split = draft.facts.get("stages", 1), str(draft.facts.get("split", "type:transformer|mlp"))
    draft.default("parallelism.pipeline_parallel", stages or 1)
    draft.default("parallelism.pipeline_tensors", "with-shared-mask" if stages else "none")
    draft.default("training.logits_until", "backward" if stages else "loss")
    if draft.values.get("parallelism.tensor_parallel", 1) != 1:
        draft.default("training.loss", "vocab-parallel")
    if not split.startswith("type:transformer"):
        what = f"the pipeline split {split}"
        draft.limit(what, "stages with equally many layers are counted", holds_memory=stages not in (0, 1))


def _attention(draft: Draft) -> None:
    """Set the attention type from [[["flash"], 24]]: types, each with a number of layers."""
    kinds = {str(kind) for entry in _listed(draft.facts.get("attention")) for kind in _listed(_listed(entry)[:1])}
    kinds = {name for kind in kinds for name in kind.strip("[]'\"").split("', '")}
    if not kinds or kinds == {"global"}:
        draft.default("training.attention", "eager")
    elif kinds == {"flash"}:
        draft.default("training.attention", "flash")
    else:
        draft.default("training.attention", "flash" if "flash" in kinds else "eager")
        draft.limit(f"other attention types ({', '.join(sorted(kinds))})", holds_memory=True)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _inner_size(draft: Draft) -> None:
    """Set the MLP size: two thirds if gated, rounded up (megatron/model/transformer.py, ParallelMLP)."""
    facts, values = draft.facts, draft.values
    hidden, multiple = values.get("model.hidden_size"), facts.get("multiple", 1)
    if type(hidden) is not int or type(multiple) is not int or multiple < 1:
        return
    expansion = facts.get("expansion", 4)
    inner = facts.get("inner") or (int(expansion * hidden) if isinstance(expansion, int | float) else None)
    if type(inner) is not int:
        return
    configured = inner
    if str(values.get("model.mlp", "gelu")).endswith("glu"):
        inner = int(inner * 2 / 3) // 2
    values["model.intermediate_size"] = size = -(-inner // multiple) * multiple
    if size != configured and not {"inner", "expansion"} & facts.keys():
        draft.notes.append(
            f"GPT-NeoX gives a gated MLP without intermediate_size {size:,} features, and until September 2024 (#1212) "
            f"gave Llama's {-(-(8 * hidden // 3) // multiple) * multiple:,}: --set intermediate_size= sets it"
        )
    elif size != configured:
        draft.notes.append(f"intermediate_size {configured:,} resolves to {size:,} in GPT-NeoX")


def _rotated(draft: Draft) -> None:
    share, values = draft.facts.get("rotated"), draft.values
    hidden, heads = values.get("model.hidden_size"), values.get("model.num_attention_heads")
    if values.get("model.position_embedding") != "rope" or not isinstance(share, float) or not 0 < share < 1:
        return
    if type(hidden) is int and type(heads) is int and heads > 0:
        values["model.rotary_dim"] = int(hidden // heads * share)


def _replicas(draft: Draft) -> None:
    gpus, values = draft.facts.get("gpus"), draft.values
    copies = [values.get(f"parallelism.{kind}_parallel", 1) for kind in ("tensor", "pipeline")]
    if type(gpus) is int and all(type(size) is int and size > 0 for size in copies):
        one = copies[0] * copies[1]
        if gpus % one == 0:
            draft.default("parallelism.data_parallel", gpus // one)
        else:
            draft.notes.append(f"{gpus} GPUs are launched, but one copy of the model needs {one}")


def _recognized(data: Mapping[str, Any]) -> bool:
    names = {key.replace("-", "_") for key in data if isinstance(key, str)}
    return {"num_layers", "hidden_size", "pipe_parallel_size"} <= names


GPT_NEOX = FileFormat(
    "GPT-NeoX", "main, May 2026", FIELDS, _finish, _recognized, (REPLICAS, BATCH), framework="gpt-neox"
)
