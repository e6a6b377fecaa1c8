"""Persistent memory besides model states: the batch, module buffers, scales, library workspaces."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.fake_quantized_layers import fake_quantized_chunks, fake_quantized_layers
from memcalc.layout.local_parameters import LocalParameter, LocalParameters, stage_parameters
from memcalc.layout.parameters import mask_elements, table_elements
from memcalc.layout.peft_parameters import adapters_follow_the_head, loads_weights
from memcalc.layout.schedules import logits_released, uses_pipelining
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.layout.stages import Stage
from memcalc.layout.teacher import TEACHER, teacher_run, teacher_stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import EVALUATION, RowDraft, from_phase, mask_of
from memcalc.spec.finetuning import base_dtype
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.model_families.conversion import family_buffers
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE
from memcalc.states import megatron_buffers
from memcalc.states.gradient_policy import embedding_gradient_stays
from memcalc.states.pipeline_engine import loaded_batches
from memcalc.states.state_options import state_options
from memcalc.states.unsharded_weights import is_built_on_meta

ROTARY_TABLES, CAUSAL_MASKS = "RoPE cos/sin caches", "causal masks"  # tensor names of module buffers, as in rows


def persistent_rows(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> list[RowDraft]:
    """Return the persistent items of one stage.

    The backward thread's workspace is added within backward_1 by the timeline.
    """
    batch = loaded_batches(spec, stage) if spec.parallelism.has_pipeline_engine else inputs(spec)
    items = [*module_buffers(spec, stage), *batch, *logits_of_the_step_before(spec, stage)]
    if embedding_gradient_stays(spec) and spec.training.gradient_accumulation_steps == 1:
        items.append(remaining_gradient(spec))
    items += scales_of_layers(spec, stage_parameters(spec, stage))
    items += tensors_of_tuning(spec, stage)
    if spec.training.implementation == "megatron":
        items += megatron_buffers.persistent_buffers(spec, stage, stage_parameters(spec, stage), gpu)
    if uses_torch_products(spec, stage):
        items.append(workspace("forward", spec, gpu, from_phase("forward_1")))
        items.append(workspace("backward", spec, gpu, from_phase("optimizer_step_1")))
    return items


def module_buffers(spec: Spec, stage: Stage) -> list[RowDraft]:
    """Return the buffers of a model's modules."""
    items = registered_buffers(spec, stage)
    if spec.training.implementation == "torchtitan":
        items.append(torchtitan_rotary_cache(spec))
    if spec.training.framework == "torchtune":
        items += rotary_cache(spec)
    return items


def buffers_of_teacher(spec: Spec) -> list[RowDraft]:
    """Return the buffers of a teacher's modules, if there is a teacher."""
    if spec.training.teacher is None:
        return []
    found = module_buffers(teacher_run(spec), teacher_stage(spec))
    return [item._replace(module=f"{TEACHER}.{item.module}") for item in found]


def remaining_gradient(spec: Spec) -> RowDraft:
    """Return the embedding's gradient of the step before, in the phases that begin without other gradients."""
    dtype = base_dtype(spec.training)
    shape = (spec.model.vocab_size, spec.model.embedding_size)
    each = DTYPE_BYTES[dtype] * shape[0] * shape[1]
    mask, citation = mask_of("forward_2", "loss_2", "backward_2"), "LitGPT 0.5.13 finetune/lora.py: StableEmbedding"
    name, formula = "weight gradient of the step before", f"{DTYPE_BYTES[dtype]}·V·d"
    given = (each, rounded(each), mask, formula, citation)
    return RowDraft(Component.GRADIENTS, "embed_tokens.saved", name, shape, dtype, 1, *given)


def logits_of_the_step_before(spec: Spec, stage: Stage) -> list[RowDraft]:
    """Return the logits that a loop's variable references until the next forward returns.

    In backward they are counted with the LM head.
    """
    training = spec.training
    whole = training.loss not in TOKENWISE or not training.loss_recompute
    if not whole or not stage.has_head or spec.model.num_labels:
        return []
    found = []
    if logits_released(spec) == "step":
        passes = ("forward", "loss") if returns_loss(spec) else ("forward",)
        citation = "a variable of the training loop, until it is assigned again"
        found.append(_logits_before(spec, passes, "logits of the micro-batch before", citation))
    if training.reference_logits_until == "step":
        citation = "torchtune 0.6.1 recipes/lora_dpo_single_device.py: the variable `_`, until it is assigned again"
        name = "logits of the reference, of the micro-batch before"
        found.append(_logits_before(spec, ("forward", "loss"), name, citation))
    return found


def _logits_before(spec: Spec, passes: tuple[str, ...], name: str, citation: str) -> RowDraft:
    """Return logits of the micro-batch before, which are live until the end of these passes."""
    training = spec.training
    passing = (f"{each}_2" for each in passes)
    mask = mask_of("optimizer_step_1", "zero_grad_2", *passing, "optimizer_step_2", EVALUATION)
    if training.gradient_accumulation_steps > 1:
        mask |= mask_of(*(f"{each}_1" for each in passes))
    dtype = "fp32" if training.logits_dtype == "fp32" else training.dtype
    vocabulary = -(-spec.model.vocab_size // spec.parallelism.tensor_parallel)
    shape = (training.sequences, training.row_length // spec.parallelism.context_parallel, vocabulary)
    size = DTYPE_BYTES[dtype]
    each = size * shape[0] * shape[1] * shape[2]
    given = (each, rounded(each), mask, f"{size}·b·s·V", citation)
    return RowDraft(Component.LOGITS_AND_LOSS, "head", name, shape, dtype, 1, *given)


def returns_loss(spec: Spec) -> bool:
    """Whether the model computes the loss, as nanoGPT's does (`logits, loss = model(X, Y)`): transformers' too."""
    return spec.training.framework == "loop" or state_options(spec).model.loss_in_model


def uses_torch_products(spec: Spec, stage: Stage) -> bool:
    """Return whether PyTorch's matmuls run: with Transformer Engine only the output layer and the router use them."""
    routes = any(spec.model.layers_with_experts(piece.first, piece.stop) for piece in stage.chunks)
    return not spec.training.transformer_engine or stage.has_head or routes


def registered_buffers(spec: Spec, stage: Stage) -> list[RowDraft]:
    """Return the buffers that transformers' modules register: RoPE caches and router biases, a stage's part of them.

    While the model is built, also a separate LM head, which is freed when it is tied to the embedding.
    """
    if spec.training.implementation != "huggingface":
        return []
    model, buffers, mask = spec.model, family_buffers(spec.model.architecture), from_phase("model")
    citation = "transformers 5.23: nn.Buffer in the modeling files"
    # the dtype that models are built in (transformers modeling_utils.py, local_torch_dtype)
    base = state_options(spec).base
    corrections = model.moe.num_experts if model.moe is not None and model.moe.router_correction_bias else 0
    routers = sum(model.layers_with_experts(piece.first, piece.stop) for piece in stage.chunks)
    kinds = (
        (ROTARY_TABLES, table_elements(model) * stage.layers // model.num_layers, 1, "fp32"),
        (CAUSAL_MASKS, mask_elements(model) * stage.layers // model.num_layers, 1, "bool"),
        ("scales", buffers.scalars, 1, base),
        ("constants of activations", 1, buffers.layer_scalars * stage.layers, base),
        ("router biases", corrections, routers, base if buffers.narrow_corrections else "fp32"),
    )
    items = []
    for name, elements, count, dtype in kinds:
        size, axes = DTYPE_BYTES[dtype], (elements,)
        each = size * elements
        given = (each, rounded(each), mask, f"{size}·n", citation)
        if each * count:
            items.append(RowDraft(Component.WEIGHTS, "buffers", name, axes, dtype, count, *given))
    # A model that is loaded is made without weights (from_pretrained), so no head is made unnecessarily.
    on_gpu = not (loads_weights(spec) or is_built_on_meta(spec)) and spec.parallelism.fsdp.weights_from == "meta"
    in_vain = on_gpu and (spec.training.finetune == "full" or adapters_follow_the_head(spec))
    if spec.model.tie_word_embeddings and stage.has_head and in_vain:
        dtype = state_options(spec).base
        shape = (spec.model.vocab_size, spec.model.embedding_size)
        size = DTYPE_BYTES[dtype] * shape[0] * shape[1]
        citation = "transformers 5.23 modeling_utils.py: tie_weights follows construction"
        formula = f"{DTYPE_BYTES[dtype]}·V·{'d' if shape[1] == spec.model.hidden_size else 'd_e'}"
        head = RowDraft(
            Component.TEMPORARIES,
            "lm_head",
            "weight before it is tied",
            shape,
            dtype,
            1,
            size,
            rounded(size),
            mask_of("model"),
            formula,
            citation,
        )
        items.append(head)
    return items


def rotary_cache(spec: Spec) -> list[RowDraft]:
    """Return torchtune's RoPE cos/sin caches for all positions of each model: fp32 buffers shared by its layers."""
    model = spec.model
    if spec.training.implementation != "plain" or model.position_embedding != "rope":
        return []
    shape = (model.max_position_embeddings, model.rotary_dim)
    each = 4 * shape[0] * shape[1]
    citation = "torchtune 0.6.1 models/llama3_1/_position_embeddings.py, build_rope_cache"
    given = (each, rounded(each), from_phase("model"), "4·S·d_rot", citation)
    models = 2 if spec.training.reference_model else 1
    return [RowDraft(Component.WEIGHTS, "buffers", ROTARY_TABLES, shape, "fp32", models, *given)]


def torchtitan_rotary_cache(spec: Spec) -> RowDraft:
    """Return torchtitan's RoPE cache, a buffer of the model.

    Llama has a complex64 number for each position and pair of features, Qwen3 (with norms of queries and keys) an fp32
    cosine and sine for each position and feature.
    """
    length, width, mla = spec.training.sequence_length, spec.model.head_dim, spec.model.mla
    if mla is not None:
        shape, dtype, formula = (length, mla.qk_rope_head_dim // 2), "int64", "4·s·d_r"
        name = "deepseek_v3/model/model.py: freqs_cis"
    elif spec.model.qk_norm:
        shape, dtype, formula, name = (length, 2 * width), "fp32", "8·s·d_h", "qwen3/model/model.py: rope_cache"
    else:
        shape, dtype, formula, name = (length, width // 2), "int64", "4·s·d_h", "llama3/model/model.py: freqs_cis"
    each = DTYPE_BYTES[dtype] * shape[0] * shape[1]
    given = (each, rounded(each), from_phase("model"), formula, f"torchtitan 0.2.2 torchtitan/models/{name}")
    return RowDraft(Component.WEIGHTS, "buffers", ROTARY_TABLES, shape, dtype, 1, *given)


def tensors_of_tuning(spec: Spec, stage: Stage) -> list[RowDraft]:
    """Return the tensors that FlexAttention's compiled kernels keep after they were tuned.

    torchtitan compiles flex_attention of DeepSeek with max_autotune. From the first backward on PyTorch 2.13 references
    arguments and results of the tuned backward kernel (as large as queries, keys, values, the output and their
    gradients) and what the first layer saved, as in the memory history of a dry run.
    """
    model, training = spec.model, spec.training
    mla = model.mla
    if training.implementation != "torchtitan" or mla is None or not stage.layers:
        return []
    b, s = training.sequences, training.row_length
    heads = -(-model.num_attention_heads // spec.parallelism.tensor_parallel)
    source = "torchtitan 0.2.2 torchtitan/models/attention.py, FlexAttentionWrapper; torch 2.13 inductor, max_autotune"
    sizes = (
        ("queries and keys", mla.qk_nope_head_dim + mla.qk_rope_head_dim, "d_n+d_r", 8),
        ("keys and values", mla.qk_nope_head_dim + mla.v_head_dim, "d_n+d_v", 2),
        ("values and outputs", mla.v_head_dim, "d_v", 3),
    )
    item_bytes, rows = DTYPE_BYTES[training.dtype], list[RowDraft]()
    for name, width, symbol, count in sizes:
        each = item_bytes * b * s * heads * width
        formula = f"{item_bytes}·b·s·h·({symbol})"
        given = (each, rounded(each), from_phase("backward_1"), formula, source)
        shape = (b, s, heads, width)
        tensor = f"{name}, of tuned kernels"
        rows.append(RowDraft(Component.ACTIVATIONS, "flex_attention", tensor, shape, training.dtype, count, *given))
    return rows


@cached_by_spec
def inputs(spec: Spec) -> list[RowDraft]:
    """Return token ids and labels, int64, on the device from the phase `input` on.

    PyTorch's pipeline schedules split a batch of all micro-batches.
    """
    whole = uses_pipelining(spec)
    b = spec.training.sequences * (spec.training.gradient_accumulation_steps if whole else 1)
    s = -(-spec.training.row_length // spec.parallelism.context_parallel)
    each = 8 * b * s
    mask = from_phase("input")
    formula = f"8·{'m·' if whole else ''}b·s{'/c' if spec.parallelism.context_parallel > 1 else ''}"
    citation = "torch.int64 token ids"
    return [
        RowDraft(Component.INPUTS, "batch", name, (b, s), "int64", 1, each, rounded(each), mask, formula, citation)
        for name in ("token ids", "labels")
    ]


def workspace(thread: str, spec: Spec, gpu: GpuSpec | None, mask: int) -> RowDraft:
    """Return the cuBLAS workspace of one thread, from its first matmul on.

    torch ATen/cuda/CublasHandlePool.cpp, chosen workspace size: 32 MiB on compute capability 9.0, and since torch 2.12
    on all from 9.0 on (12.x included), else 2 x 4096 KiB + 8 x 16 KiB. Verified in the versions 2.6 to 2.13.
    """
    capability = (0, 0) if gpu is None or gpu.compute_capability is None else gpu.compute_capability
    large = capability >= (9, 0) if spec.training.torch >= (2, 12) else capability == (9, 0)
    each = 32 * 2**20 if large else (2 * 4096 + 8 * 16) * 2**10
    formula = "32 MiB" if large else "2·4096 KiB+8·16 KiB"
    citation = f"torch {spec.training.torch_version[1:]} ATen/cuda/CublasHandlePool.cpp"
    name = f"workspace of the {thread} thread"
    return RowDraft(
        Component.LIBRARY_WORKSPACE, "cuBLAS", name, (each,), "uint8", 1, each, each, mask, formula, citation
    )


SOURCE = "torchao 0.13 quantization/qat/fake_quantizer.py: IntxFakeQuantizer.scale, zero_point"


def scales_of_layers(spec: Spec, parameters: LocalParameters) -> Iterator[RowDraft]:
    """Yield an fp32 scale and a zero point for each group of a weight, and for each token of a layer's input.

    Every rank has those of whole weights; ranges with gradients are not kept. A pass replaces those of the pass before.
    The scales of a layer that runs on several chunks are counted with what it saves for backward.
    """
    training, layers, chunked = spec.training, fake_quantized_layers(spec), fake_quantized_chunks(spec)
    for parameter in parameters:
        name = parameter.module.rpartition(".")[2]
        if name not in layers or parameter.tensor != "weight":
            continue
        rows, columns = parameter.shape
        of_weight = (rows, columns // training.fake_quantization_group)
        tokens = training.row_length // (training.loss_chunks if name in chunked else 1)
        what = "zero points" if name in chunked else "scales and zero points"
        each = 1 if name in chunked else 2
        if training.fake_quantization == "int8-int4":
            yield _kept(parameter, f"{what} of the weight", of_weight, each, f"4·({parameter.formula})/g")
        formula = "4·b·s/m" if name in chunked else "4·b·s"
        yield _kept(parameter, f"{what} of the input", (training.sequences, tokens), each, formula)


def _kept(parameter: LocalParameter, name: str, shape: tuple[int, ...], count: int, formula: str) -> RowDraft:
    each = 4 * shape[0] * shape[1]
    given = (each, rounded(each), from_phase("forward_1"), formula, SOURCE)
    return RowDraft(Component.WEIGHTS, parameter.module, name, shape, "fp32", count * parameter.count, *given)
