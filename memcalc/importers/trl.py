"""What TRL adds to TrainingArguments: its trainers' and its scripts' fields, and its own defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memcalc.importers.offload import ACTIVATIONS
from memcalc.importers.switches import is_on
from memcalc.importers.table import Draft, Meaning, fact, lacking, nothing, overcounted, to, told

_CHUNK = 256  # tokens whose logits are alive at once: trl/trainer/sft_trainer.py, _CHUNKED_LM_HEAD_CHUNK_SIZE

_COMPLETIONS = "prompts, groups of completions, the engine that makes them"
_REINFORCEMENT = told(f"reinforcement learning: {_COMPLETIONS}")
_PREFERENCE = told("the second model and the pairs of preference training")

# TRL 1.9, trl/trainer/{sft,dpo,grpo,model}_config.py, trl/scripts/utils.py; and what 0.24 called otherwise.
FIELDS: dict[str, Meaning] = {
    "max_seq_length": to("training.sequence_length"),  # until 0.20
    "max_length": to("training.sequence_length"),
    "use_peft": fact("peft", "training.finetune"),
    "load_in_4bit": fact("four_bits", "training.finetune"),
    "load_in_8bit": overcounted("a base in 8 bits"),
    "bnb_4bit_quant_type": to("training.qlora.quantization", {"nf4": "nf4", "fp4": "fp4"}),
    "use_bnb_nested_quant": to("training.qlora.double_quantization"),
    "bnb_4bit_quant_storage": nothing("the same bytes under another type"),
    "lora_r": to("training.lora.rank"),
    "lora_alpha": to("training.lora.alpha"),
    "lora_dropout": to("training.lora.dropout"),
    "lora_target_modules": fact("targets", "training.lora.target_modules"),
    "lora_modules_to_save": to("training.lora.modules_to_save"),
    "lora_target_parameters": lacking("adapters beside stacked experts"),
    "lora_task_type": nothing(),
    "use_rslora": nothing("how adapters are scaled"),
    "use_dora": lacking("DoRA"),
    "loss_type": fact("loss_type", "training.loss"),
    "activation_offloading": ACTIVATIONS,
    "model_init_kwargs": lacking("changes of how the model is loaded"),
    "router_aux_loss_coef": nothing(),
    "packing": nothing("sequences are counted as full"),
    "packing_strategy": nothing("sequences are counted as full"),
    "padding_free": nothing("sequences are counted as full"),
    "pad_to_multiple_of": nothing("sequences are counted as full"),
    "truncation_mode": nothing("data"),
    "shuffle_dataset": nothing("data"),
    "chat_template*": nothing("data"),
    "eos_token": nothing("data"),
    "pad_token": nothing("data"),
    "assistant_only_loss": nothing("the loss is computed of all tokens"),
    "completion_only_loss": nothing("the loss is computed of all tokens"),
    "ignore_bias_buffers": nothing("how DDP works"),
    "system_prompt": nothing("data"),
    "callbacks": nothing("logging"),
    "benchmarks": nothing("evaluation is not sized"),
    "wandb_*": nothing("logging"),
    "max_prompt_length": fact("prompt_length", "training.sequence_length"),
    "max_completion_length": fact("completion_length", "training.sequence_length"),
    **dict.fromkeys(
        ("beta", "precompute_ref_*", "sync_ref_model", "ref_model_*", "f_divergence_type", "f_alpha_*", "loss_weights"),
        _PREFERENCE,
    ),
    **{
        name: nothing("part of preference training")
        for name in ("ld_alpha", "use_weighting", "discopop_tau", "label_smoothing", "disable_dropout")
    },
    **dict.fromkeys(
        ("num_generations*", "reward_funcs", "use_vllm", "vllm_*", "generation_batch_size"),
        _REINFORCEMENT,
    ),
    **{
        name: nothing("part of reinforcement learning")
        for name in (
            *("reward_weights", "scale_rewards", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
            *("generation_kwargs", "cache_implementation", "steps_per_generation", "num_iterations", "epsilon*"),
            *("delta",),
            *("mask_truncated_completions", "importance_sampling_level", "top_entropy_quantile", "entropy_*"),
            *("use_adaptive_entropy", "sapo_*", "vespo_*", "multi_objective_aggregation", "num_completions_to_print"),
            *("max_tool_calling_iterations", "off_policy_mask_threshold", "use_bias_correction_kl", "code_*"),
            *("ds3_gather_for_generation", "use_transformers_*", "transformers_continuous_*", "parallel_code_*"),
        )
    },
    "cast_lm_head_to_fp32": lacking("a head in fp32"),
    # Of reward models, KTO, PPO and GKD: trl/trainer/{reward,kto}_config.py, trl/experimental/{ppo,gkd}.
    "center_rewards_coefficient": lacking("pairs of sequences", "those of a reward model are twice the micro-batch"),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), _PREFERENCE),
    **dict.fromkeys(("reward_model_path", "sft_model_path"), lacking("reinforcement learning", _COMPLETIONS)),
    "teacher_model_*": lacking("a teacher model"),
}

# Fields that TrainingArguments do not have: a file with one of them is for TRL's scripts.
_ITS_OWN = frozenset(
    (
        *("max_seq_length", "max_length", "use_peft", "packing", "loss_type", "completion_only_loss"),
        *("assistant_only_loss", "padding_free", "chat_template_path", "beta", "num_generations", "reward_funcs"),
        *("max_completion_length", "lora_r", "dataset_name", "dataset_num_proc", "attn_implementation"),
    )
)


def is_trls(draft: Draft) -> bool:
    """Whether a file is for TRL's scripts."""
    return bool(_ITS_OWN & draft.paths)


def finish_trl(draft: Draft) -> None:
    """TRL's own defaults, where a file is for it: trl/trainer/base_config.py."""
    facts = draft.facts
    loss = facts.get("loss_type")
    if loss == "chunked_nll":
        draft.default("training.loss", "chunked")
        batch, length = (draft.values.get(f"training.{name}") for name in ("micro_batch_size", "sequence_length"))
        if isinstance(batch, int) and isinstance(length, int):
            draft.default("training.loss_chunks", min(max(-(-batch * length // _CHUNK), 1), 1024))
    if not is_trls(draft):
        return
    if is_on(facts.get("peft")):
        _finish_adapters(draft)
    if "bf16" not in facts and facts.get("fp16") not in (True, "true"):
        facts["bf16"] = True
        draft.notes.append("TRL computes in bf16 by default (since 0.22); --set dtype= for another")
    if "training.recompute" not in draft.values and "gradient_checkpointing" not in draft.paths:
        draft.default("training.recompute", "full")
        draft.notes.append("TRL checkpoints every layer by default (since 0.22); --set recompute=none otherwise")
    if _REINFORCED & draft.paths:
        lengths = [facts.get("prompt_length"), facts.get("completion_length")]
        if all(type(length) is int for length in lengths):  # both are in one forward
            draft.default("training.sequence_length", sum(lengths))
    else:
        draft.default("training.sequence_length", 1024)
    if loss is None and not _PREFERRED & draft.paths:
        draft.notes.append(
            "the logits are counted whole; TRL's SFT computes the loss in chunks since 1.7: --set loss=chunked"
        )


def tell_second_models(draft: Draft) -> None:
    """Record what preference training and reinforcement learning hold beside the policy.

    trl/trainer/{dpo,kto}_trainer.py: the reference is the policy once more, loaded in the same way, unless there are
    adapters, which are switched off for it, or its log-probabilities are computed beforehand. grpo_trainer.py: it
    exists where beta is not 0. Chosen and rejected sequences are in one forward.
    """
    said, full = draft.said, draft.values.get("training.finetune", "full") == "full"
    if _asks(said, (*_REINFORCED, *_ENGINE)):
        draft.limit("reinforcement learning", _COMPLETIONS, holds_memory=True)
        if said.get("use_vllm") is True and said.get("vllm_mode", "colocate") != "server":  # grpo_config.py
            draft.limit("vLLM on the GPUs that train", holds_memory=True)
        refers = said.get("beta", 0) not in (0, 0.0)
    elif _asks(said, _PREFERENCES) or _named_losses(said) & _PREFERENCE_LOSSES:
        draft.limit("pairs of sequences", "chosen and rejected are twice the micro-batch", holds_memory=True)
        without = {"simpo", "orpo", "cpo"} & _named_losses(said) or is_on(said.get("precompute_ref_log_probs"))
        refers = not without
    else:
        return
    if refers and full:
        its_own = _asks(said, ("model_init_kwargs", "ref_model_"))
        width = 0 if its_own else 4  # as the policy's, which limits_of knows; with words of its own in any dtype
        draft.limit("the reference model", "a frozen copy", holds_memory=True, bytes_per_parameter=width)


def _asks(said: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a field that begins with one of these names is there and not switched off."""
    return any(path.startswith(tuple(names)) and value not in (False, "false", 0) for path, value in said.items())


def _named_losses(said: Mapping[str, Any]) -> set[str]:
    """`loss_type`, which may be one or a list."""
    named = said.get("loss_type", ())
    return {str(name) for name in (named if isinstance(named, list) else [named])}


def _finish_adapters(draft: Draft) -> None:
    """trl/trainer/model_config.py; above a base in 4 bits trl/trainer/sft_trainer.py makes adapters bf16."""
    for name, value in (("rank", 16), ("alpha", 32), ("dropout", 0.05)):
        draft.default(f"training.lora.{name}", value)
    draft.facts["pefts_layers"] = True
    if is_on(draft.facts.get("four_bits")):
        draft.default("training.qlora.double_quantization", False)
        draft.default("training.lora.adapter_dtype", "compute")


_REINFORCED = frozenset(("num_generations", "reward_funcs", "max_completion_length"))
_PREFERRED = _REINFORCED | {"beta", "use_liger_kernel"}
_ENGINE = ("use_vllm", "generation_batch_size")
_PREFERENCES = (
    "beta",
    "precompute_ref_",
    "sync_ref_model",
    "ref_model_",
    "f_divergence_type",
    "f_alpha_",
    "loss_weights",
    "desirable_weight",
    "undesirable_weight",
)
_PREFERENCE_LOSSES = frozenset(  # dpo_config.py, kto_config.py, and experimental/cpo
    (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair"),
        *("aot_unpaired", "discopop", "apo_zero", "apo_down", "sigmoid_norm", "kto", "apo_zero_unpaired", "bco"),
        *("simpo", "alphapo"),
    )
)
