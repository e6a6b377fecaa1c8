"""Options of a layer's parts besides attention: norms, residual sums, MLP, experts, and other token mixers."""

from __future__ import annotations

from typing import NamedTuple

from memcalc.spec.hardware.kernels import capability
from memcalc.spec.model_families.conversion import family_of, rules_of
from memcalc.spec.spec import Spec

# torchtitan 0.2.2 torchtitan/models/{deepseek_v3,llama4}/model/args.py, update_from_config; Qwen3's has no such check.
LOOPS_OVER_EXPERTS = ("deepseek_v2", "deepseek_v3", "llama4_text")
GROUPED_GEMM = (9, 0)  # the compute capability from which on they run grouped GEMMs


class NormOptions(NamedTuple):
    """The norms of a model: their parameters, and how they run."""

    kind: str  # `model.normalization`
    weight: bool
    bias: bool
    composite: bool  # torch.nn.RMSNorm as separate operators (before torch 2.9)
    in_fp32: bool  # plain RMSNorms compute on an fp32 copy


def norm_of(spec: Spec) -> NormOptions:
    """Return the options of norms."""
    model, training = spec.model, spec.training
    # modules of all families, by the plain block
    generates = training.implementation == "huggingface" and spec.inference is not None
    return NormOptions(
        kind=model.normalization,
        weight=model.norm_weight,
        bias=model.norm_bias,
        composite=training.torch < (2, 9) or generates,
        in_fp32=training.norm_dtype == "fp32",
    )


class ResidualOptions(NamedTuple):
    """How a layer adds attention and MLP to the hidden states."""

    parallel: bool  # both read the layer's input
    norms: int  # per layer
    norm_placement: str
    dropout: bool  # of what is added


def residual_of(spec: Spec) -> ResidualOptions:
    """Return the options of residual sums."""
    model = spec.model
    return ResidualOptions(
        parallel=model.parallel_block,
        norms=model.norms_per_layer,
        norm_placement=model.norm_placement,
        dropout=has_dropout(spec, "residual_dropout"),
    )


class MlpOptions(NamedTuple):
    """The dense MLP, and the activation of experts."""

    activation: str  # `model.mlp`
    gelu: str  # variant of gelu in transformers' modules
    gated: bool
    bias: bool
    usual_size: bool  # F = 4d, written 4·d
    fused_gate_up: bool  # transformers: one linear layer for gate and up

    @property
    def width(self) -> str:
        """The axis of a dense MLP's inner features."""
        return "4·d" if self.usual_size else "F"


def mlp_of(spec: Spec) -> MlpOptions:
    """Return the options of MLPs."""
    model, theirs = spec.model, spec.training.implementation == "huggingface"
    return MlpOptions(
        activation=model.mlp,
        gelu=model.gelu if theirs else "exact",
        gated=model.gated_mlp,
        bias=model.mlp_bias,
        usual_size=model.intermediate_size == 4 * model.hidden_size,
        fused_gate_up=theirs and model.fused_gate_up,
    )


class ExpertOptions(NamedTuple):
    """Router and experts of layers that have them."""

    shared: bool = False  # an expert that reads all tokens
    shared_gate: bool = False
    bias: bool = False
    router_bias: bool = False
    router_correction: bool = False  # a bias of the router's scores, by which experts are chosen
    latent: bool = False  # tokens are projected to a latent before the routed experts, and back
    family: str = ""  # `model.architecture`, which decides torchtitan's router
    loops: bool = False  # torchtitan: one matmul for each expert, on GPUs without grouped GEMMs


def experts_of(spec: Spec) -> ExpertOptions:
    """Return the options of experts."""
    model, moe = spec.model, spec.model.moe
    if moe is None:
        return ExpertOptions()
    family = (model.architecture or "") if spec.training.implementation == "torchtitan" else ""
    return ExpertOptions(
        shared=moe.shared_expert_intermediate_size > 0,
        shared_gate=moe.shared_expert_gate,
        bias=model.experts_have_bias,
        router_bias=moe.router_bias,
        router_correction=moe.router_correction_bias,
        latent=moe.latent_size > 0,
        family=family,
        loops=family in LOOPS_OVER_EXPERTS and capability(spec.gpu) < GROUPED_GEMM,
    )


class MixerOptions(NamedTuple):
    """Linear attention and Mamba-2, in layers that have them instead of attention."""

    grouped_linear: bool = False  # linear attention with fewer key heads than value heads
    conv_bias: bool = False  # the convolution before Mamba-2 has a bias
    mamba_bias: bool = False  # the projections of Mamba-2 have biases
    single_chunk: bool = False  # the sequence is one chunk of Mamba-2
    pads_chunks: bool = False  # the last chunk of Mamba-2 is padded


def mixers_of(spec: Spec) -> MixerOptions:
    """Return the options of linear attention and Mamba-2."""
    linear, mamba, length = spec.model.linear_attention, spec.model.mamba, spec.training.row_length
    return MixerOptions(
        grouped_linear=linear is not None and linear.num_key_heads < linear.num_value_heads,
        conv_bias=mamba is not None and mamba.conv_bias,
        mamba_bias=mamba is not None and mamba.projection_bias,
        single_chunk=mamba is not None and length <= mamba.chunk_size,
        pads_chunks=mamba is not None and length % mamba.chunk_size > 0,
    )


def has_dropout(spec: Spec, field: str) -> bool:
    """Return whether a place has dropout: in transformers' modules only if the family's config has a rate."""
    model, training = spec.model, spec.training
    if training.dropout is None:
        return bool(getattr(model, field))
    theirs = training.implementation == "huggingface" and model.architecture is not None
    has_rate = not theirs or field in rules_of(family_of(model.architecture or ""))
    return bool(training.dropout if has_rate else getattr(model, field))
