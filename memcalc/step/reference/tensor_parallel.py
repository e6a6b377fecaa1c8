"""The reference decoder split over tensor-parallel ranks by PyTorch's DTensor, as torchtitan splits its Llama.

Source: torchtitan/models/llama3/infra/parallelize.py, apply_tp, with sequence parallelism; without it, PyTorch's
tutorial "Large Scale Transformer model training with Tensor Parallel". These do not cover learned positions, nor norms
without sequence parallelism: every rank replicates them, as with torchtitan's NoParallel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from memcalc.spec.spec import Spec
from memcalc.step.causal_lm import CausalLM, loss
from memcalc.step.reference.attention import Attention
from memcalc.step.reference.decoder import Decoder
from memcalc.step.reference.norms import HeadNorm

TOKENS = Shard(1)  # of (b, s, d)
HEADS = 2  # dimension of (b, s, h, d_h)


def split_over(model: CausalLM, spec: Spec, mesh: DeviceMesh) -> CausalLM:
    """Return the model with its weights split over the ranks of a mesh; every parameter becomes a DTensor.

    Args:
        model: on the meta device.
        spec: the run, which `refuse_split` accepts.
        mesh: the tensor-parallel ranks, one dimension.
    """
    decoder = cast("Decoder", model.module)
    split_module(decoder, spec, mesh)
    if spec.model.tie_word_embeddings:  # both are split in the same way
        decoder.lm_head.weight = decoder.embed_tokens.weight
    return replace(
        model, loss=loss if splits_loss(spec) else model.loss, contexts=partial(surroundings, apart=splits_loss(spec))
    )


def split_module(module: nn.Module, spec: Spec, mesh: DeviceMesh) -> None:
    """Split the weights of the decoder, or of the layers of one pipeline stage, over the ranks of a mesh."""
    parallelize_module(module, mesh, plan_of(module, spec))
    for part in module.modules():
        if isinstance(part, Attention):
            part.shard_heads(mesh.size())


def splits_loss(spec: Spec) -> bool:
    """Return whether the loss is computed on sharded logits."""
    return spec.training.loss == "vocab-parallel"


def plan_of(decoder: nn.Module, spec: Spec) -> dict[str, ParallelStyle]:
    """Return the parallel style of every module with parameters or split inputs, by path."""
    sequence = spec.parallelism.sequence_parallel
    stream: Placement = TOKENS if sequence else Replicate()  # placement of the residual stream
    plan: dict[str, ParallelStyle] = {}
    for path, module in decoder.named_modules():
        name = path.rpartition(".")[2]
        if name in ("attention", "mlp") and sequence:
            others = (None,) if name == "attention" else ()  # attention also gets the shared tensors
            plan[path] = PrepareModuleInput(
                input_layouts=(TOKENS, *others), desired_input_layouts=(Replicate(), *others)
            )
        elif name == "embed_tokens":
            plan[path] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        elif name == "embed_positions":
            plan[path] = ReplicatedModule(Shard(0) if sequence else Replicate())
        elif name in ("qkv_proj", "up_proj", "gate_proj"):
            plan[path] = ColwiseParallel()
        elif name in ("o_proj", "down_proj"):
            plan[path] = RowwiseParallel(output_layouts=stream)
        elif name == "lm_head":
            apart = splits_loss(spec)
            plan[path] = ColwiseParallel(
                input_layouts=stream,
                output_layouts=Shard(-1) if apart else Replicate(),
                use_local_output=not apart,
            )
        elif isinstance(module, HeadNorm):
            plan[f"{path}.norm"] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        elif name.endswith("norm") and not isinstance(module, nn.Identity) and path not in plan:
            # Modules that read a norm's output accept a DTensor; the output of a norm after a module is added to the
            # residual.
            added = name.endswith("output_norm") or name == "embed_norm"
            plan[path] = SequenceParallel(use_local_output=added) if sequence else ReplicatedModule(Replicate())
    return plan


class ReplicatedModule(ParallelStyle):
    """A module that every rank replicates, and runs on its shard of the input or on all of it.

    Args:
        part: placement of the module's input; the given input is replicated.
    """

    def __init__(self, part: Placement) -> None:
        super().__init__()
        self.part = part

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def into(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            given = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
            return given.redistribute(placements=[self.part])

        def out(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, into, out)


@contextmanager
def surroundings(*, apart: bool) -> Iterator[None]:
    """Context for a loss on sharded logits; it silences FSDP2's warning about views, which the step does not modify."""
    with warnings.catch_warnings(), loss_parallel() if apart else nullcontext():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield
