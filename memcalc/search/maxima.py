"""The largest micro-batch, sequence and model that fit, everything else unchanged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm
from typing import Any, NamedTuple

from memcalc.errors import InputError
from memcalc.layout.parameters import count_parameters
from memcalc.ledger.result import Result
from memcalc.ledger.verdict import Verdict, holding_memory
from memcalc.search.boundary_search import bracket_and_bisect, fit_boundary
from memcalc.search.variants import Reader, is_hopeless, varied, violated_rule
from memcalc.spec.model import ModelSpec
from memcalc.spec.recompute_plan import leaves
from memcalc.spec.spec import Spec
from memcalc.suggestions.run_overrides import as_is
from memcalc.units import divisors
from memcalc.verdict.judge import is_expected_as_assumed, is_expected_to_fit, judge, others_are_expected, size
from memcalc.verdict.needs import can_replay

# Larger than any batch, sequence or model; the longest range that Python can measure with 32-bit sizes, as in a
# browser.
MOST = 2**31 - 1

# A replayed search starts at the largest value that its lower bound admits, and first moves down by this fraction of
# it, because allocators reserve little more than is allocated.
FIRST_STEP = 1 / 32

# With this number of tokens, hidden states of common sizes (multiples of 4,096 16-bit values) fill blocks of 2 MiB.
ROUND_TOKENS = 256

MAXIMA = ("micro_batch_size", "sequence_length", "layers", "parameters")


class Scale(NamedTuple):
    """A quantity to maximize: its values, the run at each, and why they end."""

    ladder: Sequence[int]
    run: Callable[[int], Spec]
    now: int  # the run's value
    end: str  # why there is no value after the last one
    note: str  # what changes along with it, or how it is counted
    round_to: int = 0  # multiples of this may fit beyond others that do not; 0: no such number


@dataclass(frozen=True, slots=True)
class Maximum:
    """The largest value of one quantity that fits."""

    quantity: str  # one of MAXIMA
    value: int  # the largest; 0: none fits
    now: int  # the run's value
    step: int  # from one value to the next, if constant
    next_value: int | None  # the next larger one; None: there is none
    next_verdict: Verdict | None  # of the run with it; None: there is none, or a rule forbids it
    end: str  # why there is no next value, or why it is not allowed; empty if memory is the reason
    gaps: tuple[int, ...]  # smaller values tried that do not fit, although `value` does
    above: int  # number of next larger values tried, none of which fits
    result: Result | None  # the estimate at `value`; None if `value` is 0
    parameters: int  # of the model at `value`
    note: str  # how it is counted
    overrides: tuple[str, ...] = ()  # overrides from the original run to this one, as --set takes them
    smallest: Spec | None = None  # the run with the smallest value, if that is valid and does not fit

    @property
    def next_bytes(self) -> int | None:
        """Memory of a GPU with the next value; a lower bound if bounds decided."""
        return None if self.next_verdict is None else self.next_verdict.needed_bytes

    @property
    def is_close(self) -> bool:
        """Whether the largest value fits by its replay, but the limit is inside its interval."""
        return self.result is not None and self.result.verdict == "unknown" and not self.is_at_most

    @property
    def is_at_most(self) -> bool:
        """Whether a feature needs memory and is not modelled, so that less may fit."""
        return self.result is not None and bool(holding_memory(self.result.limits))


def maximum(what: str, spec: Spec, as_read: Reader = as_is) -> Maximum:
    """Return the largest value that fits the GPU, everything else unchanged; see `ladder` for "largest".

    A value fits if its allocator replay finishes. The verdict of `result` reports whether recorded runs of its kind
    were close enough to their replays to be sure. A run without a replay fits if its verdict is "fits".

    Args:
        what: one of MAXIMA.
        spec: the run; `hardware.gpu` is the GPU.
        as_read: returns a variant as the run's file is read.
    """
    scale = SCALES[what](spec)
    refused: dict[int, str] = {}

    def allowed(value: int) -> Spec | None:
        run = scale.run(value)
        violation = violated_rule(run)
        if violation is not None:
            refused[value] = violation.problem
        return run if violation is None else None

    @cache
    def read(value: int) -> Spec | None:
        run = allowed(value)
        try:
            return None if run is None else as_read(run)
        except InputError as error:
            refused[value] = error.problem
            return None

    def fits_as_assumed(value: int) -> bool:
        run = read(value)
        return run is not None and is_expected_as_assumed(run)

    def fits(value: int) -> bool:
        run = read(value)
        return run is not None and is_expected_to_fit(run)

    now = bisect_right(scale.ladder, scale.now) - 1
    start, step = max(0, now), 1
    if can_replay(spec):
        start = _admitted(scale.ladder, allowed, start)
        step = max(1, int(start * FIRST_STEP))
    every = 0
    if scale.round_to and isinstance(scale.ladder, range):
        every = lcm(scale.ladder.step, scale.round_to) // scale.ladder.step
    found = fit_boundary(scale.ladder, fits_as_assumed, start, step, now, every)
    at = read(found.value) if found.value else None
    if at is not None and not others_are_expected(at):  # rarely: the assumed candidate mostly needs most
        found = fit_boundary(scale.ladder, fits, scale.ladder.index(found.value), step, now, every)
        at = read(found.value) if found.value else None
    next_value = found.next_value
    following = None if next_value is None else read(next_value)
    next_verdict = None if following is None else judge(following)
    return Maximum(
        quantity=what,
        value=found.value,
        now=scale.now,
        step=scale.ladder.step if isinstance(scale.ladder, range) else 0,
        next_value=next_value,
        next_verdict=next_verdict,
        end=scale.end if next_value is None else refused.get(next_value, ""),
        gaps=found.gaps,
        above=found.above,
        result=None if at is None else size(at),
        parameters=0 if at is None else count_parameters(at.model),
        note=scale.note,
        smallest=following if at is None else None,
    )


def _admitted(ladder: Sequence[int], allowed: Callable[[int], Spec | None], start: int) -> int:
    """Return an index that the lower bound (no replay) admits while it excludes the successor; else 0."""

    @cache
    def admits(place: int) -> bool:
        run = allowed(ladder[place])
        return run is not None and not is_hopeless(run)

    return max(0, bracket_and_bisect(len(ladder), admits, start))


def _micro_batches(spec: Spec) -> Scale:
    """Return any size; with a global batch, the sizes that divide the sequences of a replica."""
    training, replicas = spec.training, spec.parallelism.data_parallel
    total = training.global_batch_size
    if total is None:
        steps = training.gradient_accumulation_steps
        note = f"gradient_accumulation_steps stays {steps}, so the batch of a step grows with it"
        return Scale(
            range(1, MOST),
            lambda size: varied(spec, training={"micro_batch_size": size}),
            training.micro_batch_size,
            "",
            note,
        )
    share = total // replicas
    sizes = divisors(share) if total % replicas == 0 else []
    return Scale(
        sizes,
        lambda size: varied(spec, training={"micro_batch_size": size, "gradient_accumulation_steps": share // size}),
        training.micro_batch_size,
        f"each replica's part of global_batch_size = {total} is {share} sequences",
        f"of the sizes that divide a replica's {share} sequences; gradient accumulation is set accordingly",
    )


def _sequences(spec: Spec) -> Scale:
    """Return any length that the ranks can shard, up to the learned positions if there are any."""
    parallelism, model = spec.parallelism, spec.model
    t = parallelism.tensor_parallel if parallelism.sequence_parallel else 1
    c = parallelism.context_parallel
    step = lcm(t, 2 * c * t if c > 1 else 1)
    learned = model.position_embedding == "learned"
    most = model.max_position_embeddings if learned else MOST
    note = "" if learned else f"the model's positions cover {model.max_position_embeddings:,} tokens"
    return Scale(
        range(step, most + 1, step),
        lambda length: varied(spec, training={"sequence_length": length}),
        spec.training.sequence_length,
        f"the model has {most:,} learned positions",
        note,
        ROUND_TOKENS,
    )


def _layers(spec: Spec) -> Scale:
    recompute = spec.training.recompute
    named = max(leaves(recompute), default=0) + 1 if isinstance(recompute, tuple) else 1
    moe = spec.model.moe
    dense = 0 if moe is None else max(moe.first_dense_layers, max(moe.dense_layers, default=-1) + 1)
    least = max(spec.parallelism.pipeline_parallel, named, dense)
    return Scale(
        range(least, MOST),
        lambda layers: varied(spec, model={"num_layers": layers}),
        spec.model.num_layers,
        "",
        "layers of the same type as the model's, nothing else changed",
    )


def _parameters(spec: Spec) -> Scale:
    step = heads_step(spec.model, spec.parallelism.tensor_parallel)
    return Scale(
        range(step, MOST, step),
        lambda heads: varied(spec, model=scaled(spec.model, heads)),
        spec.model.num_attention_heads,
        "",
        "counted in query heads: sizes and layers grow in proportion to them, head_dim stays",
    )


SCALES: dict[str, Callable[[Spec], Scale]] = {
    "micro_batch_size": _micro_batches,
    "sequence_length": _sequences,
    "layers": _layers,
    "parameters": _parameters,
}


# Sizes that do not scale to integers are rounded up to multiples of this: tensor cores need multiples of 8 16-bit
# numbers (NVIDIA, Matrix Multiplication Background User's Guide, section 4), and 16 ranks may share a matrix.
ROUND = 128


def heads_step(model: ModelSpec, tensor_parallel: int) -> int:
    """Return the smallest step of query heads: whole key/value groups, equal on every rank."""
    group = model.num_attention_heads // model.num_key_value_heads
    if model.full_attention is not None:
        group = lcm(group, model.num_attention_heads // model.full_attention.num_key_value_heads)
    per_rank = tensor_parallel // gcd(tensor_parallel, group)
    return group * per_rank


def scaled(model: ModelSpec, heads: int) -> dict[str, Any]:
    """Return the fields of the model with `heads` query heads, everything else in proportion.

    head_dim stays. Hidden size, MLP and expert sizes, and the number of layers keep their ratio to the number of heads:
    sizes are rounded up to multiples of ROUND, layers to the nearest integer.
    """
    whole = model.num_attention_heads

    def width(size: int) -> int:
        exact = size * heads
        return exact // whole if exact % whole == 0 else -(-exact // (whole * ROUND)) * ROUND

    fields: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads * model.num_key_value_heads // whole),
        "hidden_size": width(model.hidden_size),
        "intermediate_size": width(model.intermediate_size),
        "embedding_size": width(model.embedding_size),
        "num_layers": max(1, (model.num_layers * heads + whole // 2) // whole),
    }
    if model.moe is not None:
        inner = {
            "expert_intermediate_size": width(model.moe.expert_intermediate_size),
            "shared_expert_intermediate_size": width(model.moe.shared_expert_intermediate_size),
            "first_dense_layers": min(model.moe.first_dense_layers, fields["num_layers"]),
            "dense_layers": tuple(layer for layer in model.moe.dense_layers if layer < fields["num_layers"]),
        }
        fields["moe"] = model.moe.model_copy(update=inner)
    if model.full_attention is not None:
        groups = max(1, heads * model.full_attention.num_key_value_heads // whole)
        fields["full_attention"] = model.full_attention.model_copy(update={"num_key_value_heads": groups})
    return fields
