"""Behavior of LitGPT's programs and modules that affects memory (LitGPT 0.5.13, on Lightning Fabric)."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft
from memcalc.frameworks.weights import placed_config
from memcalc.spec.finetuning import HEAD

CHUNK = 128  # tokens of each sequence: finetune/lora.py, lm_head_chunk_size
LORA_DROPOUT = 0.05  # finetune/lora.py, setup
MOST_CHUNKS = 64  # more chunks would change the peak by less than 0.1%

_UNGATED = ("gpt_neox", "phi", "falcon")  # families with an MLP without a gate, by their model_type


def place_litgpt(draft: Draft, *, adapters: bool) -> None:
    """Set the fields of LM head, loss, norms and logits.

    litgpt/model.py: the LM head is untied; RMSNorm computes on x.float(). finetune/full.py, pretrain.py: the variable
    `logits` references the fp32 output of Fabric (plugins/precision/utils.py) until the next forward has returned.
    finetune/lora.py runs the LM head on 128 tokens of each sequence at a time; all logits stay live.
    """
    draft.default("model.tie_word_embeddings", False)
    draft.default("training.logits_until", "step")
    if draft.given("training.implementation") not in (None, "plain"):
        return
    draft.default("training.norm_dtype", "fp32")
    # litgpt/model.py, CausalSelfAttention: repeat_interleave; torch.cat of queries, head by head
    draft.default("training.repeat_kv", True)
    draft.default("training.heads_first", True)
    if draft.given("training.dtype") != "fp32":
        draft.default("training.logits_dtype", "fp32")
    length = draft.given("training.sequence_length")
    if type(length) is int and draft.given("training.loss") in (None, "chunked"):
        draft.default("training.loss", "chunked")
        draft.default("training.loss_recompute", False)
        draft.default("training.chunked_head", adapters)
        draft.default("training.loss_chunks", min(max(-(-length // CHUNK), 1), MOST_CHUNKS))


def place_evaluation(draft: Draft, *, fine_tunes: bool) -> None:
    """Set the evaluation of a micro-batch before the first step and between steps.

    finetune/{full,lora}.py, pretrain.py, fit: "Verifying settings ..." evaluates two batches; validate computes the
    loss of all logits at once (chunk_size=0), in pretraining the loss of training. The example that fine-tuning
    generates after an evaluation needs less memory.
    """
    size = draft.given("training.micro_batch_size")
    if type(size) is int:
        draft.default("training.evaluation_batch_size", size)
        draft.default("training.evaluation_when", "both")
        if fine_tunes:
            draft.default("training.evaluation_loss", "whole")


def place_adapters(draft: Draft, attention: list[str], *, mlp: bool, head: bool) -> None:
    """Set LitGPT's adapters; with a 4-bit base the embedding trains, too.

    litgpt/lora.py. finetune/lora.py, main: with bitsandbytes wte becomes a StableEmbedding: its weight requires a
    gradient although no optimizer updates it, and `old_embedding` still references the previous one.

    Args:
        draft: the configuration being read, with its model.
        attention: the layers with adapters among q_proj, k_proj, v_proj and o_proj.
        mlp: whether the MLP has adapters.
        head: whether the LM head has one.
    """
    draft.default("training.lora.implementation", "litgpt")
    gated = str(placed_config(draft).get("model_type")) not in _UNGATED
    layers = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
    layers = (*(layers if mlp else ()), *((HEAD,) if head else ()))
    draft.values["training.lora.target_modules"] = [*attention, *layers]
    draft.default("training.lora.dropout", LORA_DROPOUT)


def place_4_bits(draft: Draft) -> None:
    """Let the embedding train if the base is 4-bit."""
    # lightning 2.6 fabric/plugins/precision/bitsandbytes.py, _NF4Linear.quantize: weight.to(dtype=torch.half)
    draft.default("training.qlora.original_dtype", "fp16")
    if not draft.given("model.tie_word_embeddings"):
        draft.default("training.lora.modules_to_save", ["embed_tokens"])
