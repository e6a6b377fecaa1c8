"""Completions that the model generates between steps, to train on them (GRPO), in addition to what a step leaves.

transformers 5.23 generation/utils.py, _sample, under torch.no_grad: the cache grows token by token, and each forward
ends with the logits of one token of each sequence. Sources of the batch: TRL 1.16 trl/trainer/grpo_trainer.py,
_prepare_inputs (steps_per_generation micro-batches at once) and _generate_single_turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.generation.forward_peak import forward_peaks, peak_rows
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import GENERATION, RowDraft, mask_of
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
    yield _temporary("head", "probabilities of the next token", scores, "fp32", 1, "4·b·V", SAMPLE)
    yield _temporary("head", "random numbers that it is drawn by", scores, "fp32", 1, "4·b·V", DRAW)


def _temporary(
    module: str, tensor: str, shape: tuple[int, ...], dtype: str, count: int, formula: str, citation: str
) -> RowDraft:
    each = DTYPE_BYTES[dtype] * math.prod(shape)
    given = (each, rounded(each), mask_of(GENERATION), formula, citation)
    return RowDraft(Component.TEMPORARIES, module, tensor, shape, dtype, count, *given)


def generating(spec: Spec) -> Spec:
    """Return the run as a generation of all sequences that are generated at once, with their prompts."""
    training = spec.training
    assert training.completion_length is not None
    sequences = training.micro_batch_size * (training.steps_per_generation or training.gradient_accumulation_steps)
    prompt = training.sequence_length - training.completion_length
    dtype = "fp32" if state_options(spec).base == "fp32" else training.dtype
    inference = InferenceSpec.model_construct(
        batch_size=sequences,
        prompt_length=prompt,
        new_tokens=training.completion_length - 1,  # with a forward pass of their own: nothing follows the last one
        context_length=training.sequence_length - 1,
        dtype=dtype,
        quantization="none" if training.qlora is None else training.qlora.quantization,
        cache="dynamic",
        implementation="huggingface" if training.implementation == "huggingface" else "plain",
        attention=training.attention,
        torch_version=training.torch_version,
    )
    if training.finetune == "full":
        precision = {}
    else:  # PeftModel.generate calls the base model's forward, which Accelerate did not wrap in autocast
        precision = {"dtype": dtype, "recipe": "fp32" if dtype == "fp32" else "pure", "autocast": None}
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
