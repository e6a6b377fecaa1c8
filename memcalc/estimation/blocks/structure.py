"""What the shape of a block's tape depends on: choices, not sizes. Tapes are compiled once for each structure."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from memcalc.estimation.adapters import Adapters, adapters_of, read_dtype, replaces_linears
from memcalc.estimation.operators.base import wider
from memcalc.estimation.operators.float8 import Float8
from memcalc.estimation.remembered import remembered
from memcalc.estimation.stages import Kind, windows_run_again
from memcalc.spec.cards import Card, find_card
from memcalc.spec.families import family_of, rules_of
from memcalc.spec.fp32_modules import in_fp32
from memcalc.spec.kernels import needs_columns
from memcalc.spec.layers import fills_windows, has_padding_mask, windows_among
from memcalc.spec.model import ModelSpec
from memcalc.spec.recipes import RECIPES
from memcalc.spec.spec import Spec
from memcalc.spec.training import LIGER_FAMILIES, TOKENWISE, ParallelismSpec, TrainingSpec

SEVERAL = 2  # chunks of a loss


class Cached(NamedTuple):
    """How one forward of generation finds and leaves the keys and values of a layer.

    Args:
        kind: "dynamic", "static" or "paged".
        first: whether nothing is kept before.
        keys: axis of the tokens that attention reads.
        window: whether the layer attends to a window of tokens.
        masked: whether a mask keeps flash attention from running.
        repeats: whether keys and values are copied for every query head first.
        slides: whether a static window is full, and moves by one token.
        passes: whether a static window is shorter than the prompt, which attention then reads as it is.
    """

    kind: str
    first: bool
    keys: str
    window: bool = False
    masked: bool = False
    repeats: bool = False
    slides: bool = False
    passes: bool = False


class Structure(NamedTuple):
    """The choices that decide which operators run, on tensors of which dtypes and axes."""

    implementation: str
    family: str
    normalization: str
    norm_weight: bool
    norm_bias: bool
    norms_per_layer: int
    norm_placement: str
    parallel_block: bool
    mlp: str
    gelu: str  # of transformers' modules
    gated_mlp: bool
    usual_width: bool  # F = 4d, written 4·d
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    lm_head_bias: bool
    attention_sinks: bool
    qk_norm: bool
    qk_norm_width: str
    qk_norm_weight: bool
    position: str
    rotates_part: bool  # of each head
    position_table: str  # axis of the learned table: "S" or "S+2"
    final_norm: bool
    embedding_norm: bool
    own_embedding_width: bool
    tied: bool  # one gradient for table and head; two ends of a pipeline have one each
    grouped: bool  # fewer key/value heads than query heads
    one_key_head: bool  # which all query heads share
    square: bool  # h·d_h = d, written d
    mla: bool
    query_latent: bool
    shared_expert: bool
    shared_gate: bool
    has_experts: bool
    expert_bias: bool
    router_bias: bool
    attention: str
    attention_dropout: bool
    pads_heads: bool  # flash attention takes heads of a multiple of 8
    residual_dropout: bool
    embedding_dropout: bool
    batched: bool  # b > 1: heads cut out of a fused tensor are no longer adjacent in memory
    compute: str
    parameters: str
    autocast: bool
    selective: bool
    split: bool  # t > 1
    sequence_split: bool  # sequence parallelism
    dtensor: bool  # PyTorch's DTensor splits, by memcalc/step/tensor_parallel.py; else Megatron-LM's modules do
    whole_table_gradient: bool  # of a table whose rows are split, see `table_gradient_is_whole`
    context_split: bool  # c > 1: the rank has a part of every sequence
    all_to_all: bool  # context parallelism by an exchange of heads for tokens
    expert_split: bool  # e > 1
    expert_width_share: str  # "/t" or "/t_e" where each expert is split over ranks, else nothing
    recomputed_modules: tuple[str, ...]  # of selective recomputation, in Megatron-LM's words
    loss: str
    loss_chunks: int
    composite_norms: bool  # torch.nn.RMSNorm is several operators (before torch 2.9)
    fused_qkv: bool  # one matrix for q, k and v
    adapters: Adapters | None  # what trains where the rest is frozen
    recompute_keep: tuple[str, ...] = ()  # operators whose results recomputed layers keep
    detached: bool = False  # the layer's input needs no gradient: nothing before it trains
    cache: Cached | None = None  # of generation: where keys and values are kept
    fused_gate_up: bool = False  # of transformers' modules: one matrix for gate and up
    fp8: str = "none"  # how Transformer Engine scales what it multiplies in 8 bits
    saves_on_host: str = "none"  # in which memory of the host what autograd saves is
    checkpoints_layers: bool = False  # so what layers are called with stays until they have run again
    frees_tables: bool = False  # so nothing on the device refers to the layers' tables, once forward has returned
    replaced_linears: bool = False  # DeepSpeed's stage 3 runs its own linear layers (runtime/zero/linear.py)
    fp8_columns: bool = False  # and whether it makes a second copy for backward's products
    float8: Float8 | None = None  # and how torchao's linear layers do
    upcasts_logits: bool = True  # the loss makes an fp32 copy of the logits
    recomputes_loss: bool = True  # a chunked loss is checkpointed chunk by chunk
    chunks_head: bool = True  # and so is the head's product
    repeats_heads: bool = False  # plain attention copies keys and values for every query head
    heads_first: bool = False  # plain attention's output is copied token by token
    wide_norms: bool = False  # plain RMSNorms compute on an fp32 copy
    wide_output: bool = False  # the program converts the model's output to fp32
    drops_logits: bool = False  # the loop has no name for the model's output in backward
    evaluates: bool = False  # without gradients, between steps
    shifts_logits: bool = False  # transformers' loss, before 4.49
    liger: bool = False  # Liger's kernels in place of transformers' norms, rotary positions and MLPs
    window_mask: bool = False  # the model makes one, for layers whose window the sequence fills
    padding_mask: str = "none"  # as `training.padding_mask`, where layers attend under it
    windows: bool = False  # some layers have one
    others: bool = True  # some have none
    windows_again: bool = False  # and run again, so what they are called with stays until then
    others_again: bool = False  # likewise, of layers without
    masked: bool = False  # this layer attends under it
    classifies: bool = False  # the head has labels in place of the vocabulary
    fp32_modules: tuple[str, ...] = ()  # whose parameters are in fp32, whatever those of others are in
    unturned: bool = False  # this layer leaves queries and keys as they are, whatever their position
    embedding_stays: bool = False  # autograd has it as a leaf, and the first layer does not keep its input by itself

    def of_layers(self, kind: Kind) -> Structure:
        """That of layers of one kind."""
        if not (kind.detached or kind.masked or kind.unturned):
            return self
        return self._replace(detached=self.detached or kind.detached, masked=kind.masked, unturned=kind.unturned)

    def as_read_by_head(self) -> Structure:
        """The structure without what the head does not depend on, so that its tape is compiled once."""
        return self if self.padding_mask == "none" else self._replace(padding_mask="none", masked=False)

    def as_read_by_others(self) -> Structure:
        """The structure of other parts: they depend on whether the loss has several chunks, not on how many."""
        return self if self.loss_chunks <= SEVERAL else self._replace(loss_chunks=SEVERAL)

    @property
    def embedded(self) -> str:
        """The dtype of the embedding's rows."""
        return "fp32" if in_fp32("embed_tokens", self.fp32_modules) else self.parameters

    @property
    def stream(self) -> str:
        """The dtype of hidden states from layer to layer: that of the embedding's rows and of what is added to them."""
        if self.autocast:
            return wider(self.embedded, self.compute)
        return self.parameters if self.implementation == "huggingface" else self.compute

    @property
    def keys(self) -> str:
        """The axis of keys and values: the tokens of this forward, or all that the cache shows it."""
        return "s" if self.cache is None else self.cache.keys

    @property
    def head_gradient_is_a_view(self) -> bool:
        """Of one product of PyTorch's, not the sum of several, nor a tensor that a fused loss has made."""
        whole = self.loss not in TOKENWISE or (self.loss == "chunked" and self.loss_chunks == 1)
        return whole and not self.replaced_linears


@remembered
def structure_of(spec: Spec) -> Structure:
    """The structure of a run."""
    model, training, parallelism = spec.model, spec.training, spec.parallelism
    dropout = partial(_dropout, model, training)
    huggingface, megatron = (training.implementation == each for each in ("huggingface", "megatron"))
    theirs = huggingface and spec.inference is not None  # modules of all families, by the plain block
    saves_on_host = "none" if spec.inference is not None else training.offload_activations
    offset = model.position_embedding_offset
    windows, others = windows_among(model) if huggingface else (False, True)
    windows_again, others_again = windows_run_again(spec) if huggingface else (False, False)
    return Structure(
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
        usual_width=model.intermediate_size == 4 * model.hidden_size,
        qkv_bias=model.qkv_bias,
        output_bias=model.output_bias,
        mlp_bias=model.mlp_bias,
        lm_head_bias=model.lm_head_bias,
        attention_sinks=model.attention_sinks,
        qk_norm=model.qk_norm,
        qk_norm_width=model.qk_norm_width,
        qk_norm_weight=model.qk_norm_weight,
        position=model.position_embedding,
        rotates_part=model.position_embedding == "rope" and model.rotary_dim < model.head_dim,
        position_table=f"S+{offset}" if offset else "S",
        final_norm=model.final_norm,
        embedding_norm=model.embedding_norm,
        own_embedding_width=model.embedding_size != model.hidden_size,
        tied=model.tie_word_embeddings and parallelism.pipeline_parallel == 1,
        grouped=model.num_key_value_heads != model.num_attention_heads,
        one_key_head=model.num_key_value_heads == 1 < model.num_attention_heads,
        square=model.query_size == model.hidden_size,
        mla=model.mla is not None,
        query_latent=model.mla is not None and model.mla.q_lora_rank > 0,
        shared_expert=model.moe is not None and model.moe.shared_expert_intermediate_size > 0,
        shared_gate=model.moe is not None and model.moe.shared_expert_gate,
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
        autocast=training.autocasts and training.implementation != "torchtitan",  # FSDP2 casts what it gathers
        selective=training.recompute == "selective",
        split=parallelism.tensor_parallel > 1,
        sequence_split=parallelism.sequence_parallel and parallelism.tensor_parallel > 1,
        dtensor=split_by_dtensor(spec),
        whole_table_gradient=table_gradient_is_whole(spec),
        context_split=parallelism.context_parallel > 1,
        all_to_all=parallelism.context_parallel > 1 and parallelism.context_parallel_method == "all-to-all",
        expert_split=parallelism.expert_parallel > 1,
        expert_width_share=_expert_width_share(parallelism),
        recomputed_modules=training.recompute_modules if training.recompute == "selective" else (),
        loss=training.loss,
        loss_chunks=training.loss_chunks if training.loss == "chunked" else 1,
        composite_norms=training.torch < (2, 9) or theirs,
        fused_qkv=model.fused_qkv or (training.lora is None and not huggingface),
        adapters=_adapters_read(spec),
        recompute_keep=training.recompute_keep,
        detached=spec.inference is not None,
        fused_gate_up=huggingface and model.fused_gate_up,
        saves_on_host=saves_on_host,
        checkpoints_layers=training.recompute not in ("none", "selective"),
        frees_tables=saves_on_host != "none"
        and training.recompute == "none",  # a checkpoint's closure has them as an argument
        replaced_linears=replaces_linears(spec),
        fp8=training.fp8 if megatron else "none",
        fp8_columns=megatron and training.fp8 != "none" and needs_columns(training.fp8, _card(spec)),
        float8=float8_of(spec),
        upcasts_logits=training.loss_upcast,
        recomputes_loss=training.loss_recompute,
        chunks_head=training.chunked_head,
        repeats_heads=training.repeat_kv and model.num_key_value_heads != model.num_attention_heads,
        heads_first=training.heads_first,
        wide_norms=training.norm_dtype == "fp32",
        wide_output=training.logits_dtype == "fp32",
        drops_logits=training.logits_until == "loss",
        shifts_logits=huggingface and training.loss_shift == "logits",
        liger=huggingface and training.kernels == "liger" and (model.architecture or "") in LIGER_FAMILIES,
        window_mask=huggingface and fills_windows(spec),
        classifies=model.num_labels > 0,
        padding_mask=training.padding_mask if has_padding_mask(spec) else "none",
        fp32_modules=training.fp32_modules,
        windows=windows,
        others=others,
        windows_again=windows_again,
        others_again=others_again,
    )


def _adapters_read(spec: Spec) -> Adapters | None:
    """The adapters, in the dtype that modules read them in."""
    found, gathered = adapters_of(spec), spec.parallelism.fsdp.param_dtype
    return found if found is None or gathered is None else found._replace(dtype=gathered)


def _dropout(model: ModelSpec, training: TrainingSpec, field: str) -> bool:
    """Whether there is dropout in one place: of transformers' modules only where the family's config has a rate."""
    if training.dropout is None:
        return bool(getattr(model, field))
    theirs = training.implementation == "huggingface" and model.architecture is not None
    has_rate = not theirs or field in rules_of(family_of(model.architecture or ""))
    return bool(training.dropout if has_rate else getattr(model, field))


def float8_of(spec: Spec) -> Float8 | None:
    """How torchao multiplies, where it does."""
    training = spec.training
    if training.fp8 == "none" or training.implementation == "megatron" or spec.inference is not None:
        return None
    return Float8(training.fp8, training.fp8_skip, training.fp8_all_gather)


def _card(spec: Spec) -> Card | None:
    return None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)


def split_by_dtensor(spec: Spec) -> bool:
    """Whether PyTorch splits the layers, beside PyTorch's own engines; else they are Megatron-LM's."""
    parallelism = spec.parallelism
    own = spec.training.implementation == "plain" and parallelism.engine in ("ddp", "fsdp2")
    return own and spec.inference is None and parallelism.tensor_parallel > 1


def table_gradient_is_whole(spec: Spec) -> bool:
    """Whether the embedding's `.grad` is that of the whole table on every rank, though its rows are split.

    torch 2.13 torch/distributed/tensor/_ops/_embedding_ops.py, embedding_dense_backward_strategy: of an output gradient
    and indices that every rank has, so is the table's, and AccumulateGrad takes it as it is. Only a sum with a tied
    head's gradient or with a main gradient, or FSDP2 (_fsdp_param.py, _get_grad_inner_tensor), puts it where the
    parameter is.
    """
    parallelism = spec.parallelism
    tied = spec.model.tie_word_embeddings and parallelism.pipeline_parallel == 1
    stays = RECIPES[spec.training.recipe].gradients is not None
    sharded = parallelism.engine == "fsdp2" and parallelism.data_parallel > 1
    return split_by_dtensor(spec) and stays and not tied and not sharded


def _expert_width_share(parallelism: ParallelismSpec) -> str:
    if parallelism.expert_width_ranks == parallelism.tensor_parallel:
        return "/t" if parallelism.tensor_parallel > 1 else ""
    return "/t_e" if parallelism.expert_width_ranks > 1 else ""


def layout(model: ModelSpec, implementation: str, tensor_parallel: int = 1, *, adapted: bool = False) -> ModelSpec:
    """The model with the weight layout of the modules that run.

    Plain fuses q, k, v and keeps gate and up apart; Megatron-Core fuses both, and rounds the vocabulary up to a
    multiple of 128·t (Megatron-LM megatron/training/tokenizer: make_vocab_size_divisible_by). `adapted`: adapters
    stand beside the matrices of the checkpoint, so plain keeps q, k and v apart where it does.
    """
    changes: dict[str, object] = {}
    if implementation == "plain":
        own = adapted or model.mla is not None
        changes = {"fused_qkv": model.fused_qkv if own else True, "fused_gate_up": False}
    elif implementation == "megatron":
        step = 128 * tensor_parallel
        changes = {"fused_qkv": True, "fused_gate_up": True, "vocab_size": -(-model.vocab_size // step) * step}
    differing = {key: value for key, value in changes.items() if getattr(model, key) != value}
    return model.model_copy(update=differing) if differing else model
