"""Structure of a block's tape: options, not sizes. Tapes are compiled once per structure."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from memcalc.layout.adapters import Adapters, adapters_of, loss_gathers_head, read_dtype, replaces_linears
from memcalc.layout.sequence_sharding import has_ring_attention
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import LayerModules, recomputed_windows
from memcalc.layout.teacher import teacher_run
from memcalc.layout.weight_layout import split_by_dtensor, table_gradient_is_unsharded
from memcalc.operators.base import wider
from memcalc.operators.float8 import Float8
from memcalc.spec.finetuning import base_dtype
from memcalc.spec.fp32_modules import in_fp32
from memcalc.spec.hardware.gpus import GpuSpec, find_gpu
from memcalc.spec.hardware.kernels import FLASH_LARGEST_HEAD, kernel_for_heads, needs_columns
from memcalc.spec.layers import fills_windows, has_padding_mask, masks_images, windows_among
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import family_of, rules_of
from memcalc.spec.programs import is_before
from memcalc.spec.spec import Spec
from memcalc.spec.training import LIGER_FAMILIES, TOKENWISE, ParallelismSpec, TrainingSpec

SEVERAL = 2  # chunks of a loss
SETS_USE_CACHE = "5.0"  # of transformers: the first release with a Trainer that sets `use_cache`, by default to false
CONCATENATES_CACHE = "4.56"  # of transformers: the first release with a cache that concatenates the first keys, too


class LayerKVCache(NamedTuple):
    """KV cache of a layer in one forward of generation.

    Args:
        cache_type: "dynamic", "static" or "paged".
        first: whether the cache is empty before.
        keys: axis of the tokens that attention reads.
        window: whether the layer has a sliding window.
        masked: whether a mask rules out flash attention.
        repeats: whether keys and values are first copied for every query head.
        slides: whether a static window is full and moves by one token.
        passes: whether a static window is shorter than the prompt, which attention then reads unchanged.
    """

    cache_type: str
    first: bool
    keys: str
    window: bool = False
    masked: bool = False
    repeats: bool = False
    slides: bool = False
    passes: bool = False


class BlockStructure(NamedTuple):
    """Options that decide which operators run, on tensors of which dtypes and axes."""

    implementation: str
    family: str
    normalization: str
    norm_weight: bool
    norm_bias: bool
    norms_per_layer: int
    norm_placement: str
    parallel_block: bool
    mlp: str
    gelu: str  # variant of gelu in transformers' modules
    gated_mlp: bool
    usual_intermediate_size: bool  # F = 4d, written 4·d
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    lm_head_bias: bool
    attention_sinks: bool
    qk_norm: bool
    qk_norm_width: str
    qk_norm_weight: bool
    position: str
    partial_rotary: bool  # RoPE on a part of each head
    position_table: str  # axis of the learned position embedding: "S" or "S+2"
    final_norm: bool
    embedding_norm: bool
    separate_embedding_size: bool
    tied: bool  # one gradient for embedding and LM head; on two pipeline stages each has one
    grouped: bool  # fewer key/value heads than query heads
    single_key_head: bool  # one key/value head for all query heads
    square: bool  # h·d_h = d, written d
    mla: bool
    query_latent: bool
    shared_expert: bool
    shared_gate: bool
    router_correction: bool  # a bias of the router's scores, by which experts are chosen
    has_experts: bool
    expert_bias: bool
    router_bias: bool
    attention: str
    attention_dropout: bool
    pads_heads: bool  # flash attention needs a head_dim that is a multiple of 8
    residual_dropout: bool
    embedding_dropout: bool
    batched: bool  # b > 1: heads split from a fused tensor are not contiguous
    compute: str
    parameters: str
    head_parameters: str  # dtype of the LM head's weight that a tiled loss reads
    autocast: bool
    selective: bool
    split: bool  # t > 1
    sequence_sharded: bool  # sequence parallelism
    dtensor: bool  # sharded by DTensor (memcalc/step/reference/tensor_parallel.py); else by Megatron-LM's modules
    unsharded_embedding_gradient: (
        bool  # the gradient of a sharded embedding is unsharded, see `table_gradient_is_unsharded`
    )
    context_sharded: bool  # c > 1: the rank has a part of every sequence
    all_to_all: bool  # context parallelism by an all-to-all of heads and tokens
    rotation: str  # how PyTorch's ring attention exchanges keys and values: "ring" or "all-gather"; else ""
    experts_sharded: bool  # e > 1
    expert_shard_suffix: str  # "/t" or "/t_e" where each expert is sharded across ranks, else ""
    recomputed_modules: tuple[str, ...]  # modules of selective recomputation, Megatron-LM's names
    loss: str
    loss_chunks: int
    composite_norms: bool  # torch.nn.RMSNorm as separate operators (before torch 2.9)
    fused_qkv: bool  # one linear layer for q, k and v
    adapters: Adapters | None  # adapters of a frozen base model
    recompute_keep: tuple[str, ...] = ()  # operators with results that recomputed layers keep
    detached: bool = False  # the layer's input needs no gradient: nothing before it trains
    reads_leaf: bool = False  # the layer's input is a leaf, and autocast caches the cast that its matmuls read
    cache: LayerKVCache | None = None  # the KV cache in generation
    fused_gate_up: bool = False  # transformers: one linear layer for gate and up
    fp8: str = "none"  # scaling recipe of Transformer Engine's FP8 GEMMs
    saves_on_host: str = "none"  # type of host memory for saved tensors
    checkpoints_layers: bool = False  # layers are checkpoints, so their arguments stay live until recomputation
    reentrant_checkpoints: bool = False  # a recomputed layer runs a backward of its own
    frees_tables: bool = False  # saved tensors are offloaded and none recomputed, so tables end with forward
    replaced_linears: bool = False  # DeepSpeed's stage 3 runs its own linear layers (runtime/zero/linear.py)
    caches_casts: bool = True  # autocast caches casts of leaves
    training_cache: str = "none"  # the model's output has a KV cache in training: "references" or "copies"
    fp8_columns: bool = False  # Transformer Engine makes a second FP8 copy for backward GEMMs
    float8: Float8 | None = None  # options of torchao's FP8 linear layers
    copies_scored_logits: bool = False  # the kernel of loss selective reads a copy of the logits
    upcasts_logits: bool = True  # the loss makes an fp32 copy of the logits
    recomputes_loss: bool = True  # a chunked loss checkpoints each chunk
    chunks_head: bool = True  # a chunked loss also chunks the LM head
    repeats_heads: bool = False  # attention copies keys and values for every query head before the flash kernel
    heads_first: bool = False  # plain attention's output is copied from heads to tokens
    fp32_norms: bool = False  # plain RMSNorms compute on an fp32 copy
    fp32_output: bool = False  # the program casts the model's output to fp32
    drops_logits: bool = False  # no variable of the loop references the model's output in backward
    evaluates: bool = False  # without gradients, between steps
    names_head_input: bool = False  # a variable of the model's forward references it until the loss is there
    shifts_logits: bool = False  # transformers' loss before 4.49
    liger: bool = False  # Liger's kernels replace transformers' norms, RoPE and MLPs
    window_mask: bool = False  # the model creates a mask for layers with a window shorter than the sequence
    padding_mask: str = "none"  # `training.padding_mask`, where layers use it
    windows: bool = False  # some layers have a sliding window
    has_full_attention: bool = True  # some layers have no sliding window
    recomputed_windows: bool = False  # some layers with a window are recomputed, so their arguments stay live
    recomputed_others: bool = False  # some layers without a window are recomputed, so their arguments stay live
    masked: bool = False  # this layer uses the window mask
    classifies: bool = False  # the head has labels instead of the vocabulary
    fp32_modules: tuple[str, ...] = ()  # modules with fp32 parameters, for any parameter dtype
    without_rope: bool = False  # this layer applies no RoPE
    linear: bool = False  # this layer has linear attention
    grouped_linear: bool = False  # linear attention with fewer key heads than value heads
    full_heads: bool = False  # this layer has the heads of `full_attention`
    scores_apart: bool = False  # chosen and rejected sequences have a loss each
    divergence: str = ""  # `training.divergence` of a run with a teacher
    teacher_logits: str = ""  # dtype of the teacher's logits
    full_grouped: bool = False  # as `grouped`, for layers with `full_heads`
    full_single_key_head: bool = False  # as `single_key_head`, for layers with `full_heads`
    full_attention: str = ""  # the attention kernel of layers with `full_heads`
    full_large_heads: bool = False  # as `large_heads`, for layers with `full_heads`
    large_heads: bool = False  # sdpa takes no grouped heads of this size, so transformers repeats keys and values
    keys_as_values: bool = False  # in layers with `full_heads` one projection makes keys and values
    mixer: str = ""  # letter of this layer's single module; empty: attention and an MLP
    conv_bias: bool = False  # the convolution before Mamba-2 has a bias
    mamba_bias: bool = False  # the projections of Mamba-2 have biases
    single_chunk: bool = False  # the sequence is one chunk of Mamba-2
    pads_chunks: bool = False  # the last chunk of Mamba-2 is padded
    latent_experts: bool = False  # tokens are projected to a latent before the routed experts, and back
    embedding_stays: bool = False  # the embedding's output is a leaf that the first layer does not save

    def of_layers(self, modules: LayerModules) -> BlockStructure:
        """Return the structure of a layer with these modules."""
        traits = (modules.masked, modules.without_rope, modules.linear, modules.mixer)
        if not (any(traits) or modules.full_heads or modules.starts_apart):
            return self
        found = self._replace(
            detached=self.detached or modules.detached,
            reads_leaf=modules.reads_leaf,
            masked=modules.masked,
            without_rope=modules.without_rope,
            linear=modules.linear,
            full_heads=modules.full_heads,
            mixer=modules.mixer,
        )
        if modules.full_heads:
            found = found._replace(
                grouped=self.full_grouped,
                single_key_head=self.full_single_key_head,
                large_heads=self.full_large_heads,
                attention=self.full_attention,
            )
        # With a mask transformers repeats keys and values, so the memory-efficient kernel supports them.
        repeated = found.attention == "math" and (found.masked or not found.grouped)
        return found._replace(attention="memory-efficient") if repeated else found

    def without_adapters(self) -> BlockStructure:
        """Return the structure with the adapters disabled; their frozen base, perhaps in 4 bits, stays."""
        base = None if self.adapters is None else self.adapters._replace(targets=(), saved=())
        return self._replace(adapters=base)

    def as_read_by_head(self) -> BlockStructure:
        """Return the structure without options that the LM head does not depend on, so its tape is compiled once."""
        return self if self.padding_mask == "none" else self._replace(padding_mask="none", masked=False)

    def as_read_by_others(self) -> BlockStructure:
        """Return the structure of other parts, which depend only on whether the loss has several chunks."""
        return self if self.loss_chunks <= SEVERAL else self._replace(loss_chunks=SEVERAL)

    @property
    def embedded(self) -> str:
        """The dtype of the embedding's output."""
        return "fp32" if in_fp32("embed_tokens", self.fp32_modules) else self.parameters

    @property
    def stream(self) -> str:
        """The dtype of hidden states between layers: that of the embedding's output and of what is added to it."""
        if self.autocast:
            return wider(self.embedded, self.compute)
        return self.parameters if self.implementation == "huggingface" else self.compute

    @property
    def keys(self) -> str:
        """The axis of keys and values: the tokens of this forward, or all tokens in the cache."""
        return "s" if self.cache is None else self.cache.keys

    @property
    def by_matmuls(self) -> bool:
        """Whether attention is matmuls per head, so that gradients of q, k and v are contiguous by head."""
        return self.attention in ("eager", "math")

    @property
    def head_gradient_is_a_view(self) -> bool:
        """Whether the LM head's weight gradient is a view of one matmul, not a sum, nor a fused loss's tensor."""
        whole = self.loss not in TOKENWISE or (self.loss == "chunked" and self.loss_chunks == 1)
        return whole and not self.replaced_linears


def _teacher_logits(spec: Spec) -> str:
    if spec.training.teacher is None:
        return ""
    return "fp32" if spec.training.logits_dtype == "fp32" else teacher_run(spec).training.dtype


@cached_by_spec
def block_structure(spec: Spec) -> BlockStructure:
    """Return the structure of a run."""
    model, training, parallelism = spec.model, spec.training, spec.parallelism
    dropout = partial(_dropout, model, training)
    huggingface, megatron = (training.implementation == each for each in ("huggingface", "megatron"))
    theirs = huggingface and spec.inference is not None  # modules of all families, by the plain block
    saves_on_host = "none" if spec.inference is not None else training.offload_activations
    offset = model.position_embedding_offset
    windows, has_full_attention = windows_among(model) if huggingface else (False, True)
    windows_again, others_again = recomputed_windows(spec) if huggingface else (False, False)
    return BlockStructure(
        implementation=training.implementation,
        family=family_of(model.architecture) if huggingface and model.architecture else "",
        normalization=model.normalization,
        norm_weight=model.norm_weight,
        norm_bias=model.norm_bias,
        norms_per_layer=model.norms_per_layer,
        norm_placement=model.norm_placement,
        parallel_block=model.parallel_block,
        mlp=model.mlp,
        gelu=model.gelu if huggingface else "exact",
        gated_mlp=model.gated_mlp,
        usual_intermediate_size=model.intermediate_size == 4 * model.hidden_size,
        qkv_bias=model.qkv_bias,
        output_bias=model.output_bias,
        mlp_bias=model.mlp_bias,
        lm_head_bias=model.lm_head_bias,
        attention_sinks=model.attention_sinks,
        qk_norm=model.qk_norm,
        qk_norm_width=model.qk_norm_width,
        qk_norm_weight=model.qk_norm_weight,
        position=model.position_embedding,
        partial_rotary=model.position_embedding == "rope" and model.rotary_dim < model.head_dim,
        position_table=f"S+{offset}" if offset else "S",
        final_norm=model.final_norm,
        embedding_norm=model.embedding_norm,
        separate_embedding_size=model.embedding_size != model.hidden_size,
        # The weight of a frozen base model gets no gradient, and PEFT's trained copies of its modules are separate.
        tied=model.tie_word_embeddings and parallelism.pipeline_parallel == 1 and training.lora is None,
        grouped=model.num_key_value_heads != model.num_attention_heads,
        single_key_head=model.num_key_value_heads == 1 < model.num_attention_heads,
        square=model.query_size == model.hidden_size,
        mla=model.mla is not None,
        query_latent=model.mla is not None and model.mla.q_lora_rank > 0,
        shared_expert=model.moe is not None and model.moe.shared_expert_intermediate_size > 0,
        shared_gate=model.moe is not None and model.moe.shared_expert_gate,
        router_correction=model.moe is not None and model.moe.router_correction_bias,
        has_experts=model.moe is not None,
        expert_bias=model.moe is not None and model.experts_have_bias,
        router_bias=model.moe is not None and model.moe.router_bias,
        attention=training.attention,
        pads_heads=training.attention == "flash" and model.head_dim % 8 > 0,
        attention_dropout=dropout("attention_dropout"),
        residual_dropout=dropout("residual_dropout"),
        embedding_dropout=huggingface and dropout("embedding_dropout"),
        batched=training.sequences > 1,
        compute=training.dtype,
        parameters=read_dtype(spec),
        head_parameters=base_dtype(training) if loss_gathers_head(spec) else read_dtype(spec),
        autocast=training.autocasts and training.implementation != "torchtitan",  # FSDP2 casts gathered parameters
        selective=training.recompute == "selective",
        split=parallelism.tensor_parallel > 1,
        sequence_sharded=parallelism.sequence_parallel and parallelism.tensor_parallel > 1,
        dtensor=split_by_dtensor(spec),
        unsharded_embedding_gradient=table_gradient_is_unsharded(spec),
        context_sharded=parallelism.context_parallel > 1,
        all_to_all=parallelism.context_parallel > 1 and parallelism.context_parallel_method == "all-to-all",
        rotation=parallelism.context_parallel_method if has_ring_attention(spec) else "",
        experts_sharded=parallelism.expert_parallel > 1,
        expert_shard_suffix=_expert_width_share(parallelism),
        recomputed_modules=training.recompute_modules if training.recompute == "selective" else (),
        loss=training.loss,
        loss_chunks=training.loss_chunks if training.loss == "chunked" else 1,
        composite_norms=training.torch < (2, 9) or theirs,
        fused_qkv=model.fused_qkv or (not huggingface and not _keeps_qkv_apart(spec)),
        adapters=_adapters_read(spec),
        recompute_keep=training.recompute_keep,
        detached=spec.inference is not None,
        fused_gate_up=huggingface and model.fused_gate_up,
        saves_on_host=saves_on_host,
        checkpoints_layers=training.recompute not in ("none", "selective"),
        reentrant_checkpoints=huggingface
        and training.reentrant_checkpoints
        and training.recompute not in ("none", "selective"),
        frees_tables=saves_on_host != "none"
        and training.recompute == "none",  # a checkpoint's closure references them as arguments
        replaced_linears=replaces_linears(spec),
        # lightning 2.6 pytorch/plugins/precision/amp.py, autocast_context_manager: cache_enabled=False
        # axolotl's loss is outside Accelerate's autocast, which has then dropped the casts that backward does not read.
        caches_casts=not (training.autocasts and (training.framework == "lightning" or training.loss == "selective")),
        training_cache=_training_cache(spec),
        fp8=training.fp8 if megatron else "none",
        fp8_columns=megatron and training.fp8 != "none" and needs_columns(training.fp8, _gpu(spec)),
        float8=float8_of(spec),
        copies_scored_logits=training.loss == "selective" and training.framework != "dpo",
        upcasts_logits=training.loss_upcast,
        recomputes_loss=training.loss_recompute,
        chunks_head=training.chunked_head,
        repeats_heads=training.repeat_kv and model.num_key_value_heads != model.num_attention_heads,
        heads_first=training.heads_first,
        fp32_norms=training.norm_dtype == "fp32",
        fp32_output=training.logits_dtype == "fp32",
        drops_logits=training.logits_until == "loss",
        shifts_logits=training.loss_shift == "logits" and (huggingface or training.evaluation_loss == "whole"),
        liger=huggingface and training.kernels == "liger" and (model.architecture or "") in LIGER_FAMILIES,
        window_mask=huggingface and (fills_windows(spec) or (masks_images(model) and has_padding_mask(spec))),
        classifies=model.num_labels > 0,
        padding_mask=_padding_mask(spec),
        fp32_modules=training.fp32_modules,
        scores_apart=training.scored_apart,
        divergence="" if training.teacher is None else training.divergence,
        teacher_logits=_teacher_logits(spec),
        windows=windows,
        has_full_attention=has_full_attention,
        recomputed_windows=windows_again,
        recomputed_others=others_again,
        grouped_linear=model.linear_attention is not None
        and model.linear_attention.num_key_heads < model.linear_attention.num_value_heads,
        latent_experts=model.moe is not None and model.moe.latent_size > 0,
        conv_bias=model.mamba is not None and model.mamba.conv_bias,
        mamba_bias=model.mamba is not None and model.mamba.projection_bias,
        single_chunk=model.mamba is not None and training.row_length <= model.mamba.chunk_size,
        pads_chunks=model.mamba is not None and training.row_length % model.mamba.chunk_size > 0,
        **_of_full_heads(spec),
    )


def _training_cache(spec: Spec) -> str:
    """Return how forward caches keys and values in training, if it does.

    Before transformers 5 the Trainer leaves the config's `use_cache: true`, unless layers are recomputed. From 4.56 on
    DynamicLayer.update (cache_utils.py) concatenates them with an empty tensor of the keys' dtype: a copy.
    """
    training = spec.training
    caches = training.framework == "trainer" and is_before(training.versions, "transformers", SETS_USE_CACHE)
    if not caches or training.recompute != "none" or spec.inference is not None:
        return "none"
    return "references" if is_before(training.versions, "transformers", CONCATENATES_CACHE) else "copies"


def _of_full_heads(spec: Spec) -> dict[str, Any]:
    """Return the options of layers with the heads of `full_attention`."""
    full, heads = spec.model.full_attention, spec.model.num_attention_heads
    if full is None:
        return {}
    return {
        "full_grouped": full.num_key_value_heads != heads,
        "full_single_key_head": full.num_key_value_heads == 1 < heads,
        "full_large_heads": full.head_dim > FLASH_LARGEST_HEAD,
        "full_attention": kernel_for_heads(spec.training.attention, full.head_dim),
        "keys_as_values": full.keys_as_values,
    }


def _padding_mask(spec: Spec) -> str:
    if not has_padding_mask(spec):
        return "none"
    return "boolean" if spec.training.padding_mask == "none" else spec.training.padding_mask


def _keeps_qkv_apart(spec: Spec) -> bool:
    adapters = None if spec.training.lora is None else adapters_of(spec)
    return adapters is not None and adapters.separate_qkv


def _adapters_read(spec: Spec) -> Adapters | None:
    """Return the adapters, with the dtype that modules read.

    PEFT casts an adapter's input to the dtype of its weight (peft 0.21 tuners/lora/layer.py, Linear.forward). Where the
    adapter is a unit of FSDP1, that is the dtype of its shard, since the unit is gathered afterwards; without original
    parameters only until the first gather, which is counted for all passes.
    """
    found, gathered = adapters_of(spec), spec.parallelism.fsdp.param_dtype
    if found is None or gathered is None:
        return found
    stored = found.dtype if spec.parallelism.engine == "fsdp1" else ""
    return found._replace(dtype=gathered, input_dtype=stored)


def _dropout(model: ModelSpec, training: TrainingSpec, field: str) -> bool:
    """Return whether a place has dropout: in transformers' modules only if the family's config has a rate."""
    if training.dropout is None:
        return bool(getattr(model, field))
    theirs = training.implementation == "huggingface" and model.architecture is not None
    has_rate = not theirs or field in rules_of(family_of(model.architecture or ""))
    return bool(training.dropout if has_rate else getattr(model, field))


def float8_of(spec: Spec) -> Float8 | None:
    """Return the options of torchao's FP8 linear layers; None without them."""
    training = spec.training
    if training.fp8 == "none" or training.implementation == "megatron" or spec.inference is not None:
        return None
    return Float8(training.fp8, training.fp8_skip, training.fp8_all_gather)


def _gpu(spec: Spec) -> GpuSpec | None:
    return None if spec.hardware.gpu is None else find_gpu(spec.hardware.gpu)


def _expert_width_share(parallelism: ParallelismSpec) -> str:
    if parallelism.expert_width_ranks == parallelism.tensor_parallel:
        return "/t" if parallelism.tensor_parallel > 1 else ""
    return "/t_e" if parallelism.expert_width_ranks > 1 else ""
