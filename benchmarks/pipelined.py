"""One rank of a pipeline: the reference decoder's layers of one stage, in torch.distributed.pipelining's schedules.

Every rank has the batch of all micro-batches, and no outputs are merged (return_outputs=False), as in torchtitan 0.2.2
(torchtitan/train.py, forward_backward_step). The other ranks are PyTorch's fake process group, so stages get what
they would agree on: all of them know the shapes of what they send.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from memcalc.layout.stages import Stage, stages_of
from memcalc.spec.spec import Spec
from memcalc.step.causal_lm import default_dtype, loss
from memcalc.step.dtypes import compute_dtype, weight_dtype
from memcalc.step.optimizers import build_optimizer, hidden_matrices
from memcalc.step.ranks import mixed_precision
from memcalc.step.recipes import Copies
from memcalc.step.recompute import contexts_of, plan_of, run_plan
from memcalc.step.reference.decoder import Layer
from memcalc.step.reference.norms import norm
from memcalc.step.reference.positions import prepare
from memcalc.step.reference.tensor_parallel import split_module, splits_loss, surroundings

MESH = ("pipeline", "data", "tensor")
SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
}


class Piece(nn.Module):
    """The layers of a stage, or of one chunk of it; with embedding and LM head at the ends of the model."""

    def __init__(self, spec: Spec, stage: Stage) -> None:
        super().__init__()
        model, self.spec, self.stage = spec.model, spec, stage
        assert model.embedding_size == model.hidden_size
        assert not model.embedding_norm
        first = stage.has_embedding
        rows = model.max_position_embeddings + model.position_embedding_offset
        learned = first and model.position_embedding == "learned"
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size) if first else None
        self.embed_positions = nn.Embedding(rows, model.hidden_size) if learned else None
        places = range(stage.first, stage.stop)
        self.layers = nn.ModuleDict({str(at): Layer(model, spec.training, at) for at in places})
        self.norm = norm(model, model.hidden_size) if stage.has_head and model.final_norm else None
        self.lm_head = None
        if stage.has_head:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=model.lm_head_bias)
        self.plan = [
            item
            for item in plan_of(spec.training, model.num_layers)
            if (item if isinstance(item, int) else item[0]) in places
        ]
        self.contexts = contexts_of(spec)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or hidden states (b, s, d) to hidden states or logits."""
        model, training = self.spec.model, self.spec.training
        length = training.sequence_length  # sequence parallelism passes on a part of it
        if self.embed_tokens is not None:
            ids, x = x, self.embed_tokens(x)
            if self.embed_positions is not None:
                first = model.position_embedding_offset
                x = x + self.embed_positions(torch.arange(first, first + length, device=ids.device))
        tables = prepare(model, training.attention, length, compute_dtype(training), x.device)
        x = run_plan(self.plan, x, lambda index, x: self.layers[str(index)](x, tables), self.contexts)
        x = x if self.norm is None else self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


def pipelined(spec: Spec, phases: Any, rank: int, steps: int) -> None:
    """Train for a few steps on one rank; `rank` is its stage."""
    device = torch.device("cuda", 0)
    parallelism, training, micro_batches = spec.parallelism, spec.training, spec.training.gradient_accumulation_steps
    stage = stages_of(spec)[rank]
    degrees = parallelism.pipeline_parallel, parallelism.data_parallel, parallelism.tensor_parallel
    mesh = init_device_mesh("cuda", degrees, mesh_dim_names=MESH)
    shards = parallelism.engine == "fsdp2" and parallelism.data_parallel > 1
    splits = parallelism.tensor_parallel > 1
    place = torch.device("meta") if shards or splits else device
    with phases.phase("model"), place, default_dtype(weight_dtype(training)):
        pieces = [Piece(spec, piece) for piece in stage.chunks]
        for piece in pieces if splits else ():
            split_module(piece, spec, mesh["tensor"])
        for piece in pieces if shards else ():
            shard(piece, spec, mesh["data"])
        for piece in pieces if shards or splits else ():
            piece.to_empty(device=device)
    module = nn.ModuleList(pieces)
    with phases.phase("optimizer"):
        parts: list[nn.Module] = [*pieces]
        if parallelism.data_parallel > 1 and not shards:
            wrapped = [DistributedDataParallel(piece, [0], process_group=mesh.get_group("data")) for piece in pieces]
            for part in wrapped:
                part.register_comm_hook(None, noop_hook)  # as memcalc/step/ranks.py, replicated
            parts = [*wrapped]
        copies = Copies(module.parameters(), training)
        tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
        hidden = copies.optimized_as(hidden_matrices(module))
        optimizer = build_optimizer(training, copies.optimized, hidden, tables)
    shape = (training.micro_batch_size * micro_batches, training.sequence_length)
    with phases.phase("input"):
        ids, labels = (torch.randint(spec.model.vocab_size, shape, device=device) for _ in range(2))
    schedule = schedule_of(spec, parts, stage, mesh.get_group("pipeline"), phases)
    for step in range(1, steps + 1):
        with phases.phase(f"zero_grad_{step}"):
            copies.zero_grad(set_to_none=training.zero_grad == "set_to_none")
        phases.step = step
        words = {"target": labels} if stage.has_head else {}
        # The phase has what follows the last part of a micro-batch.
        with phases.phase(f"backward_{step}"), surroundings(apart=splits_loss(spec)):
            schedule.step(*((ids,) if stage.has_embedding else ()), **words, return_outputs=False)
        with phases.phase(f"optimizer_step_{step}"):
            copies.step(optimizer)


def shard(piece: Piece, spec: Spec, mesh: DeviceMesh) -> None:
    """FSDP2 of a chunk in torchtitan's units (models/llama3/infra/parallelize.py, apply_fsdp)."""
    parallelism = spec.parallelism
    again = parallelism.zero_stage == 3
    wrap = partial(fully_shard, mesh=mesh, mp_policy=mixed_precision(parallelism.fsdp))
    if parallelism.fsdp.wrap == "layers-and-ends" and piece.embed_tokens is not None:
        wrap(piece.embed_tokens, reshard_after_forward=again)
    for layer in piece.layers.values():
        wrap(layer, reshard_after_forward=again)
    if parallelism.fsdp.wrap == "layers-and-ends" and piece.lm_head is not None:
        wrap([part for part in (piece.norm, piece.lm_head) if part is not None], reshard_after_forward=False)
    wrap(piece, reshard_after_forward=None if again else False)


def schedule_of(spec: Spec, pieces: list[nn.Module], stage: Stage, group: Any, phases: Any) -> Any:
    """The schedule, with what each part of a micro-batch holds counted by phase."""
    training, parallelism = spec.training, spec.parallelism
    parts, device = parallelism.pipeline_parallel * len(pieces), torch.device("cuda", 0)
    width = training.micro_batch_size, training.sequence_length
    ranks = parallelism.tensor_parallel if parallelism.sequence_parallel else 1
    hidden = (width[0], width[1] // ranks, spec.model.hidden_size)
    casts = training.recipe != "fp32" or parallelism.fsdp.param_dtype is not None
    dtype = compute_dtype(training) if casts else torch.float32
    passed = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
    ids = torch.empty(width, dtype=torch.int64, device="meta")
    logits = torch.empty((*width, spec.model.vocab_size), dtype=dtype, device="meta", requires_grad=True)
    found: list[Any] = []
    for number, (piece, part) in enumerate(zip(pieces, stage.chunks, strict=True)):
        given, made = ids if part.has_embedding else passed, logits if part.has_head else passed
        place = stage.index + number * parallelism.pipeline_parallel
        each: Any = PipelineStage(piece, place, parts, device, input_args=given, output_args=made, group=group)
        each._warmup_forward_vote = each._warmup_backward_result = lambda *_, **__: torch.ones(1)  # noqa: SLF001
        each.forward_one_chunk = counted(each.forward_one_chunk, phases, "forward")
        each.backward_one_chunk = counted(each.backward_one_chunk, phases, "backward")
        found.append(each)
    stages: Any = found if parallelism.schedule == "interleaved" else found[0]
    kind = SCHEDULES[parallelism.schedule]
    return kind(stages, training.gradient_accumulation_steps, loss_fn=counted(loss, phases, "loss"))


def counted(function: Callable[..., Any], phases: Any, name: str) -> Callable[..., Any]:
    """The function, in a phase of its own of the current step."""

    def inside(*arguments: Any, **words: Any) -> Any:
        with phases.phase(f"{name}_{phases.step}"):
            return function(*arguments, **words)

    return inside
