"""Buffers of Megatron-Core and Transformer Engine besides model states and activations.

Sources: Transformer Engine 2.11 pytorch/module/base.py, pytorch/cpp_extensions/gemm.py; Megatron-LM core_r0.14
core/tensor_parallel/layers.py, core/utils.py, core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import LocalParameters
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, from_phase, mask_of
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.transformer_engine import weight_caches

MIB = 2**20

# Streams of grouped GEMMs (Transformer Engine 2.11 common/util/multi_stream.cpp: nvte_get_num_compute_streams), each
# with a separate workspace (pytorch/cpp_extensions/gemm.py, get_cublas_workspace).
STREAMS = 4
GROUPED_WORKSPACES = "workspace of Transformer Engine's grouped GEMMs"

# Norms have one axis; embeddings and routers use PyTorch's operators.
WITHOUT_SCRATCH = ("embed_tokens", "embed_positions", "mlp.router", "shared_expert_gate")

EVERY_PASS = mask_of("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")


def persistent_buffers(
    spec: Spec, stage: Stage, parameters: LocalParameters, gpu: GpuSpec | None
) -> Iterator[RowDraft]:
    """Yield the persistent buffers of one stage."""
    if spec.training.transformer_engine:
        yield from weight_gradient_scratch(spec, parameters)
        yield engine_workspace(gpu)
        if spec.model.moe is not None:
            yield engine_workspace(gpu)._replace(tensor=GROUPED_WORKSPACES, count=STREAMS)
        yield from weight_caches(spec, parameters, gpu)
    if spec.model.position_embedding == "rope":
        yield rotary_table(spec)
    if not spec.training.transformer_engine:
        yield score_buffer(spec)
    elif spec.parallelism.sequence_parallel and spec.parallelism.tensor_parallel > 1 and stage.has_head:
        yield gather_buffer(spec)
    if stage.index > 0 and spec.training.gradient_accumulation_steps > 1:
        yield sent_gradient(spec)
    several = spec.training.gradient_accumulation_steps > 1
    if not stage.has_head and several and spec.parallelism.schedule == "1f1b":
        # the loop's variable output_tensor_grad references the last one during the next micro-batch's forward
        yield received_gradient(spec)._replace(mask=mask_of("forward_1", "forward_2"))


def weight_gradient_scratch(spec: Spec, parameters: LocalParameters) -> Iterator[RowDraft]:
    """Yield one tensor per weight shape, allocated in the first backward and never freed.

    The GEMM adds a weight's gradient to its main gradient. Autograd runs a hook only if it gets a tensor of the
    weight's shape, so all layers share a tensor that no code reads (get_dummy_wgrad).
    """
    dtype = spec.training.dtype
    citation = "Transformer Engine 2.11 pytorch/module/base.py: get_dummy_wgrad"
    shapes: dict[tuple[int, ...], str] = {}
    for parameter in parameters:
        shape = parameter.shape[1:] if parameter.routed else parameter.shape  # each expert is a separate weight
        if len(shape) == 2 and not parameter.module.endswith(WITHOUT_SCRATCH):
            shapes.setdefault(shape, parameter.formula.partition("·")[2] if parameter.routed else parameter.formula)
    mask = from_phase("backward_1")
    for shape, formula in shapes.items():
        each = DTYPE_BYTES[dtype] * shape[0] * shape[1]
        name = f"weight-gradient scratch of {shape[0]} x {shape[1]}"
        text = f"{DTYPE_BYTES[dtype]}·{formula}"
        yield RowDraft(
            Component.TEMPORARIES, "engine", name, shape, dtype, 1, each, rounded(each), mask, text, citation
        )


def engine_workspace(gpu: GpuSpec | None) -> RowDraft:
    """Return Transformer Engine's cuBLAS workspace, one for both threads."""
    hopper = gpu is not None and gpu.compute_capability is not None and gpu.compute_capability >= (9, 0)
    each = 32 * MIB + 1024 if hopper else 4 * MIB
    formula = "32 MiB+1024" if hopper else "4 MiB"
    citation = "Transformer Engine 2.11 pytorch/cpp_extensions/gemm.py: get_cublas_workspace_size_bytes"
    mask = from_phase("forward_1")
    name = "workspace of Transformer Engine"
    component = Component.LIBRARY_WORKSPACE
    return RowDraft(component, "cuBLAS", name, (each,), "uint8", 1, each, rounded(each), mask, formula, citation)


def rotary_table(spec: Spec) -> RowDraft:
    """Return the RoPE angles for the rank's part of the sequence, cached from the first forward on."""
    length = -(-spec.training.sequence_length // spec.parallelism.context_parallel)
    width = spec.model.rotary_dim
    each = 4 * length * width
    formula = "4·s/c·d_rot" if spec.parallelism.context_parallel > 1 else "4·s·d_rot"
    citation = "Megatron-LM core_r0.14 core/models/common/embeddings/rotary_pos_embedding.py: lru_cache"
    mask = from_phase("forward_1")
    shape = (length, width)
    return RowDraft(
        Component.WEIGHTS, "buffers", "angles", shape, "fp32", 1, each, rounded(each), mask, formula, citation
    )


def gather_buffer(spec: Spec) -> RowDraft:
    """Return the gathered input of the output layer, in a global buffer allocated once (GlobalMemoryBuffer, "mpu")."""
    citation = "Megatron-LM core_r0.14 core/tensor_parallel/layers.py: get_global_memory_buffer"
    return _hidden(spec, "gathered input of the output layer", from_phase("loss_1"), citation, whole=True)


def score_buffer(spec: Spec) -> RowDraft:
    """Return the input buffer of query-key matmuls: never read, allocated once, never freed.

    Under sequence parallelism the gathered inputs of linear layers share this buffer (GlobalMemoryBuffer, "mpu"), so it
    is as large as the largest of them.
    """
    training, ranks = spec.training, spec.parallelism.tensor_parallel
    length, size = training.sequence_length, DTYPE_BYTES[training.dtype]
    heads = spec.model.num_attention_heads // ranks
    shape: tuple[int, ...] = (training.micro_batch_size, heads, length, length)
    formula = f"{size}·b·h{'/t' if ranks > 1 else ''}·s²"
    gathered = (training.micro_batch_size, length, spec.model.hidden_size)
    if spec.parallelism.sequence_parallel and ranks > 1 and math.prod(gathered) > math.prod(shape):
        shape, formula = gathered, f"{size}·b·s·d"
    each = size * math.prod(shape)
    citation = "Megatron-LM core_v0.16 core/transformer/dot_product_attention.py: matmul_input_buffer"
    given = (each, rounded(each), from_phase("forward_1"), formula, citation)
    return RowDraft(Component.TEMPORARIES, "engine", "buffer of attention scores", shape, training.dtype, 1, *given)


def sent_gradient(spec: Spec) -> RowDraft:
    """Return the gradient sent to the previous stage: its variable references it until the next one replaces it."""
    citation = "Megatron-LM core_r0.14 core/pipeline_parallel/schedules.py: input_tensor_grad"
    return _hidden(spec, "gradient sent to the stage before", EVERY_PASS, citation, whole=False)


def received_gradient(spec: Spec) -> RowDraft:
    """Return the gradient received from the next stage, which backward_step references until backward has ended."""
    citation = "Megatron-LM core_r0.14 core/pipeline_parallel/schedules.py: backward_step(output_tensor_grad)"
    return _hidden(spec, "gradient received from the next stage", 0, citation, whole=False)


def _hidden(spec: Spec, name: str, mask: int, citation: str, *, whole: bool) -> RowDraft:
    """Return a tensor of hidden states: of the rank's part of the sequence, or of all parts if `whole`."""
    parallelism = spec.parallelism
    length = -(-spec.training.sequence_length // parallelism.context_parallel)
    ranks = "c" if parallelism.context_parallel > 1 else ""
    if parallelism.sequence_parallel and parallelism.tensor_parallel > 1 and not whole:
        length = -(-length // parallelism.tensor_parallel)
        ranks = f"({ranks}·t)" if ranks else "t"
    shape = (spec.training.micro_batch_size, length, spec.model.hidden_size)
    dtype = spec.training.dtype
    each = DTYPE_BYTES[dtype] * shape[0] * shape[1] * shape[2]
    formula = f"{DTYPE_BYTES[dtype]}·b·s{'/' + ranks if ranks else ''}·d"
    component = Component.COMMUNICATION_BUFFERS
    return RowDraft(component, "engine", name, shape, dtype, 1, each, rounded(each), mask, formula, citation)
