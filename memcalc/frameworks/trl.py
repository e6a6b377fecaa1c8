"""TRL's trainers: their defaults, which override Trainer's, and their memory in addition to the policy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from memcalc.frameworks.deepspeed import runs_deepspeed
from memcalc.frameworks.draft import FRAMEWORK, Draft, is_on
from memcalc.spec.programs import number

CHUNK = 256  # tokens with live logits at a time: trl/trainer/sft_trainer.py, _CHUNKED_LM_HEAD_CHUNK_SIZE
MOST_CHUNKS = 1024  # the most that `training.loss_chunks` accepts

COMPLETION = 256  # tokens: trl/trainer/grpo_config.py, max_completion_length
COMPLETIONS = "prompts, groups of completions, the engine that generates them"

# Fields of TRL only, and fields that scripts around Trainer also have: a file with only the latter may belong to
# either.
_ITS_OWN = frozenset(
    (
        *("packing", "loss_type", "completion_only_loss", "assistant_only_loss", "padding_free", "chat_template_path"),
        *("max_completion_length", "beta", "num_generations", "reward_funcs", "model_init_kwargs"),
    )
)
_SHARED = frozenset(
    (
        *("max_seq_length", "max_length", "lora_r", "dataset_name", "dataset_num_proc", "attn_implementation"),
        *("activation_offloading", "eos_token", "pad_token", "load_in_4bit", "use_peft"),
    )
)

# TRL 1.16, trl/trainer/{sft,dpo,reward}_config.py: the trainers that accept a field, where not all do. TRL's programs
# reject other fields.
_TRAINERS = ("sft", "dpo", "reward")
_ACCEPTED_BY = {
    **dict.fromkeys(
        (
            *("packing", "packing_strategy", "eval_packing", "completion_only_loss", "assistant_only_loss"),
            *("dataset_text_field", "dataset_kwargs", "shuffle_dataset", "max_seq_length"),
            "loss_type",  # other trainers' losses name their trainer (_trainer_of)
        ),
        ("sft",),
    ),
    **dict.fromkeys(("chat_template_path", "eos_token"), ("sft", "reward")),
    **dict.fromkeys(("padding_free", "truncation_mode"), ("sft", "dpo")),
    "disable_dropout": ("dpo", "reward"),
    **dict.fromkeys(("max_prompt_length", "ld_alpha", "use_weighting", "discopop_tau", "label_smoothing"), ("dpo",)),
    **dict.fromkeys(("block_size", "model_max_length"), ()),  # of scripts around Trainer
}


def program_of(draft: Draft) -> str:
    """Return the program that runs TrainingArguments: Trainer, or one of TRL's trainers."""
    named, by_script = _trainer_of(draft), _trainer_of_script(draft)
    if by_script not in ("", "sft", named):
        candidates: tuple[str, ...] = ("trainer", by_script)
    else:
        candidates = (named,) if named else _possible(draft, ("sft",) if by_script == "sft" else _TRAINERS)
    if len(candidates) == 1:
        return str(draft.given(FRAMEWORK) or candidates[0])
    return draft.choose(FRAMEWORK, "the program that runs the file", candidates)


def _possible(draft: Draft, trainers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the programs that may run a file without a field of one TRL trainer alone.

    These are Trainer, unless a field is TRL's only, and each of TRL's `trainers` that accepts all fields.
    """
    fields = draft.given_fields.keys()
    if not fields & (_ITS_OWN | _SHARED):
        return ("trainer",)
    accept = [_ACCEPTED_BY[name] for name in fields & _ACCEPTED_BY.keys()]
    trainers = tuple(name for name in trainers if all(name in names for names in accept))
    if "dpo" in trainers:  # computes pairs, too, and in addition a reference and logits
        trainers = tuple(name for name in trainers if name != "reward")
    return trainers if trainers and fields & _ITS_OWN else ("trainer", *trainers)


def _trainer_of(draft: Draft) -> str:
    """Return the TRL trainer that alone has one of these fields; "" if none has."""
    fields = draft.given_fields
    if _asks(fields, (*_REINFORCED, *_ENGINE)):
        return "grpo"
    if _asks(fields, ("desirable_weight", "undesirable_weight")) or "kto" in _named_losses(fields):
        return "kto"
    if _asks(fields, ("center_rewards_coefficient",)) or str(fields.get("lora_task_type")).upper() == "SEQ_CLS":
        return "reward"
    if _asks(fields, _PREFERENCES) or _named_losses(fields) & _PREFERENCE_LOSSES:
        return "dpo"
    return ""


def _trainer_of_script(draft: Draft) -> str:
    """Return the trainer that the name of a script suggests, such as dpo for train_dpo.py; "" if none."""
    program = str(draft.facts.get("program", "")).lower()
    found = _NAMED.search(program)
    if found is None:
        return "sft" if _SUPERVISED.search(program) else ""
    return _NAMES.get(found[1], found[1])


def place_trl(draft: Draft, program: str) -> None:
    """Set TRL's defaults, which override TrainingArguments' (trl/trainer/base_config.py, {sft,dpo}_config.py)."""
    facts = draft.facts
    if is_on(facts.get("peft")):
        _place_adapters(draft)
    if "bf16" not in facts and facts.get("fp16") not in (True, "true"):
        facts["bf16"] = True
        draft.notes.append("TRL computes in bf16 by default (since 0.22); change it with --set dtype=")
    if "training.recompute" not in draft.values and "gradient_checkpointing" not in draft.given_fields:
        draft.default("training.recompute", "full")
        draft.notes.append("TRL checkpoints every layer by default (since 0.22); change it with --set recompute=")
    if program == "grpo":
        _place_grpo(draft)
        lengths = [facts.get("prompt_length"), facts.get("completion_length")]
        if all(type(length) is int for length in lengths):  # both are in one forward
            draft.default("training.sequence_length", sum(lengths))
    else:
        draft.default("training.sequence_length", 1024)
    if program == "sft":
        _place_sfts_loss(draft)
    elif program == "dpo":
        _place_dpo(draft)
    elif program == "reward":
        _place_reward(draft)
    if program in ("dpo", "reward") and draft.given_fields.get("disable_dropout") not in (False, "false"):
        draft.values["training.dropout"] = 0.0  # {dpo,reward}_config.py: disable_dropout
        if is_on(facts.get("peft")):
            draft.values["training.lora.dropout"] = 0.0


def _place_dpo(draft: Draft) -> None:
    """Set DPOTrainer's fields: both sequences of a pair are in one forward; since 1.15 the LM head runs in tiles.

    In 1.14 a kernel reads all logits, of which loss sft makes a cross-entropy besides; before, PyTorch's operators did.

    trl/trainer/dpo_trainer.py: the reference is a second copy of the policy, unless adapters are disabled to get it, or
    its log-probabilities are precomputed.
    """
    fields = draft.given_fields
    if draft.has("trl", "1.15"):
        draft.default("training.loss", "tiled")
    elif draft.has("trl", "1.14") and "sft" not in _named_losses(fields):
        draft.default("training.loss", "selective")
    else:
        draft.limit(
            "log-probabilities of pairs",
            "the loss of SFT over all logits is counted",
            holds_memory=False,
            overcounts="activations",
        )
    draft.default("training.pairs", True)
    own = _asks(fields, ("ref_model_", "model_init_kwargs"))
    beforehand = is_on(fields.get("precompute_ref_log_probs"))
    if not (own or beforehand or is_on(draft.facts.get("peft"))):
        draft.default("training.reference_model", True)


def _place_grpo(draft: Draft) -> None:
    """Set GRPOTrainer's fields: the model generates completions, scores them without gradients, and trains on them.

    trl/trainer/grpo_trainer.py: if beta is not 0, the reference is a second copy of the policy, unless adapters are
    disabled to get it. Its log-probabilities and those of the old policy are computed in forwards without gradients, of
    one micro-batch each, which need no more memory than training.
    """
    fields, facts = draft.given_fields, draft.facts
    if draft.has("trl", "1.15"):
        draft.default("training.loss", "tiled")
    else:
        draft.limit(
            "log-probabilities of completions",
            "the loss of SFT over all logits is counted",
            holds_memory=False,
            overcounts="activations",
        )
    rewards = fields.get("reward_funcs")
    if any("/" in str(name) for name in (rewards if isinstance(rewards, list) else [rewards])):
        draft.limit("a reward model", holds_memory=True)  # grpo_trainer.py: text that names no function names a model
    beta = fields.get("beta", 0)
    if beta not in (0, 0.0) and not (is_on(facts.get("peft")) or "model_init_kwargs" in fields):
        draft.default("training.reference_model", True)


def place_completions(draft: Draft) -> None:
    """Set the completions that GRPOTrainer generates, once it is known what shards the weights.

    DeepSpeed's stages 1 and 2 leave them whole.
    """
    fields, facts = draft.given_fields, draft.facts
    if is_on(fields.get("use_vllm")):
        return
    whole = (None, 0, 1, 2) if draft.given("parallelism.engine") == "deepspeed" else (None, 0)
    sharded = draft.given("parallelism.zero_stage") not in whole
    batches, every = _batches_of_generation(draft), fields.get("num_iterations", 1)
    accumulated = fields.get("gradient_accumulation_steps", 1)
    known = all(type(each) is int and each > 0 for each in (batches, every, accumulated))
    if sharded or (known and batches * every % accumulated):
        what = "generation with sharded weights" if sharded else "generation between micro-batches"
        draft.limit(what, "it is not counted", holds_memory=True)
        return
    length = facts.get("completion_length", COMPLETION)
    if type(length) is int and length > 0:
        draft.default("training.completion_length", length)
        if known and batches != accumulated:
            draft.default("training.steps_per_generation", batches)


def _batches_of_generation(draft: Draft) -> Any:
    """Return the number of micro-batches per generation of completions (trl/trainer/grpo_config.py, __post_init__)."""
    fields, size = draft.given_fields, draft.given("training.micro_batch_size")
    batches, whole = fields.get("steps_per_generation"), fields.get("generation_batch_size")
    ranks = draft.given("parallelism.data_parallel") or 1
    if batches is None and all(type(each) is int and each > 0 for each in (whole, size, ranks)):
        return max(int(whole or 1) // (int(size) * int(ranks)), 1)
    return fields.get("gradient_accumulation_steps", 1) if batches is None else batches


def _place_reward(draft: Draft) -> None:
    """Set RewardTrainer's head with one output, on both sequences of a pair in one forward (reward_trainer.py)."""
    draft.default("model.num_labels", 1)
    draft.values["model.tie_word_embeddings"] = False
    draft.values["training.loss"] = "materialized"
    draft.default("training.pairs", True)


def _place_sfts_loss(draft: Draft) -> None:
    """Set the loss of SFTTrainer by the version of TRL (trl/trainer/sft_trainer.py, sft_config.py)."""
    loss = draft.facts.get("loss_type")
    if "training.loss" in draft.overridden or loss not in (None, "nll", "chunked_nll", "dft"):
        return
    if draft.has("trl", "1.15"):
        draft.default("training.loss", "tiled")
    elif loss == "chunked_nll" or (loss is None and not is_on(draft.facts.get("liger")) and draft.has("trl", "1.7")):
        draft.default("training.loss", "chunked")
        batch, length = (draft.given(f"training.{name}") for name in ("micro_batch_size", "sequence_length"))
        if type(length) is int:
            tokens = length * (batch if type(batch) is int else 1)
            draft.default("training.loss_chunks", min(max(-(-tokens // CHUNK), 1), MOST_CHUNKS))


def place_logits_of_pairs(draft: Draft) -> None:
    """Set the dtype of the logits that the kernel of loss selective reads.

    accelerate utils/operations.py, convert_outputs_to_fp32: in mixed precision they are copied in fp32, even if no
    tensor is left for autocast to cast.
    """
    mixed = any(is_on(draft.facts.get(name)) for name in ("bf16", "fp16")) and not runs_deepspeed(draft)
    autocasts = mixed or draft.given("training.autocast") or draft.given("training.recipe") == "amp"
    if draft.values.get("training.loss") == "selective" and autocasts:
        draft.values["training.logits_dtype"] = "fp32"


def place_reentrant_checkpoints(draft: Draft, program: str) -> None:
    """Set whether checkpoints are reentrant, which TRL's trainers force on adapters at DeepSpeed's stage 3.

    trl/trainer/sft_trainer.py and others, __init__: in the options `gradient_checkpointing_kwargs`. Since 5.23 the
    Trainer of transformers reads `activation_checkpointing_kwargs`, which are the same if the file has options. DPO
    passes them on when it enables checkpoints again, after the reference's forward (trl/models/utils.py,
    disable_gradient_checkpointing): for all micro-batches but the first.
    """
    sharded = draft.given("parallelism.engine") == "deepspeed" and draft.given("parallelism.zero_stage") == 3
    adapted = draft.given("training.finetune") in ("lora", "qlora")
    forces = not _is_older(draft, "trl", REENTRANT_SINCE.get(program, "1.9"))
    old_names = _is_older(draft, "transformers", NAMES_ACTIVATION_CHECKPOINTING)
    has_options = any(path.startswith(_CHECKPOINT_OPTIONS) for path in draft.given_fields)
    if sharded and adapted and forces and (program == "dpo" or old_names or has_options):
        draft.default("training.reentrant_checkpoints", True)


def _is_older(draft: Draft, package: str, release: str) -> bool:
    """Return whether the run has a release of a package before this one; if it names none, it has the newest."""
    found = draft.given(f"training.versions.{package}")
    return found is not None and number(str(found)) < number(release)


def note_second_models(draft: Draft) -> None:
    """Record the memory of preference training and reinforcement learning in addition to the policy.

    trl/trainer/{dpo,kto}_trainer.py: the reference is a second copy of the policy, loaded in the same way, unless
    adapters are disabled to get it, or its log-probabilities are precomputed. grpo_trainer.py: it exists if beta is not
    0. Chosen and rejected sequences are in one forward.
    """
    program = str(draft.values.get(FRAMEWORK))
    _note_models_beside_policy(draft, program)
    by_script = _trainer_of_script(draft)
    if program == "trainer" and by_script not in ("", "sft"):
        draft.limit(f"what {by_script} training computes", "a step of SFT is counted", holds_memory=True)
    if program in ("kto", "orpo", "ppo") and not any(limit.holds_memory for limit in draft.limits):
        draft.limit(f"what {program} training computes", "a step of SFT is counted", holds_memory=True)


def _note_models_beside_policy(draft: Draft, program: str) -> None:
    fields, full = draft.given_fields, draft.values.get("training.finetune", "full") == "full"
    if program == "grpo":
        if fields.get("use_vllm") is True and fields.get("vllm_mode", "colocate") != "server":  # grpo_config.py
            draft.limit("vLLM on the GPUs that train", holds_memory=True)
        refers = fields.get("beta", 0) not in (0, 0.0)
    elif _asks(fields, _PREFERENCES) or _named_losses(fields) & _PREFERENCE_LOSSES:
        if not draft.values.get("training.pairs"):
            draft.limit("pairs of sequences", "chosen and rejected are twice the micro-batch", holds_memory=True)
        without = {"simpo", "orpo", "cpo"} & _named_losses(fields) or is_on(fields.get("precompute_ref_log_probs"))
        refers = not without
    else:
        return
    if refers and full and not draft.values.get("training.reference_model"):
        its_own = _asks(fields, ("model_init_kwargs", "ref_model_"))
        width = 0 if its_own else 4  # in the policy's dtype; with its own arguments in any dtype
        draft.limit("the reference model", "a frozen copy", holds_memory=True, bytes_per_parameter=width)


def _asks(fields: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a field that begins with one of these names is set and not disabled."""
    return any(path.startswith(tuple(names)) and value not in (False, "false", 0) for path, value in fields.items())


def _named_losses(fields: Mapping[str, Any]) -> set[str]:
    """Return the values of `loss_type`, which may be a string or a list."""
    named = fields.get("loss_type", ())
    return {str(name) for name in (named if isinstance(named, list) else [named])}


def _place_adapters(draft: Draft) -> None:
    """Set the adapters (trl/trainer/model_config.py); on a 4-bit base they are bf16 (trl/trainer/sft_trainer.py)."""
    for name, value in (("rank", 16), ("alpha", 32), ("dropout", 0.05)):
        draft.default(f"training.lora.{name}", value)
    draft.facts["pefts_layers"] = True
    if is_on(draft.facts.get("four_bits")):
        draft.default("training.qlora.double_quantization", False)
        weights = str(draft.facts.get("weights") or "float32").rpartition(".")[2]
        # trl/trainer/utils.py, get_quantization_config: bnb_4bit_compute_dtype=model_args.dtype
        draft.default("training.qlora.compute_dtype", None if weights == "auto" else _DTYPES.get(weights, "fp32"))
        place_adapters_in_bf16(draft, in_16_bits=weights != "float32")


_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def place_adapters_in_bf16(draft: Draft, *, in_16_bits: bool = True) -> None:
    """Set the dtype to which TRL's trainers cast adapters on a quantized base (trl/trainer/dpo_trainer.py, __init__).

    Gradients and optimizer states have it, too, except with DeepSpeed, which has fp32 master weights.

    Args:
        draft: the configuration.
        in_16_bits: whether other weights are loaded in 16 bits.
    """
    with_masters = draft.facts.get("deepspeed") or runs_deepspeed(draft)
    draft.default("training.lora.adapter_dtype", "compute" if in_16_bits or with_masters else "bf16")
    if in_16_bits and not with_masters:
        draft.default("training.recipe", "pure")  # no tensor is left for autocast to cast


REENTRANT_SINCE = {"sft": "0.28"}  # of TRL; other trainers: 1.9
NAMES_ACTIVATION_CHECKPOINTING = "5.23"  # of transformers
_CHECKPOINT_OPTIONS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_NAMED = re.compile(r"(?:^|[/_.-])(dpo|ipo|cpo|simpo|kto|orpo|grpo|rloo|ppo|rm|reward)(?:[/_.-]|$)")
_SUPERVISED = re.compile(r"(?:^|[/_.-])(sft|supervised|fine_?tun\w*|pre_?train\w*|clm)(?:[/_.-]|$)")
_NAMES = {**dict.fromkeys(("ipo", "cpo", "simpo"), "dpo"), "rloo": "grpo", "rm": "reward"}
_REINFORCED = frozenset(("num_generations", "reward_funcs", "max_completion_length"))
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
