"""Completions that the model generates between steps, to train on them (GRPO), in addition to what a step leaves.

transformers 5.23 generation/utils.py, _sample, under torch.no_grad: the cache grows token by token, and each forward
ends with the logits of one token of each sequence. Sources of the batch: TRL 1.16 trl/trainer/grpo_trainer.py,
_prepare_inputs (steps_per_generation micro-batches at once) and _generate_single_turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.generation.forward_peak import forward_peaks, peak_rows
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import GENERATION, RowDraft, mask_of
from memcalc.spec.defaults import kernel_in_fp32
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.inference import InferenceSpec
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.state_options import state_options

DRAW = "ATen native/Distributions.cpp, multinomial: q = empty_like(self).exponential_()"
SAMPLE = "transformers 5.23 generation/utils.py, _sample: softmax of the next token's scores"


def rollout_items(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> Iterator[RowDraft]:
    """The peak of generation on one stage: its cache, the tensors of a forward, and those of sampling.

    Where autocast runs over fp32 weights, queries and keys are in fp32 as they are rotated; values are counted so too.
    """
    run, mask = generating(spec), mask_of(GENERATION)
    yield from peak_rows(max(forward_peaks(run, stage, gpu).values(), key=attrgetter("bytes")), mask)
    scores = (run.training.micro_batch_size, spec.model.vocab_size)
    yield _of_scores("probabilities of the next token", scores, SAMPLE)
    yield _of_scores("random numbers that it is drawn by", scores, DRAW)


def _of_scores(tensor: str, shape: tuple[int, int], citation: str) -> RowDraft:
    """Return a temporary in fp32 as large as the scores of the next tokens, (b, V)."""
    each = DTYPE_BYTES["fp32"] * math.prod(shape)
    given = (each, rounded(each), mask_of(GENERATION), "4·b·V", citation)
    return RowDraft(Component.TEMPORARIES, "head", tensor, shape, "fp32", 1, *given)


def generating(spec: Spec) -> Spec:
    """Return the run as a generation of all sequences that are generated at once, with their prompts."""
    training = spec.training
    assert training.completion_length is not None
    sequences = training.micro_batch_size * (training.steps_per_generation or training.gradient_accumulation_steps)
    prompt = training.sequence_length - training.completion_length
    dtype = "fp32" if state_options(spec).base == "fp32" else training.dtype
    precision: dict[str, Any] = {}
    if training.finetune != "full":  # PeftModel.generate calls the base model's forward, outside Accelerate's autocast
        in_fp32 = {"recipe": "fp32", "attention": _kernel_in_fp32(spec)}
        precision = {"dtype": dtype, "autocast": None, **(in_fp32 if dtype == "fp32" else {"recipe": "pure"})}
    inference = InferenceSpec.model_construct(
        batch_size=sequences,
        prompt_length=prompt,
        new_tokens=training.completion_length - 1,  # with a forward pass of their own: nothing follows the last one
        context_length=training.sequence_length - 1,
        dtype=dtype,
        quantization="none" if training.qlora is None else training.qlora.quantization,
        cache="dynamic",
        implementation="huggingface" if training.implementation == "huggingface" else "plain",
        attention=precision.get("attention", training.attention),
        torch_version=training.torch_version,
    )
    changed = {
        **precision,
        "micro_batch_size": sequences,
        "sequence_length": prompt,
        "gradient_accumulation_steps": 1,
        "recompute": "none",
        "recompute_keep": (),
        "offload_activations": "none",
        "padding_mask": "none",
        "pairs": False,
        "reference_model": False,
        "loss": "materialized",
        "evaluation_batch_size": None,
    }
    return spec.model_copy(update={"training": training.model_copy(update=changed), "inference": inference})


def _kernel_in_fp32(spec: Spec) -> str:
    """Return the attention kernel of a generation in fp32, with prompts of one length."""
    training, model = spec.training, spec.model
    if training.attention != "flash":
        return training.attention
    if training.implementation != "huggingface":
        return "memory-efficient"
    release = None if training.versions is None else training.versions.transformers
    return kernel_in_fp32(release, grouped=model.num_key_value_heads != model.num_attention_heads)
