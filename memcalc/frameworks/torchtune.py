"""Behavior of torchtune's recipes and modules that affects memory (torchtune 0.6.1)."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft

CHUNKS = 8  # modules/loss/ce_chunked_output_loss.py: the default of num_output_chunks
_PREFERENCES = ("DPOLoss", "RSOLoss")
_CHUNKED = ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss")


def place_torchtune(draft: Draft) -> None:
    """Set the loss by its component, norms on an fp32 copy, and logits that are freed before backward.

    recipes/full_finetune_single_device.py: `del logits`. modules/transformer.py: the head runs on chunks of tokens
    if the loss takes them, and else returns logits in fp32. modules/rms_norm.py: F.rms_norm of x.float().
    """
    draft.default("training.logits_until", "loss")
    if draft.given("training.implementation") not in (None, "plain"):
        return
    draft.default("model.fused_qkv", False)  # models/phi3/_convert_weights.py splits the checkpoint's
    draft.default("training.repeat_kv", True)  # modules/attention.py: k.unsqueeze(2).expand(...).flatten(1, 2)
    half = draft.given("training.dtype") != "fp32"
    if half:
        draft.default("training.norm_dtype", "fp32")
    component = str(draft.given_fields.get("loss._component_", _CHUNKED[0])).rpartition(".")[2]
    if component in _CHUNKED and draft.given("training.loss") in (None, "chunked"):
        chunks = draft.given_fields.get("loss.num_output_chunks", CHUNKS)
        draft.default("training.loss", "chunked")
        draft.default("training.loss_recompute", False)
        draft.default("training.loss_chunks", chunks if type(chunks) is int else CHUNKS)
    elif component in ("CrossEntropyLoss", *_PREFERENCES) and half:
        draft.default("training.logits_dtype", "fp32")
    if component in _PREFERENCES:
        _place_pairs(draft)


def _place_pairs(draft: Draft) -> None:
    """Set the fields of preference training (recipes/lora_dpo_single_device.py, recipes/full_dpo_distributed.py).

    Chosen and rejected sequences are in one forward. The policy scores them again without its adapters, and the
    variable `_` references the logits of the rejected ones, hence all, until it is assigned again; or a second model in
    the dtype of the policy does, where its logits are deleted.
    """
    draft.default("training.pairs", True)
    draft.default("training.loss", "gathered")
    if (draft.given("training.finetune") or "full") == "full":
        draft.default("training.reference_model", True)
        draft.default("training.scored_apart", True)
    else:
        draft.default("training.reference_logits_until", "step")
