"""The device memory that a run needs: bounds first, then an allocator replay, else ratios of recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import ceil, floor
from typing import NamedTuple

from memcalc.errors import OutOfMemory
from memcalc.estimation.generation import allocated_bytes as generation_bytes
from memcalc.estimation.limits import limits_of
from memcalc.estimation.outside_allocator import communication_library_bytes, least_outside_bytes, outside_bytes
from memcalc.estimation.transient import peak_bytes
from memcalc.layout.schedules import ORDERED
from memcalc.layout.stages import Stage, stages_alike, stages_of, stages_that_matter
from memcalc.ledger.component import Component
from memcalc.ledger.verdict import Answer, RecordedErrors
from memcalc.sharding.engines import ranks_to_replay, waits_for_streams
from memcalc.simulation.batch_lengths import BatchLength, orders_of
from memcalc.simulation.simulated_run import delayed_requests, replayed_requests, unsupported_reason
from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.spec.limits import Overcount, most_overcounted
from memcalc.spec.model_families.transformers_fallback import reject_without_formulas
from memcalc.spec.spec import Spec
from memcalc.states.model_states import state_peak, state_sums
from memcalc.stream.requests import AllocatorOverhead, Replay, replay, reserved_upper_bound
from memcalc.verdict.recorded_errors import replay_errors, reserve_ratio
from memcalc.verdict.run_types import kinds_of, program_kinds

MOST_COMPRESSION = 8  # of weights that are counted as fp32, and perhaps 4-bit


class MemoryNeed(NamedTuple):
    """The device memory that one run needs. Bytes.

    Args:
        reserved_bytes: best estimate of peak reserved memory; on a GPU that it fills, after cached blocks are freed.
        errors: of recorded runs of its kind.
        outside_bytes: device context and the most that the communication library holds.
        least_outside_bytes: device context and the least that the communication library holds.
        overhead: allocator overhead found by the replay; None if the run was not replayed.
        on_gpu: whether the run finishes on its GPU, errors included; None without a GPU.
        replay_finishes: whether its replay finishes, ignoring errors; None without a GPU or a replay.
        orders: the least and the most that the replayed orders of batch lengths need for the allocator, each what it
            reserves on a GPU that is large enough; None: all batches have the same length.
        late_bytes: the most that a replay reserves with CUDA streams that are late; 0: blocks wait for no stream.
    """

    reserved_bytes: int
    errors: RecordedErrors
    outside_bytes: int
    least_outside_bytes: int
    overhead: AllocatorOverhead | None
    on_gpu: Answer | None
    replay_finishes: bool | None
    orders: tuple[int, int] | None = None
    late_bytes: int = 0

    @property
    def least_reserved_bytes(self) -> int:
        """The least that one of the replayed orders of batch lengths reserves."""
        return self.reserved_bytes if self.orders is None else self.orders[0]

    @property
    def most_reserved_bytes(self) -> int:
        """The most that one of the replayed orders of batch lengths reserves, with streams on time."""
        return self.reserved_bytes if self.orders is None else self.orders[1]

    @property
    def device_bytes(self) -> int:
        """The best estimate of device memory."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def low_bytes(self) -> int:
        """The lower end of the interval of device memory."""
        return self.least_outside_bytes + floor(self.least_reserved_bytes * (1 + self.errors.low))

    @property
    def high_bytes(self) -> int:
        """The upper end of the interval of device memory."""
        return self.outside_bytes + ceil(max(self.most_reserved_bytes, self.late_bytes) * (1 + self.errors.high))


def least_bytes(spec: Spec, gpu: GpuSpec | None, limit: int | None = None, *, first_stage: bool = False) -> int:
    """Return a lower bound of device memory: live requests of the worst rank, its context and communication library.

    Args:
        spec: the run.
        gpu: its GPU, if it has one.
        limit: stop at the first stage that exceeds this; the result then exceeds it, too, but is not the maximum.
        first_stage: of other pipeline stages than the first one count model states alone, for a bound that is lower.

    Raises:
        InputError: there are no formulas for this family.
    """
    reject_without_formulas(spec)
    overcounted = most_overcounted(limits_of(spec))
    if spec.inference is not None:
        outside = least_outside_bytes(spec, gpu)
        if overcounted in ("precision", "all"):
            return outside
        return outside + max(_least_allocated(spec, gpu, stage) for stage in stages_of(spec))
    stages = stages_that_matter(spec)
    most = max(_least_states(spec, stage, overcounted) + least_outside_bytes(spec, gpu, stage) for stage in stages)
    if spec.training.compile or overcounted != "nothing":  # a compiler may keep less of all else
        return most
    for stage in stages[:1] if first_stage else stages:
        if limit is not None and most > limit:
            break
        most = max(most, _least_peak(spec, stage, gpu) + least_outside_bytes(spec, gpu, stage))
    return most


def _least_states(spec: Spec, stage: Stage, overcounted: Overcount) -> int:
    """Return the least bytes of model states in the phase that has most, if this is counted too high."""
    if overcounted == "all":
        return 0
    if overcounted in ("states", "precision"):
        sums = state_sums(spec, stage, tails=False)
        weights = max((size for (_, component), size in sums.items() if component is Component.WEIGHTS), default=0)
        return weights if overcounted == "states" else weights // MOST_COMPRESSION
    return state_peak(spec, stage)


def can_replay(spec: Spec) -> bool:
    """Return whether the order of all requests of the run is modelled.

    Raises:
        InputError: there are no formulas for this family.
    """
    reject_without_formulas(spec)
    return not unsupported_reason(spec)


def need_of(spec: Spec, gpu: GpuSpec | None, allocated: int | None = None) -> MemoryNeed:
    """Return the need of the rank that needs most, by replay if possible.

    Args:
        spec: the run.
        gpu: its GPU, if it has one.
        allocated: its allocated peak, if already known.

    Returns:
        The need; its `overhead` is None if the run was not replayed.
    """
    found = _replayed(spec, gpu) if can_replay(spec) else None
    if found is not None:
        return found
    return recorded_need(spec, gpu, allocated_bytes(spec, gpu) if allocated is None else allocated)


def recorded_need(spec: Spec, gpu: GpuSpec | None, allocated: int) -> MemoryNeed:
    """Return the need for an allocated peak in bytes, from the reserved-to-allocated ratio of recorded runs.

    A full GPU frees cached blocks, so a run may finish on one that has room for the allocated peak alone. A compiled
    run may need less than this peak, which is of eager execution; only the ratio decides that it does not fit.
    """
    ratio, errors = reserve_ratio(kinds_of(spec), compiled=spec.training.compile)
    least_outside = least_outside_bytes(spec, gpu)
    found = MemoryNeed(ceil(allocated * ratio), errors, outside_bytes(spec, gpu), least_outside, None, None, None)
    if not spec.training.compile:  # reserved memory is never less than allocated memory
        least = min(allocated / found.reserved_bytes - 1, 0.0) if found.reserved_bytes else 0.0
        found = found._replace(errors=errors._replace(low=max(errors.low, least)))
    if gpu is None:
        return found
    answer = answer_of(found, gpu.usable_bytes)
    may_finish = not spec.training.compile and least_outside + allocated <= gpu.usable_bytes
    return found._replace(on_gpu="unknown" if answer == "does-not-fit" and may_finish else answer)


def gets_through(spec: Spec, gpu: GpuSpec) -> bool:
    """Return whether the replay of a run finishes on its GPU, ignoring errors."""
    for stage in stages_that_matter(spec):
        room = gpu.usable_bytes - outside_bytes(spec, gpu, stage)
        for rank in ranks_to_replay(spec):
            for lengths in ((), *orders_of(spec)):
                requests = partial(replayed_requests, spec, stage, rank, lengths)
                if not spec.training.alloc_conf and reserved_upper_bound(requests()) <= room:
                    continue  # proven for default settings, without a replay
                if _replay_on(spec, stage, rank, room, lengths) is None:
                    return False
    return True


@lru_cache(maxsize=64)
def _replay_on(
    spec: Spec,
    stage: Stage,
    rank: int | None,
    room: int | None,
    lengths: tuple[BatchLength, ...] = (),
    *,
    late: bool = False,
) -> Replay | None:
    """Return the replay of a rank's run with a given memory for the allocator; None: it runs out of memory.

    `late`: with CUDA streams that are as late as possible.
    """
    training = spec.training
    requests = delayed_requests(spec, rank, lengths) if late else replayed_requests(spec, stage, rank, lengths)
    capacity = None if spec.gpu is None else spec.gpu.usable_bytes
    version = training.torch_version.removeprefix("v")
    try:
        return replay(requests, training.alloc_conf, version, room, capacity)
    except OutOfMemory:
        return None


def answer_of(need: MemoryNeed, limit: int) -> Answer:
    """Return the answer for a limit above the interval, below it, or inside."""
    if need.high_bytes <= limit:
        return "fits"
    return "does-not-fit" if need.low_bytes > limit else "unknown"


def allocated_bytes(spec: Spec, gpu: GpuSpec | None) -> int:
    """Return the allocated peak of the rank that needs most, by formula."""
    if spec.inference is not None:
        return max(generation_bytes(spec, stage, gpu) for stage in stages_of(spec))
    return max(peak_bytes(spec, stage, gpu) for stage in stages_that_matter(spec))


def _least_allocated(spec: Spec, gpu: GpuSpec | None, stage: Stage) -> int:
    """Return a lower bound of a rank's allocated peak in bytes."""
    if spec.inference is not None:
        return generation_bytes(spec, stage, gpu)
    return max(state_peak(spec, stage), _least_peak(spec, stage, gpu))


def _least_peak(spec: Spec, stage: Stage, gpu: GpuSpec | None) -> int:
    """Return what a rank of a stage allocates at least at the peak of its formulas.

    Of schedules without a known order they count the most micro-batches in flight beside gradients of earlier ones.
    With fewer micro-batches than twice the stages there may be no such moment: the gradients are left out.
    """
    parallelism, micro_batches = spec.parallelism, spec.training.gradient_accumulation_steps
    enough = parallelism.schedule in ORDERED or micro_batches >= 2 * parallelism.pipeline_parallel or micro_batches == 1
    return peak_bytes(spec, stage, gpu, tails=False, earlier_gradients=enough)


def _replayed(spec: Spec, gpu: GpuSpec | None) -> MemoryNeed | None:
    """Replay the ranks of each type; return the worst need. None: see `_replayed_rank`."""
    if spec.inference is not None:
        return _replayed_rank(spec, gpu, stages_of(spec)[0])
    if spec.parallelism.pipeline_parallel == 1:
        return _replayed_stage(spec, gpu, stages_of(spec)[0])
    worst: MemoryNeed | None = None
    by_stage: dict[int, AllocatorOverhead] = {}
    for alike in stages_alike(spec):
        need = _replayed_stage(spec, gpu, alike[0])
        if need is None or need.overhead is None:
            return None
        by_stage |= {stage.index: need.overhead for stage in alike}
        if worst is None or _badness(need) > _badness(worst):
            worst = need
    assert worst is not None
    assert worst.overhead is not None
    return worst._replace(overhead=worst.overhead._replace(by_stage=by_stage))


def _replayed_stage(spec: Spec, gpu: GpuSpec | None, stage: Stage) -> MemoryNeed | None:
    """Replay the unlike ranks of a stage; return the worst need, with the blocks of the rank that holds most."""
    found: list[MemoryNeed] = []
    for rank in ranks_to_replay(spec):
        need = _replayed_rank(spec, gpu, stage, rank)
        if need is None:
            return None
        found.append(need)
    worst, most = max(found, key=_badness), found[0].overhead
    assert most is not None
    return worst._replace(overhead=most._replace(reserved_bytes=worst.reserved_bytes))


def _badness(need: MemoryNeed) -> tuple[int, int]:
    """Order needs by their answer, then by their device memory."""
    answers = (None, "fits", "unknown", "does-not-fit")
    return answers.index(need.on_gpu), need.device_bytes


def _replayed_rank(spec: Spec, gpu: GpuSpec | None, stage: Stage, rank: int | None = None) -> MemoryNeed | None:
    """Return the need of a rank by replay; None: see `_replayed_order`."""
    on = partial(_replay_on, spec, stage, rank)
    need = _replayed_order(spec, gpu, stage, on)
    if need is None or _is_beyond(spec, gpu, stage, need.errors):
        return need
    orders = [partial(on, lengths=lengths) for lengths in orders_of(spec)]
    if orders:
        others = [each for order in orders if (each := _replayed_order(spec, gpu, stage, order)) is not None]
        need = _of_all_orders(need, others, gpu, [on, *orders])
    if waits_for_streams(spec) and need.on_gpu != "does-not-fit":
        found = [order(None, late=True) for order in (on, *orders)]
        need = _with_late_streams(need, [each.reserved_bytes for each in found if each is not None], gpu)
    return need


def _of_all_orders(
    need: MemoryNeed,
    others: Sequence[MemoryNeed],
    gpu: GpuSpec | None,
    orders: Sequence[Callable[[int | None], Replay | None]],
) -> MemoryNeed:
    """Return the need of a run with batches of different lengths, from replays in several orders.

    It certainly finishes if each of these does, and certainly fails if none of them finishes. Its best estimate is that
    of batches of one length.
    """
    found = [need, *others]
    reserved = [each.reserved_bytes for each in found]
    agree = len({each.on_gpu for each in found}) == 1
    if gpu is not None and not agree:  # of orders that do not finish not what they would reserve, but what they need
        room = gpu.usable_bytes - need.outside_bytes
        finish = [each.reserved_bytes for each in found if each.replay_finishes]
        reserved = [*finish, *(_least_room(order, room) for order in orders if order(room) is None)]
    return need._replace(
        on_gpu=need.on_gpu if agree else "unknown",
        replay_finishes=None if gpu is None else all(each.replay_finishes for each in found),
        orders=(min(reserved), max(reserved)),
    )


def _with_late_streams(need: MemoryNeed, late: Sequence[int], gpu: GpuSpec | None) -> MemoryNeed:
    """Return the need of a run that frees blocks which other CUDA streams still use.

    A GPU is between two bounds: blocks are free at once, as in `need`, or as late as possible. A run that only fits
    with the first may fail: a full GPU waits for the streams, but its free blocks are then in other places.

    Args:
        need: with streams on time.
        late: bytes that replays with late streams reserve.
        gpu: the GPU.
    """
    found = need._replace(late_bytes=max(late, default=0))
    if gpu is not None and found.on_gpu == "fits" and found.high_bytes > gpu.usable_bytes:
        return found._replace(on_gpu="unknown")
    return found


def errors_of(spec: Spec) -> RecordedErrors:
    """Return the errors of a run's replay: for a framework's program those of programs, and of its layout.

    The layout's were also recorded on real GPUs and with delayed events, which no program was.
    """
    compiled = spec.training.compile
    own = replay_errors(kinds_of(spec), compiled=compiled)
    programs = program_kinds(spec)
    if not programs:
        return own
    found = replay_errors(programs, compiled=compiled)
    return found._replace(low=min(found.low, own.low), high=max(found.high, own.high))


def _is_beyond(spec: Spec, gpu: GpuSpec | None, stage: Stage, errors: RecordedErrors) -> bool:
    """Return whether a rank's live requests exceed even a device larger by the errors of replays: none can finish."""
    if gpu is None:
        return False
    larger = floor((gpu.usable_bytes - least_outside_bytes(spec, gpu, stage)) / (1 + errors.low))
    return _least_allocated(spec, gpu, stage) > larger


def _least_room(on: Callable[[int | None], Replay | None], too_little: int) -> int:
    """Return the bytes with which a replay finishes that does not with a given number, to within 1%."""
    unlimited = on(None)
    enough = too_little if unlimited is None else unlimited.reserved_bytes
    while enough - too_little > enough // 100:
        middle = (enough + too_little) // 2
        if on(middle) is None:
            too_little = middle
        else:
            enough = middle
    return enough


def _replayed_order(
    spec: Spec, gpu: GpuSpec | None, stage: Stage, on: Callable[[int | None], Replay | None]
) -> MemoryNeed | None:
    """Replay one order of batch lengths on the GPU, where cached blocks are freed before it runs out of memory.

    None if the run needs more than the largest device on which the allocator is modelled with its settings.

    The replay's errors are relative to reserved memory. A run certainly finishes if it finishes on a device smaller by
    the largest error. It certainly fails if a device larger by the largest error is not enough.

    A run that depends on freed blocks may also fail on a larger device: other blocks are then free where a large one
    is needed. What a communication library holds is known least, so the run has to finish without it, too. One run
    does with 74.9 GiB and fails with 78.4, in the replay as on an H100: qwen2.5-7b in
    recordings/gpu/h100-80gb-torch-2.11.0/near-20261127.jsonl.
    """
    errors = errors_of(spec)
    outside, least_outside = outside_bytes(spec, gpu, stage), least_outside_bytes(spec, gpu, stage)
    room = None if gpu is None else gpu.usable_bytes - outside
    larger = None if gpu is None else floor((gpu.usable_bytes - least_outside) / (1 + errors.low))
    beyond = _is_beyond(spec, gpu, stage, errors)
    on_gpu = None if beyond else on(room)
    found = on_gpu or on(None)
    if found is None:
        return None
    need = MemoryNeed(found.reserved_bytes, errors, outside, least_outside, found.played, None, None)
    if gpu is None or room is None or larger is None:
        return need
    if on_gpu is None:
        # No block is freed if everything fits.
        perhaps = not beyond and (found.reserved_bytes <= larger or on(larger) is not None)
        return need._replace(on_gpu="unknown" if perhaps else "does-not-fit", replay_finishes=False)
    rooms = {floor(room / (1 + errors.high)), room + communication_library_bytes(spec, stage)}
    sure = need.high_bytes <= gpu.usable_bytes or all(on(other) is not None for other in rooms)
    return need._replace(on_gpu="fits" if sure else "unknown", replay_finishes=True)
