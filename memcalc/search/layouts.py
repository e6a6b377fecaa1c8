"""All parallel layouts of a run on a number of GPUs, and the reasons for excluded ones.

A layout is a choice of every parallel degree, the pipeline schedule and the ZeRO stage. Its micro-batch and
recomputation are chosen afterwards, in `ranking`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from memcalc.search.variants import varied, violated_rule
from memcalc.spec.defaults import ENGINE_OF_STAGE, engines_of_stages
from memcalc.spec.spec import Spec

MOST_CHUNKS = 64  # of layers in a stage; each reduces the bubble, and adds a send

# The fields that define a layout.
DEGREES = (
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "data_parallel",
    "expert_parallel",
    "schedule",
    "virtual_stages",
    "sequence_parallel",
    "zero_stage",
    "engine",
)

HOLDABLE = (
    "tensor_parallel",
    "sequence_parallel",
    "context_parallel",
    "pipeline_parallel",
    "schedule",
    "expert_parallel",
    "data_parallel",
    "zero_stage",
    "engine",
    "micro_batch_size",
    "recompute",
)


class ExcludedLayout(NamedTuple):
    """An excluded layout."""

    choice: str  # its degrees, as text; "" if the reason names them
    reason: str  # the rule that it violates


class Layout(NamedTuple):
    """A valid layout, with the micro-batch and recomputation of the run."""

    spec: Spec
    sequences: int  # of one replica, in one optimizer step


class Space:
    """The layouts of a run on a number of GPUs.

    Args:
        spec: the run.
        gpus: total number of GPUs.
        node: GPUs per node; tensor parallelism stays inside a node.
        sequences: per optimizer step.
        fixed_fields: fields that keep the run's own value.

    After `layouts` is exhausted, `pruned` holds the excluded ones.
    """

    def __init__(
        self, spec: Spec, gpus: int, node: int, sequences: int, fixed_fields: frozenset[str] = frozenset()
    ) -> None:
        self._spec, self.gpus, self._node, self._sequences, self._fixed_fields = (
            spec,
            gpus,
            node,
            sequences,
            fixed_fields,
        )
        self.pruned: dict[ExcludedLayout, int] = {}  # excluded layouts -> their number

    def layouts(self, skipped: Callable[[dict[str, Any]], bool] = lambda _: False) -> Iterator[Layout]:
        """Yield every valid layout, except those with degrees to skip."""
        for degrees in self._degrees():
            if skipped(degrees):
                continue
            replicas = degrees["data_parallel"]
            words = _words(degrees)
            if self._sequences % replicas:
                self._prune(
                    f"data_parallel = {replicas}", f"it does not divide the {self._sequences:,} sequences of a step"
                )
                continue
            rest = self._sequences // replicas
            fields = {"micro_batch_size": 1, "gradient_accumulation_steps": rest}
            run = varied(self._spec, training=fields, parallelism=degrees)
            violation = violated_rule(run)
            if violation is not None:
                self._prune(words if "=" not in violation.problem else "", violation.problem)
                continue
            yield Layout(run, rest)

    def _prune(self, choice: str, reason: str) -> None:
        key = ExcludedLayout(choice, reason)
        self.pruned[key] = self.pruned.get(key, 0) + 1

    def _values(self, field: str, values: Sequence[Any]) -> Sequence[Any]:
        return (getattr(self._spec.parallelism, field),) if field in self._fixed_fields else values

    def _degrees(self) -> Iterator[dict[str, Any]]:
        """Yield all degrees with the number of GPUs as their product, with schedule, stage and engine."""
        for t in self._values("tensor_parallel", divisors(self.gpus)):
            if t > self._node and "tensor_parallel" not in self._fixed_fields:
                reason = f"tensor-parallel ranks communicate in every layer and stay inside a node of {self._node} GPUs"
                self._prune(f"tensor_parallel = {t}", reason)
                continue
            for c in self._values("context_parallel", _powers(self.gpus // t)):
                if self._refused(t, c):
                    continue
                for p in self._values("pipeline_parallel", divisors(self.gpus // (t * c))):
                    yield from self._split(t, c, p)

    def _refused(self, t: int, c: int) -> bool:
        """Return whether these two degrees violate a rule regardless of the others."""
        run = varied(self._spec, parallelism={"tensor_parallel": t, "context_parallel": c, "sequence_parallel": False})
        violation = violated_rule(run)
        if violation is None or violation.key[-1] not in ("tensor_parallel", "context_parallel", "attention"):
            return False
        self._prune("" if "=" in violation.problem else f"context_parallel = {c}", violation.problem)
        return True

    def _split(self, t: int, c: int, p: int) -> Iterator[dict[str, Any]]:
        if self.gpus % (t * c * p):
            self._prune(f"tensor {t} x context {c} x pipeline {p}", f"they do not divide the {self.gpus} GPUs")
            return
        layers = self._spec.model.num_layers
        if p > layers:
            self._prune(f"pipeline_parallel = {p}", f"a stage needs at least one of the {layers} layers")
            return
        n = self.gpus // (t * c * p)
        if "data_parallel" in self._fixed_fields and n != self._spec.parallelism.data_parallel:
            return
        split = {"tensor_parallel": t, "context_parallel": c, "pipeline_parallel": p, "data_parallel": n}
        for e in self._values("expert_parallel", self._experts(t * c * n)):
            for schedule, virtual in self._schedules(p):
                for sharded in self._values("sequence_parallel", (False, True) if t > 1 else (False,)):
                    for stage, engine in self._shardings(t * c * p * e, n * c, schedule):
                        if p > 1 and engine == "fsdp2" and "zero_stage" not in self._fixed_fields:
                            why = "not searched, since a stage holds gathered parameters and unsharded gradients for "
                            self._prune(f"zero_stage = {stage} with pipeline_parallel = {p}", f"{why}the whole step")
                            continue
                        yield split | {
                            "expert_parallel": e,
                            "schedule": schedule,
                            "virtual_stages": virtual,
                            "sequence_parallel": sharded,
                            "zero_stage": stage,
                            "engine": engine,
                            "data_parallel_replicate": 1,
                        }

    def _experts(self, ranks: int) -> Sequence[int]:
        moe = self._spec.model.moe
        return (1,) if moe is None else [e for e in divisors(moe.num_experts) if ranks % e == 0]

    def _schedules(self, stages: int) -> Iterator[tuple[str, int]]:
        """Yield 1F1B, and interleaved chunks of whole layers; any other schedule of the run is kept."""
        own = self._spec.parallelism
        if "schedule" in self._fixed_fields or own.schedule not in ("1f1b", "interleaved"):
            yield (own.schedule, own.virtual_stages) if stages > 1 else ("1f1b", 1)
            return
        yield "1f1b", 1
        layers = self._spec.model.num_layers
        if stages > 1 and layers % stages == 0:
            yield from (("interleaved", chunks) for chunks in divisors(layers // stages)[1:] if chunks <= MOST_CHUNKS)

    def _shardings(self, model_parallel: int, shards: int, schedule: str) -> Iterator[tuple[int, str]]:
        """Yield ZeRO stages with their engine; a stage that shards over one rank is stage 0."""
        own, implementation = self._spec.parallelism, self._spec.training.implementation
        if implementation == "megatron":
            known = [(0, "megatron" if model_parallel > 1 else "ddp"), (1, "megatron")]
        elif implementation == "torchtitan":
            known = [*(((0, "ddp"),) if model_parallel == 1 else ()), (2, "fsdp2"), (3, "fsdp2")]
        else:
            known = [
                (stage, own.engine if stage == own.zero_stage else engine)
                for stage, engine in engines_of_stages(schedule).items()
            ]
        if "engine" in self._fixed_fields:
            known = [(stage, own.engine) for stage in ENGINE_OF_STAGE]
        for stage, engine in known:
            if "zero_stage" in self._fixed_fields and stage != own.zero_stage:
                continue
            if stage == 0 or shards > 1 or "zero_stage" in self._fixed_fields:
                yield stage, engine


def divisors(number: int) -> list[int]:
    """Return all divisors in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _powers(number: int) -> list[int]:
    """Return the divisors that are powers of two."""
    return [d for d in divisors(number) if d & (d - 1) == 0]


def _words(degrees: dict[str, Any]) -> str:
    return " x ".join(f"{name.partition('_')[0]} {size}" for name, size in degrees.items() if "parallel" in name)
