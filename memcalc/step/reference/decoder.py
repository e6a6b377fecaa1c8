"""The reference decoder ("plain"): PyTorch modules arranged as the block of the papers.

A GPT layer saves for backward the 34bsd + 5bs^2h bytes of Korthikanti et al. (arXiv 2205.05198) in bf16 or fp16, plus
what they omit: the statistics of its two norms (4 bytes each for mean and reciprocal deviation, per token).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memcalc.errors import InputError
from memcalc.spec.model import ModelSpec
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec
from memcalc.step.dtypes import compute_dtype
from memcalc.step.recompute import contexts_of, plan_of, run_plan
from memcalc.step.reference.attention import Attention
from memcalc.step.reference.dropout import dropout
from memcalc.step.reference.mlp import MixtureOfExperts, Mlp
from memcalc.step.reference.norms import norm
from memcalc.step.reference.positions import Shared, prepare


class Layer(nn.Module):
    """Attention and MLP, each after a norm and before a dropout, in sequence or in parallel."""

    def __init__(self, model: ModelSpec, training: TrainingSpec, index: int) -> None:
        super().__init__()
        rate = training.dropout
        self.dropout = model.residual_dropout if rate is None else rate
        self.parallel = model.parallel_block
        before = model.norms_per_layer == 4 or model.norm_placement == "before"
        after = model.norms_per_layer == 4 or not before
        self.input_norm = norm(model, model.hidden_size) if before else nn.Identity()
        self.attention = Attention(model, training, model.attention_dropout if rate is None else rate)
        self.attention_output_norm = norm(model, model.hidden_size) if after else nn.Identity()
        # A parallel block with one norm gives attention and MLP the same input.
        self.shares_norm = before and model.norms_per_layer == 1
        own = before and not self.shares_norm
        self.post_attention_norm = norm(model, model.hidden_size) if own else nn.Identity()
        self.mlp: nn.Module
        if model.moe is not None and model.has_experts(index):
            self.mlp = MixtureOfExperts(model, model.moe)
        else:
            self.mlp = Mlp(model, model.intermediate_size)
        self.mlp_output_norm = norm(model, model.hidden_size) if after else nn.Identity()

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Return the layer's output: (b, s, d) to (b, s, d)."""
        if self.parallel:
            normed = self.input_norm(x)
            attended = self.attended(normed, shared)
            return x + attended + self.mlp_output(normed if self.shares_norm else self.post_attention_norm(x))
        x = x + self.attended(self.input_norm(x), shared)
        return x + self.mlp_output(self.post_attention_norm(x))

    def attended(self, normed: Tensor, shared: Shared) -> Tensor:
        """Return attention's contribution to the residual stream."""
        attended = self.attention_output_norm(self.attention(normed, shared))
        return dropout(attended, self.dropout, training=self.training)

    def mlp_output(self, normed: Tensor) -> Tensor:
        """Return the MLP's contribution to the residual stream."""
        return dropout(self.mlp_output_norm(self.mlp(normed)), self.dropout, training=self.training)


class Decoder(nn.Module):
    """Embedding, layers, LM head: token ids (b, s) to logits (b, s, V). Built on torch's default device and dtype."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        model, training = spec.model, spec.training
        refuse_unsupported(spec)
        self.spec = spec
        self.plan = plan_of(training, model.num_layers)
        self.contexts = contexts_of(spec)
        width = model.embedding_size
        self.embed_tokens = nn.Embedding(model.vocab_size, width)
        projected = width != model.hidden_size
        self.embed_proj = nn.Linear(width, model.hidden_size, bias=False) if projected else None
        rows = model.max_position_embeddings + model.position_embedding_offset
        learned = model.position_embedding == "learned"
        self.embed_positions = nn.Embedding(rows, model.hidden_size) if learned else None
        self.embed_norm = norm(model, model.hidden_size) if model.embedding_norm else None
        self.layers = nn.ModuleList(Layer(model, training, index) for index in range(model.num_layers))
        self.norm = norm(model, model.hidden_size) if model.final_norm else None
        self.head_proj = nn.Linear(model.hidden_size, width, bias=False) if projected else None
        self.lm_head = head(model, self.embed_tokens)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of every position."""
        return self.lm_head(self.hidden(input_ids))  # type: ignore[no-any-return]

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Return the LM head's input at every position, (b, s, d)."""
        x, tables = self.embed(input_ids)
        x = run_plan(self.plan, x, lambda index, x: self.layers[index](x, tables), self.contexts)
        x = x if self.norm is None else self.norm(x)
        return x if self.head_proj is None else self.head_proj(x)

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Shared]:
        """Return the initial residual stream, and the tensors that all layers share."""
        model, training = self.spec.model, self.spec.training
        length = input_ids.shape[1]
        x = self.embed_tokens(input_ids)
        x = x if self.embed_proj is None else self.embed_proj(x)
        if self.embed_positions is not None:
            first = model.position_embedding_offset
            x = x + self.embed_positions(torch.arange(first, first + length, device=input_ids.device))
        x = x if self.embed_norm is None else self.embed_norm(x)
        return x, prepare(model, training.attention, length, compute_dtype(training), input_ids.device)


def head(model: ModelSpec, embedding: nn.Embedding) -> nn.Linear:
    """Return the LM head; a tied one is built without a weight, so none is allocated even temporarily."""
    width, vocabulary = embedding.embedding_dim, embedding.num_embeddings
    if not model.tie_word_embeddings:
        return nn.Linear(width, vocabulary, bias=model.lm_head_bias)
    tied = nn.Linear(width, vocabulary, bias=False, device="meta")
    tied.weight = embedding.weight
    if model.lm_head_bias:
        tied.bias = nn.Parameter(torch.zeros(vocabulary))
    return tied


def refuse_unsupported(spec: Spec) -> None:
    """Reject settings that the reference decoder does not support.

    Raises:
        InputError: there is such a setting.
    """
    model = spec.model
    if model.mla is not None:
        raise InputError(
            "The plain implementation has no multi-head latent attention.",
            "Use `memcalc estimate`, which has its formulas, or a model without `mla`.",
            "model.mla",
        )
    if model.attention_sinks:
        raise InputError(
            "The plain implementation has no attention sinks.",
            "Use `memcalc estimate`, which counts their parameters, or leave attention_sinks out.",
            "model.attention_sinks",
        )
    if model.norms_per_layer == 1 and not model.parallel_block:
        raise InputError(
            "norms_per_layer = 1, but without parallel_block attention and MLP need a norm each.",
            "Set norms_per_layer: 2, or parallel_block: true.",
            "model.norms_per_layer",
        )
    if model.position_embedding == "alibi" and spec.training.attention != "eager":
        raise InputError(
            f"attention = {spec.training.attention} cannot add ALiBi's bias to the scores.",
            "Set training.attention: eager.",
            "training.attention",
        )
