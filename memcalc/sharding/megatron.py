"""Megatron-Core's DistributedDataParallel, and the optimizers that update its parameters (Megatron-LM core_v0.16.1).

The wrapper copies weights and gradients into contiguous buffers, on a CUDA stream of its own (training/training.py,
get_model): a buffer of main gradients; with the distributed optimizer also one of weights, and then each rank updates
an equal contiguous slice of both (core/distributed/param_and_grad_buffer.py). A gradient that autograd produces is
added to its main gradient and freed at once, so backward needs no hook here.

The optimizer has an fp32 main parameter of each parameter, or of the rank's part of it, first of those with weight
decay and then of biases and norms (core/optimizer/__init__.py, _get_param_groups). Both groups are updated separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.ledger.component import Component
from memcalc.sharding.engine import Engine, KernelPass, OptimizerGroups
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.recompute_plan import Segment
from memcalc.spec.spec import Spec
from memcalc.states.megatron_grad_buffer import buffer_elements, rank_parts
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import Requests
from memcalc.workspaces.reductions import norm

BUFFER_STREAM = 1  # the CUDA stream on which the wrapper is constructed
FLOAT = DTYPE_BYTES["fp32"]


def lacks(spec: Spec, plan: Segment) -> Iterator[str]:
    """Yield the properties of a run of Megatron-Core that prevent its replay: no recorded run has them."""
    training, parallelism = spec.training, spec.parallelism
    pipelined = parallelism.pipeline_parallel > 1
    found = {
        "Megatron-LM's buffers around other modules": training.implementation != "megatron",
        "Transformer Engine's modules": training.transformer_engine,
        f"Megatron-Core's schedule {parallelism.schedule}": pipelined and parallelism.schedule != "1f1b",
        "fewer micro-batches than Megatron-Core's stages": pipelined
        and training.gradient_accumulation_steps < parallelism.pipeline_parallel,
        # Its gradients are reduced in a bucket of their own.
        "a tied embedding's shards over Megatron-Core's stages": pipelined
        and spec.model.tie_word_embeddings
        and parallelism.zero_stage > 0
        and parallelism.shards > 1,
        "evaluation in Megatron-Core's pipelines": pipelined and training.evaluation_batch_size is not None,
        "context parallelism": parallelism.context_parallel > 1,
        "expert parallelism": parallelism.expert_parallel > 1,
        "Megatron-Core's sequence parallelism": parallelism.sequence_parallel and parallelism.tensor_parallel > 1,
        f"optimizer {training.optimizer} of Megatron-Core": training.optimizer not in ("adam", "adamw"),
        "a checkpoint of several layers of Megatron-Core": not all(
            isinstance(item, int) or len(item) == 1 for item in plan
        ),
        "an offloaded optimizer of Megatron-Core": parallelism.offload != "none",
    }
    return (name for name, is_so in found.items() if is_so)


class MainParameter(NamedTuple):
    """A parameter, or the rank's part of one, as the optimizer updates it.

    Args:
        parameter: the parameter.
        elements: the number of elements that the rank updates.
    """

    parameter: LocalParameter
    elements: int

    @property
    def decays(self) -> bool:
        """Whether the optimizer decays it: neither a bias nor a tensor of one axis."""
        return not (self.parameter.tensor == "bias" or len(self.parameter.shape) == 1)


class MegatronBuffers(NamedTuple):
    """Sizes of buffers that modules allocate when they first run. Bytes; 0: there is none.

    Args:
        scores: an input of query-key matmuls that is never read.
        angles: the RoPE angles of all positions.
        l2_cache: the GPU's L2 cache.
    """

    scores: int
    angles: int
    l2_cache: int


class MegatronDDP(Engine):
    """One rank of Megatron-Core's DistributedDataParallel with its optimizer.

    Args:
        requests: the list of requests to record to.
        ordered: all parameters, in registration order.
        options: state options of the run.
        buffers: sizes of the modules' buffers.
        rank: the data-parallel rank.
    """

    hooks_first_runs = True

    def __init__(
        self,
        requests: Requests,
        ordered: Sequence[LocalParameter],
        options: StateOptions,
        buffers: MegatronBuffers,
        rank: int = 0,
    ) -> None:
        super().__init__(requests)
        self.buffers = buffers
        self.used: set[str] = set()  # the buffers that exist, and the kernels that are compiled
        self.options = options
        self.distributed = options.zero_stage > 0  # the distributed optimizer
        self.trained = tuple(parameter for parameter in ordered if parameter.trains)
        self.weight_bytes = DTYPE_BYTES[options.base]
        self.gradient_bytes = DTYPE_BYTES[options.gradients or "fp32"]
        ranks = options.data_parallel if self.distributed else 1
        self.elements = buffer_elements(self.trained, ranks, pads=self.distributed)
        parts = rank_parts(self.trained, ranks, rank) if self.distributed else _whole(self.trained)
        main = [MainParameter(parameter, elements) for parameter, elements in parts]
        groups = ([each for each in main if each.decays], [each for each in main if not each.decays])
        self.groups = [group for group in groups if group]
        self.gradients: list[int] = []  # fp32 copies of the main gradients, from the step until the next zero_grad
        # The copies of a step are freed in the next one's forward.
        self.repeats = not self._copies_gradients

    @property
    def _copies_gradients(self) -> bool:
        """Whether main gradients are not fp32, so that the step casts them."""
        return self.gradient_bytes < FLOAT

    def wrap(self, weights: Sequence[int]) -> None:
        """Allocate the buffers, which replace the weights under the distributed optimizer; then the main parameters.

        Source: core/distributed/param_and_grad_buffer.py, _ParamAndGradBuffer.__init__; core/optimizer/optimizer.py,
        Float16OptimizerWithFloat16Params.__init__, and distrib_optimizer.py, _build_model_and_main_param_groups:
        `param.clone().float()`.
        """
        take = self.requests.take
        if self.distributed:
            take(self.elements * self.weight_bytes, BUFFER_STREAM, Component.WEIGHTS)
        take(self.elements * self.gradient_bytes, BUFFER_STREAM, Component.GRADIENTS)
        if self.distributed:
            self.requests.drop(reversed(weights))
        if self.weight_bytes == FLOAT:
            return
        for main in self._main_parameters():
            clone = take(main.elements * self.weight_bytes, 0, Component.MASTER_WEIGHTS)
            take(main.elements * FLOAT, 0, Component.MASTER_WEIGHTS)
            self.requests.drop((clone,))

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return the groups of the optimizer: parameters with weight decay, then the others."""
        _, options = groups[0]
        own = options._replace(zero_stage=0, data_parallel=1).without_clipping()
        return [(LocalParameters(map(_flat, group)), own) for group in self.groups]

    def before_forward(self, unit: int) -> None:
        """Compute the RoPE angles before the first layer (core/models/common/embeddings/rotary_pos_embedding.py).

        The frequencies of each position, then those of both halves of the features.
        """
        if unit < 0 or not self.buffers.angles or not self._is_first("angles"):
            return
        half = self.requests.take_once(self.buffers.angles // 2, Component.TEMPORARIES)
        self.requests.take_once(self.buffers.angles, Component.WEIGHTS)
        self.requests.drop((half,))

    def first_buffer(self, name: str) -> None:
        """Allocate a global buffer, which is never freed (core/utils.py, GlobalMemoryBuffer)."""
        if self._is_first(name):
            self.requests.take_once(self.buffers.scores, Component.TEMPORARIES)

    def first_kernel(self, name: str, passing: KernelPass, result: int) -> None:
        """Choose a compiled kernel's launch configuration, which clears the L2 cache between trials with a buffer.

        Source: core/jit.py, jit_fuser; torch 2.13 torch/_inductor/runtime/benchmarking.py, benchmark_gpu;
        triton_heuristics.py, benchmark_all_configs. A forward that needs no mask of its dropout overwrites a tensor,
        which each trial copies.
        """
        if name.startswith("biased") and passing != "backward":
            return  # a single configuration
        if name != "dropout" and passing == "forward alone":
            passing = "forward"  # without dropout both forward passes call one kernel
        if self._is_first(f"{name} {passing}"):
            take, drop = self.requests.take_once, self.requests.drop
            copied = result if (name, passing) == ("dropout", "forward alone") else 0
            drop((take(copied, Component.TEMPORARIES),))
            cache = take(self.buffers.l2_cache, Component.TEMPORARIES)
            drop((take(copied, Component.TEMPORARIES), cache))

    def _is_first(self, name: str) -> bool:
        new = name not in self.used
        self.used.add(name)
        return new

    def prepare(self) -> None:
        """Free the fp32 gradients of the step before. Source: core/optimizer/optimizer.py, zero_grad(set_to_none)."""
        self.requests.drop(self.gradients)
        self.gradients = []

    def before_step(self, gradients: list[int]) -> None:
        """Copy the main gradients to fp32, and compute their norm.

        Source: core/optimizer/optimizer.py, _copy_model_grads_to_main_grads: `main_grad.float()`; clip_grads.py,
        get_grad_norm_fp32.
        """
        del gradients
        if self._copies_gradients:
            take = self.requests.take
            self.gradients = [take(main.elements * FLOAT, 0, Component.GRADIENTS) for main in self._main_parameters()]
        self._norm()

    def _norm(self) -> None:
        """Compute the norm of all gradients, one at a time. Source: core/utils.py, local_multi_tensor_l2_norm.

        Where it is above the limit, each gradient is scaled in a temporary tensor, which is not counted: it is freed
        before the optimizer allocates more.
        """
        take = self.requests.take
        norms = [take(FLOAT, 0, Component.TEMPORARIES)]  # dummy_overflow_buf
        for main in self._main_parameters():
            norms.append(take(FLOAT, 0, Component.TEMPORARIES))
            self.requests.drop((self.requests.play(norm(main.elements, self.options.card), Component.TEMPORARIES),))
        self.requests.drop(norms)

    def after_step(self) -> None:
        """Copy the main parameters to the weights.

        In fp16 with full parameters each is multiplied by 1 into a temporary tensor (core/utils.py,
        local_multi_tensor_scale), otherwise it is copied (core/optimizer/optimizer.py,
        _multi_tensor_copy_this_to_that; distrib_optimizer.py, copy_group_params).
        """
        if self.options.base != "fp16" or self.distributed:
            return
        for main in self._main_parameters():
            self.requests.drop((self.requests.take(main.elements * FLOAT, 0, Component.TEMPORARIES),))

    def _main_parameters(self) -> Iterator[MainParameter]:
        for group in self.groups:
            yield from group


def _whole(parameters: Sequence[LocalParameter]) -> list[tuple[LocalParameter, int]]:
    return [(parameter, parameter.elements) for parameter in parameters]


def _flat(main: MainParameter) -> LocalParameter:
    """Return a main parameter as a tensor of one axis, the only one of its name."""
    where = main.parameter
    return LocalParameter(where.module, where.tensor, ((where.formula, main.elements),), 1, "head")
