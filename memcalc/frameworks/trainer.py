"""Behavior of Hugging Face's Trainer that affects memory, unlike a plain loop (transformers 5.23, trainer.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.frameworks.draft import FRAMEWORK, Draft, is_on
from memcalc.frameworks.lengths import place_lengths
from memcalc.spec.programs import GROUPED_HEADS

MAX_GRAD_NORM = 1.0  # training_args.py: the default
# Liger's kernels, by Liger's and axolotl's names (integrations/liger/args.py).
LIGERS = {
    "rms_norm": "liger_rms_norm",
    "rope": "liger_rope",
    "swiglu": "liger_glu_activation",
    "fused_linear_cross_entropy": "liger_fused_linear_cross_entropy",
}


def place_trainers_loop(draft: Draft) -> None:
    """Set the loss, the logits, clipping, and the states that bitsandbytes keeps in fp32, from the file's fields.

    compute_loss returns only the loss, so the logits are freed before backward. create_optimizer makes bitsandbytes
    keep the states of embeddings in fp32. Gradients are clipped to `max_grad_norm`, unless it is 0.
    """
    facts, values = draft.facts, draft.values
    draft.default("training.logits_until", "loss")
    clipping = facts.get("clipping", MAX_GRAD_NORM)
    if clipping:
        draft.default("training.gradient_clipping", clipping)
    masters = str(values.get("training.recipe", "")).startswith("mixed")  # which bitsandbytes does not know
    masters = masters or "training.recipe" in draft.overridden
    # trainer.py, create_optimizer: until 4.51 of an optimizer named Adam8bit alone, which none is.
    if draft.optimizer in ("adam-8bit", "lion-8bit") and not masters and draft.has("transformers", "4.52"):
        draft.default("training.optimizer_options.embeddings_32bit", True)
    _place_liger(draft)
    _place_ddp(draft)
    place_padding(draft)
    place_lengths(draft, packs=packs_sequences(draft.given_fields))
    if draft.given("training.dtype") == "fp32":
        draft.has("transformers", GROUPED_HEADS)  # which decides the kernel: spec/defaults.py
    if draft.given("training.loss") in (None, "materialized") and not draft.has("transformers", "4.49"):
        draft.default("training.loss_shift", "logits")
    if is_on(facts.get("cut_cross_entropy")):
        draft.default("training.loss", "fused")
        draft.notes.append("cut cross-entropy is counted as Liger's fused loss, which has some logits at a time")


def _place_ddp(draft: Draft) -> None:
    """Set whether DDP looks for unused parameters: by default where nothing is recomputed, and with adapters.

    transformers 5.23 trainer.py, _build_accelerator_args: a PeftModel is no PreTrainedModel. LLaMA-Factory 0.9.5
    hparams/parser.py, get_train_args: not with LoRA.
    """
    if draft.given("parallelism.engine") not in (None, "ddp") or draft.given("parallelism.zero_stage"):
        return
    said = draft.given_fields.get("ddp_find_unused_parameters")
    adapted = draft.given("training.finetune") in ("lora", "qlora")
    if adapted:
        default = draft.values.get(FRAMEWORK) != "llama-factory"
    else:
        default = draft.given("training.recompute") in (None, "none")
    if default if said is None else is_on(said):
        draft.default("parallelism.find_unused_parameters", True)


def packs_sequences(fields: Mapping[str, Any]) -> bool:
    """Return whether a program cuts concatenated texts into sequences of the same length.

    TRL 1.16 data_utils.py, pack_dataset: the strategy wrapped does, bfd only fills sequences as well as it can.
    LLaMA-Factory 0.9.5 data/processor/supervised.py pads packed rows to cutoff_len, and stage pt packs (pretrain.py).
    axolotl 0.19 utils/schemas/validation.py: packed samples are padded to sequence_len unless the file says no.
    transformers' run_clm.py cuts blocks of block_size.
    """
    if is_on(fields.get("packing")) or is_on(fields.get("neat_packing")):
        return "stage" in fields or fields.get("packing_strategy") == "wrapped"
    default = is_on(fields.get("sample_packing"))
    return (
        is_on(fields.get("pad_to_sequence_len", default))
        or (fields.get("stage") == "pt" and "packing" not in fields)
        or "block_size" in fields
    )


def place_padding(draft: Draft) -> None:
    """Set whether sequences of a batch are padded, which gives transformers' sdpa a mask; the data decide it.

    Texts that are concatenated and split, and batches of one sequence, are not padded, unless lengths are rounded up;
    flash_attention_2 needs no mask.
    """
    packs = is_on(draft.given_fields.get("packing"))
    # axolotl 0.19 core/builders/causal.py: to a multiple of 64, or to sequence_len
    rounds = draft.given(FRAMEWORK) == "axolotl" and draft.given_fields.get("pad_to_sequence_len") is not False
    single = draft.given("training.micro_batch_size") == 1 and not draft.values.get("training.pairs")
    alone = single and not rounds
    masks = draft.given("training.attention") != "eager" and draft.given("training.attention_windows") != "kernel"
    if (
        not masks
        or (alone and not packs)
        or "training.padding_mask" in draft.values
        or "block_size" in draft.given_fields
    ):
        return
    if packs:
        # trl/trainer/sft_trainer.py: this strategy packs into padding-free batches; masking_utils.py masks the blocks.
        if draft.values.get(FRAMEWORK) == "sft" and draft.given_fields.get("packing_strategy", "bfd") == "bfd":
            draft.default("training.padding_free", True)
            what = "whether a packed row has several texts"
            draft.default("training.padding_mask", draft.choose("training.padding_mask", what, ("none", "boolean")))
        return
    kind = "boolean" if draft.has("transformers", "4.53") else "additive"  # masking_utils.py since 4.53
    answer = draft.choose("training.padding_mask", "whether sequences are padded", ("none", kind))
    draft.default("training.padding_mask", answer)


def _place_liger(draft: Draft) -> None:
    """Set Liger's kernels: under Trainer all that its config does not disable, under axolotl the enabled ones."""
    facts = draft.facts
    config = facts.get("liger_config")
    left_out = {name for name, on in config.items() if on is False} if isinstance(config, Mapping) else set()
    on = set(LIGERS) - left_out if is_on(facts.get("liger")) else set()
    on |= {name for name, field in LIGERS.items() if is_on(facts.get(field))}
    if "fused_linear_cross_entropy" in on:
        draft.default("training.loss", "fused")
    modules = on - {"fused_linear_cross_entropy"}
    if "training.implementation" in draft.overridden:
        return  # perhaps modules other than transformers'
    if len(modules) == len(LIGERS) - 1:
        draft.default("training.kernels", "liger")
    elif modules:
        draft.limit(
            f"{' and '.join(sorted(modules))} of Liger's kernels only",
            "they save less",
            holds_memory=False,
            overcounts="activations",
        )


def note_evaluation(draft: Draft, *, asked: bool, batch: str, silent: int = 1) -> None:
    """Set evaluation during training, if a file enables it.

    Args:
        draft: the configuration being read.
        asked: whether the file enables it.
        batch: the field with the number of sequences in one forward.
        silent: the default of that field.
    """
    if not asked:
        return
    value = draft.given_fields.get(batch)
    sequences = value if type(value) is int and value > 0 else silent
    draft.default("training.evaluation_batch_size", sequences)
    generates = ("predict_with_generate", "do_causal_lm_eval", "do_bench_eval", "eval_table_size")
    if any(draft.given_fields.get(name) not in (None, False, 0, "false") for name in generates):
        draft.limit("generation during evaluation", holds_memory=True)


def trainer_evaluates(fields: Mapping[str, Any]) -> bool:
    """Return whether TrainingArguments enable evaluation; `evaluation_strategy` until transformers 4.46."""
    strategy = str(fields.get("eval_strategy", fields.get("evaluation_strategy", "no"))).lower()
    return strategy not in ("no", "false", "none") or is_on(fields.get("do_eval"))


TRAINERS_EVALUATION = 8  # training_args.py: the default of per_device_eval_batch_size
