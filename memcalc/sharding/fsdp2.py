"""FSDP2: fully_shard of each layer, the root, and optionally embedding and LM head (torch 2.13 fsdp/_fully_shard/).

Each unit's parameters are gathered into one buffer on the all-gather stream and copied out of it on the default stream.
In forward that buffer stays until the next unit has been copied out, so that the copy overlaps with the next
all-gather; in backward it is freed after the copy-out, and the previous unit is prefetched. Gradients are copied into
the input of a reduce-scatter, which stays until the next unit's reduce-scatter. They are reduced into an output on the
reduce-scatter stream, of which the sharded gradients are views. Under CPUOffloadPolicy shards are copied from the host
one at a time before the all-gather, and gradients are copied to the host at once; the optimizer runs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import EMBEDDING, ROOT, TAIL, Engine, Gradient, OptimizerGroups
from memcalc.spec.recipes import DTYPE_BYTES, RECIPES
from memcalc.states.gathered_parameters import gathered_bytes, gathered_dtype, shard_elements
from memcalc.states.state_options import StateOptions
from memcalc.stream.requests import EngineTensor, Label, Requests
from memcalc.workspaces.sharding import chunk_cat, split_copy

HOLDS_BOTH_INPUTS = (2, 12)  # the torch version that frees a reduce-scatter's input only when the next one exists
COMMUNICATION = Component.COMMUNICATION_BUFFERS
SOURCE = "torch 2.13 distributed/fsdp/_fully_shard/"
SCRATCH = EngineTensor(Component.TEMPORARIES, "scratch of a copy kernel", "uint8", "n", f"{SOURCE}_fsdp_collectives.py")
NAMES = {  # labels of units that are not layers, of their gathered parameters, and of their elements
    ROOT: ("the root", "root parameters", "P_root"),
    EMBEDDING: ("the embedding", "embedding", "P_embedding"),
    TAIL: ("final norm and head", "final norm and head", "P_tail"),
}
LAYER = "a layer", "layer parameters", "P_layer"
EXPERTS = "experts of a layer", "expert parameters", "P_experts"
FIRST_EXPERTS = -4  # the experts of a layer are a unit with expert parallelism: FIRST_EXPERTS - layer
# CUDA streams in addition to the default one (_fsdp_param_group.py, FSDPCommContext).
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = 1, 2, 3
REFERENCE_GATHER = 4  # that of a reference model or a teacher: each root makes its own


class UnitLabels(NamedTuple):
    """Labels of the storages of one unit."""

    from_host: EngineTensor
    cast: EngineTensor
    all_gather: EngineTensor
    gathered: EngineTensor
    scatter: EngineTensor
    shard: EngineTensor
    main: EngineTensor
    sums: EngineTensor


class UnitGather(NamedTuple):
    """Allocations for the all-gather of one unit, in bytes.

    Args:
        fetched: shards copied from the host, one at a time; each is cast if there are `copies`.
        copies: shards cast to the compute dtype, before the all-gather; in one buffer if nothing is fetched.
        output: the all-gather output, with all ranks' shards.
        parameters: each parameter that is copied out of it.
        table: scratch of the copy-out kernel.
        arranges: whether parameters are sharded along another axis than the first, so that each is copied twice.
    """

    fetched: tuple[int, ...]
    copies: tuple[int, ...]
    output: int
    parameters: tuple[int, ...]
    table: tuple[int, ...]
    arranges: bool = False


class Reduce(NamedTuple):
    """Allocations for the reduce-scatter of one unit's gradients, in bytes.

    Args:
        source: the input of the reduce-scatter.
        output: the rank's shard.
        shards: the same in the dtype of the parameters' shards.
        table: scratch of the copy-in kernel.
        main: fp32 copies of the reduced gradients, which the recipe makes in hooks of the parameters.
        last: the parameter with the gradient that the variable `unsharded_grad` references until the reduction returns.
        arranged: copies of the gradients, where parameters are sharded along another axis than the first.
    """

    source: int
    output: int
    shards: int
    table: tuple[int, ...]
    main: tuple[int, ...]
    last: LocalParameter
    arranged: tuple[int, ...] = ()


def expert_unit(layer: int) -> int:
    """Return the unit of a layer's routed experts, if they are one."""
    return FIRST_EXPERTS - layer


def labels_of(unit: int, parameters: Sequence[LocalParameter], options: StateOptions) -> UnitLabels:
    """Return the labels of a unit's storages, with the dtypes of its all-gather and reduce-scatter."""
    name, parameters_name, symbol = NAMES.get(unit, EXPERTS if unit <= FIRST_EXPERTS else LAYER)
    dtypes = {gathered_dtype(each, options) for each in parameters}
    dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"
    own = next((each.dtype or options.base for each in parameters if each.trains), options.base)

    def label(tensor: str, dtype: str, file: str, pieces: int = 1) -> EngineTensor:
        return EngineTensor(COMMUNICATION, tensor, dtype, symbol, f"{SOURCE}{file}", pieces)

    def shard(tensor: str, dtype: str, pieces: int = 1) -> EngineTensor:
        file = f"{SOURCE}_fsdp_collectives.py: foreach_reduce"
        return EngineTensor(Component.GRADIENTS, tensor, dtype, f"{symbol}/N", file, pieces)

    return UnitLabels(
        label(f"shards of {name} from the host", own, "_fsdp_param.py: all_gather_inputs"),
        label(f"shards of {name}, cast", dtype, "_fsdp_collectives.py: foreach_all_gather"),
        label(f"all-gather of {name}", dtype, "_fsdp_collectives.py: foreach_all_gather"),
        label(f"{parameters_name}, gathered", dtype, "_fsdp_param_group.py: unshard", len(parameters)),
        label(f"reduce-scatter input of {name}", options.fsdp.reduced or own, "_fsdp_param_group.py: post_backward"),
        shard(f"gradient shard of {name}", own),
        shard(f"fp32 gradient shard of {name}", "fp32", sum(each.trains for each in parameters)),
        label(
            f"unsharded gradients of {name}", options.summed, "_fsdp_param.py: to_accumulated_grad_if_needed"
        )._replace(component=Component.GRADIENTS),
    )


class FSDP2(Engine):
    """One rank of FSDP2. Stage 3 is reshard_after_forward=True, stage 2 False.

    The root is resharded after forward only if that is set for it (_fully_shard.py, auto_reshard_after_forward).

    Args:
        requests: the list of requests to record to.
        units: the parameters of each unit, in registration order.
        choice: state options of the run.
    """

    keeps_gradients = False
    all_gather_stream, reduce_scatter_stream, all_reduce_stream = ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE

    def __init__(
        self, requests: Requests, units: Mapping[int, Sequence[LocalParameter]], options: StateOptions
    ) -> None:
        super().__init__(requests)
        units = {unit: tuple(each for each in parameters if not each.beside) for unit, parameters in units.items()}
        self.choice = options
        self.members = units
        self.wraps_embedding_and_head = options.fsdp.wraps_embedding_and_head
        self.head_is_unit = options.fsdp.head_is_unit
        self.output_is_loss = options.model.loss_in_model
        self.repeats = not options.step.sums_unsharded  # only the last micro-batch reduces
        known: dict[Sequence[LocalParameter], tuple[UnitGather, Reduce | None]] = {}
        self.labels: dict[int, UnitLabels] = {}
        for unit, parameters in units.items():
            if parameters and parameters not in known:
                known[parameters] = self._gather_of(parameters), self._reduce_of(parameters)
            self.labels[unit] = labels_of(unit, parameters, options)
        self.sizes = {unit: known[parameters] for unit, parameters in units.items() if parameters}
        layers = sorted(unit for unit in units if unit >= 0)
        self.last = layers[-1] if layers else ROOT
        self.before = dict(zip(layers, (EMBEDDING, *layers), strict=False))  # layer -> the unit that ran before it
        self.gathering: dict[int, int] = {}  # unit -> all-gather output that is not copied out yet
        self.parameters: dict[int, list[int]] = {}  # unit -> gathered parameters
        self.copied: list[int] = []  # the last all-gather output of forward, already copied out
        self.reducing: list[int] = []  # the input of the last reduce-scatter
        self.all_reduced: dict[int, int] = {}  # unit -> HSDP's all-reduced gradients, referenced by AllReduceState
        self.unsharded: dict[int, list[Gradient]] = {}  # unit -> sums of earlier micro-batches
        self.have_gradients = False
        self.reduces = True

    @property
    def has_unsharded_gradients(self) -> bool:
        """Whether unreduced gradients of earlier micro-batches exist."""
        return bool(self.unsharded)

    def updated(self, groups: OptimizerGroups) -> OptimizerGroups:
        """Return the parameters updated on the device: none if shards are on the host."""
        return () if self.choice.host.has_weights else groups

    def omit_backward(self) -> None:
        """Gather on a stream apart from that of the model that trains.

        Units that stay unsharded after forward, such as the root, stay so from the first one on: only a backward
        reshards them. Source: _fsdp_param_group.py, unshard; _fsdp_state.py, _root_post_backward_final_callback.
        """
        self.all_gather_stream = REFERENCE_GATHER
        super().omit_backward()
        self.repeats = False  # the first forward gathers it

    def existing(self) -> list[int]:
        """Record the unsharded sums of earlier micro-batches, which the last one reduces."""
        size = DTYPE_BYTES[self.choice.summed]
        for unit, parameters in self.members.items() if self.choice.step.sums_unsharded else ():
            sums = [
                Gradient(self.requests.take(each.gradient_elements * size, 0, Component.GRADIENTS), each)
                for each in parameters
                if each.trains
            ]
            if sums:
                self.unsharded[unit] = sums
        return []

    def begin(self, *, have_gradients: bool, last: bool) -> None:
        """Begin a micro-batch."""
        self.have_gradients = have_gradients
        self.reduces = last or not self.choice.step.sums_unsharded

    def before_forward(self, unit: int) -> None:
        """Pre-forward: unshard, wait_for_unshard; nothing if a forward without backward has left the unit unsharded."""
        if unit not in self.sizes or unit in self.parameters:
            return
        if unit == TAIL and self.choice.fsdp.gathers_output_alone:  # DTensor.full_tensor, by the loss
            own = {each.dtype or self.choice.base for each in self.members[unit]}
            label = self.labels[unit].gathered
            if len(own) == 1:
                label = label._replace(dtype=own.pop())
            whole = sum(each.elements * DTYPE_BYTES[each.dtype or self.choice.base] for each in self.members[unit])
            self.parameters[unit] = [self.requests.take(whole, 0, label)]
            return
        self._all_gather(unit)
        output = self._copy_out(unit)
        self.requests.drop(self.copied)
        self.copied = [output]

    def after_forward(self, unit: int) -> None:
        """Post-forward: reshard, except the tail; the root frees the last all-gather output."""
        if unit == ROOT:
            if self.choice.fsdp.reshards_root and self.choice.zero_stage > 2:
                self.requests.drop(self.parameters.pop(unit, ()))
            self.requests.drop(self.copied)
            self.copied = []
        elif self.choice.zero_stage > 2 and not self._stays(unit) and unit in self.sizes:
            self.requests.drop(self.parameters.pop(unit))

    def after_evaluation(self) -> None:
        """Reshard units that stay unsharded after forward, such as the root.

        In PyTorch they stay unsharded until the next training step; they are freed here, since its forward gathers
        them. The order of units is only cleared by a backward (_fsdp_state.py, _root_post_backward_final_callback).
        """
        self.order_is_stale = True
        for unit in list(self.parameters):
            with self.requests.repeat(self.rounds.get(unit, 1)):
                self.requests.drop(self.parameters.pop(unit))

    def _stays(self, unit: int) -> bool:
        """Return whether a unit is not resharded after forward although other units are."""
        tied = unit == EMBEDDING and TAIL not in self.sizes  # the LM head's unit, too
        return unit == TAIL or tied or (unit == self.last and self.choice.fsdp.gathers_last_layer_once)

    def before_backward(self, unit: int) -> None:
        """Pre-backward: unshard unless prefetched, wait_for_unshard, prefetch the unit that ran before."""
        if unit not in self.parameters and unit in self.sizes:
            if unit not in self.gathering:
                self._all_gather(unit)
            self.requests.drop((self._copy_out(unit),))
        before = self._before(unit)
        if before in self.sizes and before not in self.parameters and before not in self.gathering:
            self._all_gather(before)

    def _before(self, unit: int) -> int | None:
        """Return the unit that ran its forward before this one: before the first, the last unit of an evaluation.

        A unit without parameters is not in the order (_fsdp_param_group.py, _record_post_forward), and the root is
        still unsharded.
        """
        if unit == ROOT:
            return TAIL if self.wraps_embedding_and_head else self.last
        if unit == EMBEDDING and self.order_is_stale and ROOT not in self.sizes:
            return None if self.choice.fsdp.gathers_output_alone else TAIL
        return self.last if unit == TAIL else self.before.get(unit)

    def after_backward(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Post-backward: reshard, free the last reduce-scatter's input, reduce; for the root, the final callback."""
        self.requests.drop(self.parameters.pop(unit, ()))
        kept: list[int] = []
        if self.reduces:
            kept = self._reduce_unit(unit, gradients)
        else:
            self._add_up(unit, gradients)
        if unit == ROOT:
            self._finalize()
        return kept

    def _reduce_unit(self, unit: int, gradients: Sequence[Gradient]) -> list[int]:
        """Reduce a unit's gradients, or their sums; return those that stay. Source: post_backward."""
        if unit not in self.sizes:
            return []
        before, self.reducing = self.reducing, []
        if self.choice.torch[:2] != HOLDS_BOTH_INPUTS:
            self.requests.drop(before)
            before = []
        reduce = self.sizes[unit][1]
        if sums := self.unsharded.pop(unit, []):  # accumulate_unsharded_grad_if_needed
            self.requests.drop(each.storage for each in gradients)
            gradients = sums
        gradients = [self._own_rows(each) for each in gradients]
        kept = self._reduce(unit, reduce, gradients) if reduce is not None and gradients else []
        self.requests.drop(before)
        return kept

    def _own_rows(self, gradient: Gradient) -> Gradient:
        """Copy the rank's rows out of an unsharded gradient. Source: _fsdp_param.py, _get_grad_inner_tensor."""
        parameter = gradient.parameter
        if parameter is None or not parameter.gradient:
            return gradient
        rows = self.requests.take(parameter.elements * DTYPE_BYTES[self.choice.summed], 0, Component.GRADIENTS)
        self.requests.drop((gradient.storage,))
        return Gradient(rows, parameter)

    def _finalize(self) -> None:
        """Free the last buffers, and an all-gather that nothing waited for. Source: finalize_backward."""
        for unit in list(self.all_reduced):
            with self.requests.repeat(self.rounds.get(unit, 1)):
                self.requests.drop((self.all_reduced.pop(unit),))
        self.requests.drop((*self.reducing, *self.gathering.values()))
        self.reducing, self.gathering, self.order_is_stale = [], {}, False

    def _add_up(self, unit: int, gradients: Sequence[Gradient]) -> None:
        """Keep unsharded gradients in the reduce dtype, or add them to those of earlier micro-batches.

        Source: _fsdp_param.py, to_accumulated_grad_if_needed, accumulate_unsharded_grad_if_needed.
        """
        if unit in self.unsharded:
            self.requests.drop(each.storage for each in gradients)
            return
        sums: list[Gradient] = []
        order = [None, *self.members[unit]]
        for gradient in sorted(gradients, key=lambda each: order.index(each.parameter)):
            parameter = gradient.parameter
            if parameter is None or gathered_dtype(parameter, self.choice) == self.choice.summed:
                sums.append(gradient)
                continue
            size = parameter.gradient_elements * DTYPE_BYTES[self.choice.summed]
            sums.append(Gradient(self.requests.take(size, 0, self._label_of_sums(unit)), parameter))
            self.requests.drop((gradient.storage,))
        if sums:
            self.unsharded[unit] = sums

    def _label_of_sums(self, unit: int) -> Label:  # noqa: ARG002 -- for a subclass
        """Return the label of a unit's sums, which are counted with the gradients."""
        return Component.GRADIENTS

    def _all_gather(self, unit: int, stream: int | None = None) -> None:
        """All-gather the shards of a unit. Source: _fsdp_collectives.py, foreach_all_gather.

        Args:
            unit: the unit.
            stream: the CUDA stream; None: that of all-gathers.
        """
        gather, labels, take = self.sizes[unit][0], self.labels[unit], self.requests.take
        on = self.all_gather_stream if stream is None else stream
        if not gather.output:  # of one rank
            self.gathering[unit] = take(0, 0, labels.all_gather)
            return
        copies = [] if gather.fetched else [take(size, on, labels.cast) for size in gather.copies]
        for index, size in enumerate(gather.fetched):  # _fsdp_param.py, all_gather_inputs
            copies.append(take(size, on, labels.from_host))
            if gather.copies:
                wide = copies.pop()
                copies.append(take(gather.copies[index], on, labels.cast))
                self.requests.drop((wide,))
        self.gathering[unit] = take(gather.output, on, labels.all_gather)
        self.requests.drop(copies)

    def _copy_out(self, unit: int) -> int:
        """Allocate the parameters; return the all-gather output. Source: foreach_all_gather_copy_out."""
        gather, gathered = self.sizes[unit][0], self.labels[unit].gathered
        if not gather.output and gather.copies:
            self._copy_alone(unit, gather)
            return self.gathering.pop(unit)
        self.parameters[unit], arranged = [], list[int]()
        for size in gather.parameters:
            self.parameters[unit].append(self.requests.take(size, 0, gathered))
            if gather.arranges:
                arranged.append(self.requests.take(size, 0, gathered))
        self.requests.drop((self.requests.play(gather.table, SCRATCH), *arranged))
        return self.gathering.pop(unit)

    def _copy_alone(self, unit: int, gather: UnitGather) -> None:
        """Cast and copy the parameters that one rank has, each cast until the next one. Source: wait_for_unshard."""
        labels, before = self.labels[unit], list[int]()
        self.parameters[unit] = []
        for cast, size in zip(gather.copies, gather.parameters, strict=True):
            made = self.requests.take(cast, 0, labels.cast)
            self.requests.drop(before)
            self.parameters[unit].append(self.requests.take(size, 0, labels.gathered))
            before = [made]
        self.requests.drop(before)

    def _reduce(self, unit: int, reduce: Reduce, gradients: Sequence[Gradient]) -> list[int]:
        """Reduce-scatter a unit's gradients; return those that stay. Source: _fsdp_collectives.py, foreach_reduce."""
        labels = self.labels[unit]
        last = [each.storage for each in gradients if each.parameter == reduce.last]
        produced = [each.storage for each in gradients if each.storage not in last]
        if reduce.arranged:
            produced = self._arrange(unit, reduce, gradients, last)
        self.reducing = [self.requests.take(reduce.source, 0, labels.scatter)]
        self.requests.drop((self.requests.play(reduce.table, SCRATCH),))
        self.requests.drop(produced)
        output = self.requests.take(reduce.output, self.reduce_scatter_stream, labels.shard)
        if self.choice.replicates:  # until the end of backward (_fsdp_param_group.py, _all_reduce_state)
            self.requests.hold(output)
            self.all_reduced[unit] = output
        if reduce.output == reduce.source:  # of one rank: divided by 1, in a tensor of its own, and copied
            self.requests.drop((self.requests.take(reduce.output, self.reduce_scatter_stream, labels.shard),))
        if reduce.shards != reduce.output:  # _to_dtype_if_needed
            reduced, output = output, self.requests.take(reduce.shards, self._post_reduce_stream, labels.shard)
            self.requests.drop((reduced,))
        kept = self._sharded_gradients(output, reduce, labels)
        self.requests.drop(last)
        return kept

    def _arrange(self, unit: int, reduce: Reduce, gradients: Sequence[Gradient], last: Sequence[int]) -> list[int]:
        """Copy gradients so that each rank's part of another axis is contiguous; return the copies."""
        order = self.members[unit]
        given = sorted(gradients, key=lambda each: 0 if each.parameter is None else order.index(each.parameter))
        copies, unread = list[int](), list[int]()
        for number, (gradient, size) in enumerate(zip(given, reduce.arranged, strict=True)):
            copies.append(self.requests.take(size, 0, self.labels[unit].scatter))
            if gradient.storage not in last:
                unread.append(gradient.storage)
            if number:  # the loop's variables reference the first gradient until the second is copied
                self.requests.drop(unread)
                unread = []
        self.requests.drop(unread)
        return copies

    def _sharded_gradients(self, output: int, reduce: Reduce, labels: UnitLabels) -> list[int]:
        """Make or add to the sharded gradients from the reduced ones; return those that stay."""
        if not (self.have_gradients or self.choice.host.has_weights):
            main = [self.requests.take(size, self._post_reduce_stream, labels.main) for size in reduce.main]
            if RECIPES[self.choice.recipe].gradients is None:  # the hooks free the gradients
                self.requests.drop((output,))
                return main
            return [output, *main]
        self.requests.drop((output,))  # already added to earlier gradients, or copied to the host
        return []

    @property
    def _post_reduce_stream(self) -> int:
        """The CUDA stream on which reduced gradients are cast, and on which hooks of the parameters run."""
        return self.all_reduce_stream if self.choice.replicates else self.reduce_scatter_stream

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _gather_of(self, parameters: Sequence[LocalParameter]) -> UnitGather:
        options = self.choice
        shards = [shard_elements(held, options) for held in parameters]
        dtypes = [gathered_dtype(held, options) for held in parameters]
        held_in = [parameter.dtype or options.base for parameter in parameters]
        parts = [elements * DTYPE_BYTES[dtype] for elements, dtype in zip(shards, dtypes, strict=True)]
        ranks = options.spread(2).over(parameters[0])
        gathered = tuple(gathered_bytes(held, options) for held in parameters)
        fetched: tuple[int, ...] = ()
        casts = [part for part, own, dtype in zip(parts, held_in, dtypes, strict=True) if dtype not in (own, "uint8")]
        copies: tuple[int, ...] = (sum(casts),) if casts else ()
        if options.host.has_weights:
            fetched = tuple(elements * DTYPE_BYTES[own] for elements, own in zip(shards, held_in, strict=True))
            copies = tuple(parts) if casts else ()
        if ranks == 1:  # no all-gather: each shard is copied (_fsdp_param_group.py, wait_for_unshard)
            cast = tuple(part for part, own, dtype in zip(parts, held_in, dtypes, strict=True) if dtype != own)
            return UnitGather((), cast, 0, gathered, ())
        table, arranges = tuple(split_copy(parts, ranks, options.card)), options.spread(2).axis(parameters[0]) > 0
        return UnitGather(fetched, copies, sum(gathered), gathered, table, arranges)

    def _reduce_of(self, parameters: Sequence[LocalParameter]) -> Reduce | None:
        trained = [parameter for parameter in parameters if parameter.trains]
        if not trained:
            return None
        options = self.choice
        own = trained[-1].dtype or options.base
        elements = [shard_elements(held, options) for held in trained]
        parts = [each * DTYPE_BYTES[options.fsdp.reduced or own] for each in elements]
        shards = sum(elements) * DTYPE_BYTES[own]
        recipe = RECIPES[options.recipe]
        main = [each * DTYPE_BYTES["fp32"] for each in elements if recipe.main_gradients_live == "backward"]
        spread, arranged = options.spread(2), tuple[int, ...]()
        if spread.axis(trained[0]):
            arranged = tuple(each.elements * DTYPE_BYTES[gathered_dtype(each, options)] for each in trained)
        whole = sum(part * spread.over(each) for part, each in zip(parts, trained, strict=True))
        return Reduce(whole, sum(parts), shards, tuple(chunk_cat(parts)), tuple(main), trained[-1], arranged)
