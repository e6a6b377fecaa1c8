"""Options of a model's ends: embedding, LM head and loss."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.architectures.options.layers import has_dropout
from memcalc.layout.adapters import loss_gathers_head, read_dtype
from memcalc.layout.schedules import logits_released
from memcalc.layout.teacher import teacher_run
from memcalc.spec.finetuning import base_dtype
from memcalc.spec.scoring import scored_by_reference
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE


class EmbeddingOptions(NamedTuple):
    """The token embedding, and what follows it before the first layer."""

    tied: bool  # one gradient for embedding and LM head; on two pipeline stages each has one
    separate_size: bool
    norm: bool
    dropout: bool
    places_each: bool = False  # each sequence has position ids and embeddings of its own
    stays: bool = False  # the output is a leaf that the first layer does not save


def embedding_of(spec: Spec) -> EmbeddingOptions:
    """Return the options of the embedding."""
    model, training = spec.model, spec.training
    # EmbeddingPipe of Megatron-DeepSpeed and GPT-NeoX (megatron/model): position ids are part of the batch.
    is_pipe = training.implementation == "plain" and spec.parallelism.has_pipeline_engine
    return EmbeddingOptions(
        # The weight of a frozen base model gets no gradient, and PEFT's trained copies of its modules are separate.
        tied=model.tie_word_embeddings and spec.parallelism.pipeline_parallel == 1 and training.lora is None,
        separate_size=model.embedding_size != model.hidden_size,
        norm=model.embedding_norm,
        dropout=(is_pipe or training.implementation == "huggingface") and has_dropout(spec, "embedding_dropout"),
        places_each=is_pipe,
    )


class HeadOptions(NamedTuple):
    """The last norm, the LM head, and how long its input and output stay live."""

    norm: bool
    bias: bool
    classifies: bool  # the head has labels instead of the vocabulary
    parameters: str  # dtype of the weight that a tiled loss reads
    fp32_output: bool  # the program casts the model's output to fp32
    drops_logits: bool  # no variable of the loop references the model's output in backward
    names_input: bool = False  # a variable of the model's forward references the input until the loss is there


def head_of(spec: Spec) -> HeadOptions:
    """Return the options of the LM head."""
    model, training = spec.model, spec.training
    return HeadOptions(
        norm=model.final_norm,
        bias=model.lm_head_bias,
        classifies=model.num_labels > 0,
        parameters=base_dtype(training) if loss_gathers_head(spec) else read_dtype(spec),
        fp32_output=training.logits_dtype == "fp32",
        drops_logits=logits_released(spec) == "loss",
    )


class LossOptions(NamedTuple):
    """The loss, and what it copies."""

    kind: str  # `training.loss`
    chunks: int
    chunks_head: bool  # a chunked loss also chunks the LM head
    recomputes: bool  # a chunked loss checkpoints each chunk
    upcasts_logits: bool  # an fp32 copy of the logits
    shifts_logits: bool  # transformers' loss before 4.49
    copies_scored_logits: bool  # the kernel of loss selective reads a copy of the logits
    averages_logits: bool  # loss selective averages the logits; beside a reference, in the memory that it has freed
    scores_apart: bool  # chosen and rejected sequences have a loss each
    divergence: str  # `training.divergence` of a run with a teacher; "" without
    teacher_logits: str  # dtype of the teacher's logits; "" without

    @property
    def reads_all_logits(self) -> bool:
        """Whether the loss reads the logits of all tokens as one tensor."""
        return self.kind not in TOKENWISE or (self.kind == "chunked" and self.chunks == 1)


def loss_of(spec: Spec) -> LossOptions:
    """Return the options of the loss."""
    training = spec.training
    may_shift = training.implementation == "huggingface" or training.evaluation_loss == "whole"
    return LossOptions(
        kind=training.loss,
        chunks=training.loss_chunks if training.loss == "chunked" else 1,
        chunks_head=training.chunked_head,
        recomputes=training.loss_recompute,
        upcasts_logits=training.loss_upcast,
        shifts_logits=training.loss_shift == "logits" and may_shift,
        copies_scored_logits=training.loss == "selective" and training.framework != "dpo",
        averages_logits=training.loss == "selective" and not scored_by_reference(spec),
        scores_apart=training.scored_apart,
        divergence="" if training.teacher is None else training.divergence,
        teacher_logits=_teacher_logits(spec),
    )


def _teacher_logits(spec: Spec) -> str:
    if spec.training.teacher is None:
        return ""
    return "fp32" if spec.training.logits_dtype == "fp32" else teacher_run(spec).training.dtype
