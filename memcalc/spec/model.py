"""The model block: sizes of a transformer, with the names of Hugging Face configs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# 2^40 elements along one axis exceed any model; the bound keeps products of sizes reasonable.
Size = Annotated[int, Field(gt=0, le=2**40)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]

PositionEmbedding = Literal["learned", "rope", "alibi", "none"]
Normalization = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu", "relu", "relu2", "xielu", "swiglu", "geglu"]
Gelu = Literal["exact", "tanh", "new", "fast"]
# One letter per layer, as in Megatron-LM's --hybrid-override-pattern: Mamba-2, attention, MLP, experts.
MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
Pattern = Annotated[str, Field(pattern=r"^[-M*E]*$", max_length=2**16)]
Layers = Annotated[tuple[Annotated[int, Field(ge=0, le=2**40)], ...], Field(strict=False)]


class ConfigBlock(BaseModel):
    """A block of the configuration: immutable once read, unknown keys rejected, no implicit conversions."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class MoeSpec(ConfigBlock):
    """Mixture of experts in place of the MLP."""

    num_experts: Size = Field(description="E: routed experts in each MoE layer")
    num_experts_per_token: Size = Field(description="k: routed experts per token")
    expert_intermediate_size: Size = Field(description="F_e: intermediate size of a routed expert")
    shared_expert_intermediate_size: Count = Field(0, description="intermediate size of the shared expert; 0: none")
    shared_expert_gate: bool = Field(False, description="whether a d-vector gates the shared expert")
    first_dense_layers: Count = Field(0, description="number of first layers with a dense MLP")
    expert_interval: Size = Field(1, description="n: every n-th of the other layers has experts (Llama 4: 2)")
    dense_layers: Layers = Field((), description="further layers, counted from 0, with a dense MLP")
    expert_bias: bool | None = Field(None, description="bias of the experts' projections; default: mlp_bias")
    router_bias: bool = Field(False, description="bias of the router (gpt-oss)")
    router_correction_bias: bool = Field(
        False, description="whether the router has a bias buffer of E fp32 values (e_score_correction_bias)"
    )
    router_correction_parameter: bool = Field(False, description="whether that bias is a parameter (ERNIE 4.5)")
    dense_mlp: bool = Field(
        False, description="whether a dense MLP, and norms before and after the experts, are added to them (Gemma 4)"
    )
    latent_size: Count = Field(
        0, description="size that tokens are projected to before the routed experts, and back after; 0: not projected"
    )

    @property
    def mixed(self) -> bool:
        """Whether dense layers alternate with layers of experts."""
        return self.expert_interval > 1 or bool(self.dense_layers)

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has experts in place of the MLP."""
        due = layer >= self.first_dense_layers and (layer + 1) % self.expert_interval == 0
        return due and layer not in self.dense_layers


class MlaSpec(ConfigBlock):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    q_lora_rank: Count = Field(description="rank of the query latent; 0: queries are projected directly")
    kv_lora_rank: Size = Field(description="rank of the latent that keys and values share")
    qk_nope_head_dim: Size = Field(description="dimension of a query/key head without RoPE")
    qk_rope_head_dim: Size = Field(description="dimension of a query/key head with RoPE")
    v_head_dim: Size = Field(description="dimension of a value head")


class LinearAttentionSpec(ConfigBlock):
    """Gated DeltaNet (arXiv 2412.06464) in place of attention: a state of fixed size, updated token by token."""

    num_key_heads: Size = Field(description="heads of queries and keys")
    num_value_heads: Size = Field(description="heads of values, a multiple of num_key_heads")
    key_head_dim: Size = Field(description="dimension of a query or key head")
    value_head_dim: Size = Field(description="dimension of a value head")
    conv_kernel: Size = Field(4, description="kernel size, in tokens, of the convolution before linear attention")
    fused_projections: bool = Field(False, description="one linear layer for q, k, v and the gate z (Qwen3-Next)")

    @property
    def key_size(self) -> int:
        """Size of all key heads together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Size of all value heads together."""
        return self.num_value_heads * self.value_head_dim


class FullAttentionSpec(ConfigBlock):
    """Heads of the layers that attend to all tokens, where they differ from those of layers with a window (Gemma 4)."""

    head_dim: Size = Field(description="dimension of each attention head in these layers")
    num_key_value_heads: Size = Field(description="key/value heads in these layers")
    keys_as_values: bool = Field(False, description="whether one projection makes both keys and values in these layers")


class MambaSpec(ConfigBlock):
    """Mamba-2 (arXiv 2405.21060) in place of attention: a state of fixed size, updated chunk by chunk."""

    num_heads: Size = Field(description="heads, each with its own decay")
    head_dim: Size = Field(description="dimension of a head")
    num_groups: Size = Field(description="groups of heads that share the state's inputs and outputs (B and C)")
    state_size: Size = Field(description="dimension of the state of each feature of a head")
    conv_kernel: Size = Field(4, description="tokens that the convolution before it spans")
    conv_bias: bool = Field(True, description="bias of that convolution")
    projection_bias: bool = Field(False, description="bias of the projections before and after it")
    chunk_size: Size = Field(128, description="tokens of a chunk")

    @property
    def inner_size(self) -> int:
        """Size of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: all heads, and B and C of all groups."""
        return self.inner_size + 2 * self.num_groups * self.state_size


class ModelSpec(ConfigBlock):
    """A decoder-only transformer. The papers' symbols in brackets are accepted as aliases."""

    architecture: str | None = Field(None, description="a Hugging Face model_type; sets the defaults of its fields")
    num_layers: Size = Field(description="(l) transformer layers")
    hidden_size: Size = Field(description="(d) hidden size")
    num_attention_heads: Size = Field(description="(h) query heads")
    num_key_value_heads: Size = Field(description="key/value heads; default: num_attention_heads")
    head_dim: Size = Field(description="dimension of each attention head; default: hidden_size / num_attention_heads")
    rotary_dim: Count = Field(description="dimensions of each head that RoPE rotates; default: head_dim")
    intermediate_size: Size = Field(description="size inside the MLP; default: 4 * hidden_size")
    vocab_size: Size = Field(description="(V) tokens of the vocabulary: rows of the embedding weight")
    max_position_embeddings: Size = Field(2048, description="longest sequence that the position embedding allows")
    position_embedding: PositionEmbedding = Field("learned", description="how token positions are encoded")
    position_embedding_offset: Count = Field(0, description="extra rows of the learned position table (OPT: 2)")
    normalization: Normalization = Field("layernorm", description="layernorm (weight, bias) | rmsnorm (weight)")
    norm_weight: bool = Field(True, description="whether norms have a weight (OLMo: no)")
    norm_bias: bool = Field(True, description="whether layernorm has a bias (MPT, Cohere: no)")
    norms_per_layer: Literal[1, 2, 4] = Field(
        2, description="norms in each layer: 1 in a parallel block; 4 before and after attention and MLP"
    )
    norm_placement: Literal["before", "after"] = Field(
        "before", description="whether 2 norms are before or after attention and MLP (after: OLMo 2)"
    )
    final_norm: bool = Field(True, description="a norm after the last layer")
    embedding_norm: bool = Field(False, description="a norm after the embedding (BLOOM)")
    embedding_size: Size = Field(
        description="embedding dimension, projected to hidden_size if it differs; default: hidden_size"
    )
    mlp: Mlp = Field("gelu", description="gelu | relu | relu2 | xielu: two linear layers; swiglu | geglu: three")
    gelu: Gelu = Field(
        "exact",
        description="GELU of transformers' modules: one operator (exact, tanh) | several (gelu_new, gelu_fast ...)",
    )
    qkv_bias: bool = Field(True, description="bias of the query, key and value projections")
    output_bias: bool = Field(True, description="bias of the attention's output projection")
    mlp_bias: bool = Field(True, description="bias of the MLP's projections")
    lm_head_bias: bool = Field(False, description="bias of the output head")
    num_labels: Count = Field(
        0, description="outputs of a classification head in place of the LM head (a reward model has 1); 0: none"
    )
    sliding_window: Count = Field(0, description="(w) tokens in the sliding attention window; 0: no window")
    full_attention_interval: Count = Field(
        0,
        description="every n-th layer attends to all tokens, the others to a window or by linear attention; "
        "0: no layer does",
    )
    full_attention_layers: Layers = Field((), description="further layers, counted from 0, that attend to all tokens")
    unrotated_interval: Count = Field(0, description="every n-th layer has no RoPE (SmolLM3: 4); 0: all layers have it")
    unrotated_layers: Layers = Field((), description="further layers, counted from 0, without RoPE")
    rotates_windows_alone: bool = Field(
        False, description="whether only layers with a sliding window have RoPE (Cohere 2)"
    )
    attention_gate: bool = Field(
        False, description="whether a gate of the queries' size multiplies attention's output (Qwen3-Next)"
    )
    attention_sinks: bool = Field(False, description="a learned logit for each query head (gpt-oss)")
    qk_norm: bool = Field(False, description="a norm on each query head and key head (Qwen3)")
    qk_norm_width: Literal["head", "each-head", "all-heads"] = Field(
        "head", description="one norm for all heads | each its own weight (Cohere) | over all heads together (OLMo 2)"
    )
    qk_norm_weight: bool = Field(True, description="whether qk_norm has a weight if norms have one (Llama 4: no)")
    tie_word_embeddings: bool = Field(True, description="whether the LM head uses the embedding weight")
    parallel_block: bool = Field(False, description="attention and MLP in parallel (GPT-J, CodeGen)")
    fused_qkv: bool = Field(False, description="whether the checkpoint stores q, k, v as one matrix")
    fused_gate_up: bool = Field(False, description="whether the checkpoint stores gate and up as one matrix")
    attention_dropout: Probability = Field(0.0, description="the config's own dropout on attention probabilities")
    residual_dropout: Probability = Field(0.0, description="the config's own dropout before each residual sum")
    embedding_dropout: Probability = Field(0.0, description="the config's own dropout after the embedding")
    moe: MoeSpec | None = Field(None, description="mixture of experts")
    mla: MlaSpec | None = Field(None, description="latent attention")
    linear_attention: LinearAttentionSpec | None = Field(
        None, description="linear attention in the layers without full attention (Qwen3.5)"
    )
    full_attention: FullAttentionSpec | None = Field(
        None, description="other heads in the layers that attend to all tokens (Gemma 4)"
    )
    mamba: MambaSpec | None = Field(None, description="Mamba-2 in the layers that layer_pattern gives an M")
    layer_pattern: Pattern = Field(
        "",
        description="one letter per layer that has a single module: M Mamba-2 | * attention | - MLP | E experts; it is "
        "repeated or cut to num_layers; empty: all layers have attention and an MLP",
    )
    vision_config: str | None = Field(
        None, description="the config.json, as text, of a vision-language model; its vision tower is counted too"
    )
    transformers_config: str | None = Field(
        None, description="the config.json, as text, of a family without formulas, which transformers builds"
    )

    @property
    def head_rows(self) -> int:
        """Outputs of the LM head, or of the classification head, per token."""
        return self.num_labels or self.vocab_size

    @property
    def query_size(self) -> int:
        """Size of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Size of all key heads together, and of all value heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def mixers(self) -> str:
        """The letter of each layer; empty if all layers have attention and an MLP."""
        return repeated_pattern(self.layer_pattern, self.num_layers)

    def mixer(self, layer: int) -> str:
        """Return the letter of this layer, counted from 0; empty for a layer with attention and an MLP."""
        return self.layer_pattern[layer % len(self.layer_pattern)] if self.layer_pattern else ""

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has experts in place of the MLP."""
        if self.layer_pattern:
            return self.mixer(layer) == EXPERTS
        return self.moe is not None and self.moe.has_experts(layer)

    @property
    def mixes_experts(self) -> bool:
        """Whether layers with experts alternate with layers without."""
        if self.layer_pattern:
            return len(set(self.mixers)) > 1
        return self.moe is not None and self.moe.mixed

    def has_window(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, attends to a window of tokens only."""
        return self.sliding_window > 0 and not self._attends_fully(layer)

    def is_linear(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has linear attention."""
        return self.linear_attention is not None and not self._attends_fully(layer)

    def linear_layers(self, lo: int, hi: int) -> int:
        """Return the number of layers from `lo` to `hi` (exclusive) with linear attention."""
        return 0 if self.linear_attention is None else sum(map(self.is_linear, range(lo, hi)))

    def has_full_heads(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has the heads of `full_attention`."""
        return self.full_attention is not None and self._attends_fully(layer)

    def layers_with_full_heads(self, lo: int, hi: int) -> int:
        """Return the number of layers from `lo` to `hi` (exclusive) with the heads of `full_attention`."""
        return 0 if self.full_attention is None else sum(map(self.has_full_heads, range(lo, hi)))

    def _attends_fully(self, layer: int) -> bool:
        interval = self.full_attention_interval
        return bool(interval and (layer + 1) % interval == 0) or layer in self.full_attention_layers

    def rotates(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, applies RoPE to queries and keys."""
        left_out = self.unrotated_interval and (layer + 1) % self.unrotated_interval == 0
        if left_out or layer in self.unrotated_layers:
            return False
        return self.has_window(layer) or not (self.rotates_windows_alone and self.sliding_window > 0)

    def layers_with_experts(self, lo: int, hi: int) -> int:
        """Return the number of layers from `lo` to `hi` (exclusive) that have experts."""
        moe = self.moe
        if self.layer_pattern:
            return self.mixers.count(EXPERTS, lo, hi)
        if moe is None:
            return 0
        lo = max(lo, moe.first_dense_layers)
        if hi <= lo:
            return 0
        named = sum(lo <= layer < hi and (layer + 1) % moe.expert_interval == 0 for layer in set(moe.dense_layers))
        return hi // moe.expert_interval - lo // moe.expert_interval - named

    @property
    def experts_have_bias(self) -> bool:
        """Whether the experts' projections have biases."""
        own = None if self.moe is None else self.moe.expert_bias
        return self.mlp_bias if own is None else own

    @property
    def norm_has_bias(self) -> bool:
        """Whether norms have a bias in addition to their weight."""
        return self.normalization == "layernorm" and self.norm_weight and self.norm_bias

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP has a gate projection."""
        return self.mlp in ("swiglu", "geglu")


def repeated_pattern(pattern: str, layers: int) -> str:
    """Return a pattern repeated or cut to a number of layers."""
    return (pattern * -(-layers // len(pattern)))[:layers] if pattern else ""
