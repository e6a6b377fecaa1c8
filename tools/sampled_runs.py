"""Randomly sampled runs; every recording by family and by setting: tables of docs/reports/accuracy.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import groupby
from statistics import median
from typing import NamedTuple

from memcalc.spec.spec import Spec
from memcalc.validation.summary import PredictionErrors
from tools.accuracy import cases, drawn_cases
from tools.markdown import table
from tools.sharded import drawn_ranks, recorded_ranks

FOLDERS = ("activation-offload", "float8", "offload", "sharded", "split", "zero-offload")
SHOWN = 20  # of the drawn runs, the worst
FAR = 0.005  # every sampled run with a larger error is listed
NEAR = 0.003  # the bar of the median
HELD_OUT = ("20261123", "20261124", "20261125")  # the seeds of runs after which no formula was corrected
NOTHING = 0.0002  # of the requested bytes, what is next to nothing


class Run(NamedTuple):
    """A recorded run and its estimate."""

    run: str
    spec: Spec
    error: float
    requested: tuple[int, int] | None  # requested bytes at the peak: measured, estimated
    file: str

    @property
    def alone(self) -> bool:
        """Whether it had one GPU."""
        return self.spec.parallelism.ranks == 1

    @property
    def family(self) -> str:
        """Of the model."""
        return self.spec.model.architecture or "-"


@lru_cache(maxsize=1)
def drawn() -> tuple[Run, ...]:
    """Those of benchmarks/sample_cases.py, by file."""
    single = [Run(case.run, case.spec, case.error, case.requested, case.file) for case in drawn_cases()]
    ranks = [Run(run.case, run.spec, run.error, run.requested, run.file) for run in drawn_ranks()]
    return (*single, *ranks)


@lru_cache(maxsize=1)
def everything() -> tuple[Run, ...]:
    """Every recorded run, chosen or drawn."""
    chosen = [Run(case.run, case.spec, case.error, case.requested, case.file) for case in cases()]
    ranks = [
        Run(run.case, run.spec, run.error, run.requested, run.file)
        for folder in FOLDERS
        for run in recorded_ranks(folder)
    ]
    return (*chosen, *ranks, *drawn())


def is_held_out(file: str) -> bool:
    """Return whether a list was evaluated after the last correction."""
    return any(seed in file for seed in HELD_OUT)


def drawn_summary() -> str:
    """A line for each list, and for the engines of ranks of N-GPU jobs."""
    rows = []
    for file, group in groupby(drawn(), key=lambda run: run.file):
        several, name = list(group), file.removesuffix(".jsonl")
        role = "**held out**" if is_held_out(file) else "corrected after it"
        rows.append(_line([name, role], several))
        rows += [
            _line(["", engine], [run for run in several if run.spec.parallelism.engine == engine])
            for engine in (() if several[0].alone else ("ddp", "fsdp2", "deepspeed"))
        ]
    heads = ["list, seed", "the formulas were", "runs", "families", "median", "p95", "maximum", f"within {NEAR:.1%}"]
    return table([*heads, f"over {FAR:.1%} too low"], rows)


def _line(words: list[str], several: list[Run]) -> list[str]:
    near = sum(abs(run.error) <= NEAR for run in several) / len(several)
    low = sum(run.error < -FAR for run in several)
    families = len({run.family for run in several})
    return [*words, str(len(several)), str(families), *_figures(several), f"{near:.0%}", str(low)]


def _figures(several: Iterable[Run]) -> list[str]:
    """Median and 95th percentile of the absolute errors, the worst with its sign."""
    errors = [run.error for run in several]
    absolute = PredictionErrors("", tuple(map(abs, errors)))
    return [f"{absolute.median:.3%}", f"{absolute.p95:.3%}", f"{max(errors, key=abs):+.3%}"]


def drawn_worst() -> str:
    """The drawn runs that are furthest off."""
    rows = []
    for run in sorted(drawn(), key=lambda run: -abs(run.error))[:SHOWN]:
        measured, estimated = run.requested or (0, 0)
        rows.append([f"`{run.run}`", f"{run.error:+.3%}", f"{estimated - measured:+,}", _cause(run)])
    return table(["run", "error", "error in requested bytes", "cause"], rows)


def _cause(run: Run) -> str:
    measured, estimated = run.requested or (0, 0)
    if abs(estimated - measured) <= NOTHING * measured:
        return "unsplit remainders"
    first = run.spec.parallelism.engine == "deepspeed" and run.spec.parallelism.zero_stage == 2 and not run.alone
    return "other ranks need more than the first" if first else "not known"


def drawn_sentence() -> str:
    """The figures of the runs that were drawn last, in two sentences."""
    held_out = [run for run in drawn() if is_held_out(run.file)]
    alone, many = (_abs(run for run in held_out if run.alone is flag) for flag in (True, False))
    families = len({run.family for run in held_out})
    everywhere = _abs(run for run in everything() if run.alone)
    return (
        f"On {len(alone)} randomly sampled runs of {families} model families, evaluated after the formulas were "
        f"frozen, the estimated peak of allocated memory has {_said(alone)}.\n"
        f"On {len(many)} ranks of 8 and 64 GPUs it has {_said(many)}.\n"
        f"On all {len(everywhere)} recorded runs of one GPU it has {_said(everywhere)}.\n"
    )


def _abs(runs: Iterable[Run]) -> list[float]:
    return [abs(run.error) for run in runs]


def _said(errors: list[float]) -> str:
    return f"a median error of {median(errors):.2%} and a maximum error of {max(errors):.2%}"


def grid_families() -> str:
    """Every recording by the family of its model."""
    rows = []
    for family in sorted({run.family for run in everything()}):
        alone, many = (
            [run for run in everything() if run.family == family and run.alone is flag] for flag in (True, False)
        )
        theirs = sum(run.spec.training.implementation == "huggingface" for run in alone)
        counts = [str(len(alone) - theirs), str(theirs or "")]
        rows.append([family, *counts, *_some(alone), str(len(many) or ""), *_some(many)])
    last = [sum(run.alone for run in everything()), sum(not run.alone for run in everything())]
    heads = ["family", "plain", "huggingface", "median", "p95", "maximum", "N-GPU ranks", "median", "p95", "maximum"]
    return table(heads, rows) + f"\n{last[0]} runs on one GPU, {last[1]} ranks of N-GPU jobs.\n"


def _some(several: list[Run]) -> list[str]:
    return _figures(several) if several else ["", "", ""]


SETTINGS: dict[str, Callable[[Spec], object]] = {
    "modules": lambda spec: spec.training.implementation,
    "recipe": lambda spec: spec.training.recipe,
    "dtype": lambda spec: spec.training.dtype,
    "attention": lambda spec: spec.training.attention,
    "recompute": lambda spec: spec.training.recompute if isinstance(spec.training.recompute, str) else "a list",
    "dropout": lambda spec: (
        "none" if spec.training.dropout == 0 else "model's" if spec.training.dropout is None else "yes"
    ),
    "loss": lambda spec: spec.training.loss,
    "micro-batches per step": lambda spec: spec.training.gradient_accumulation_steps,
    "zero_grad": lambda spec: spec.training.zero_grad,
    "clipping": lambda spec: "none" if spec.training.gradient_clipping is None else "yes",
    "finetune": lambda spec: spec.training.finetune,
    "fp8": lambda spec: spec.training.fp8,
    "activation offload": lambda spec: spec.training.offload_activations,
    "tokens": lambda spec: "multiples of 64" if spec.training.sequence_length % 64 == 0 else "any",
    "optimizer": lambda spec: spec.training.optimizer,
    "optimizer implementation": lambda spec: spec.training.optimizer_implementation,
}
SPREADS: dict[str, Callable[[Spec], object]] = {
    "engine, stage": lambda spec: f"{spec.parallelism.engine}, {spec.parallelism.zero_stage}",
    "ranks": lambda spec: spec.parallelism.ranks,
    "tensor parallelism": lambda spec: spec.parallelism.tensor_parallel,
    "offload": lambda spec: spec.parallelism.offload,
    "micro-batches per step": lambda spec: spec.training.gradient_accumulation_steps,
    "recipe": lambda spec: spec.training.recipe,
}


def grid_settings(where: str) -> str:
    """Every recording of one GPU, or of ranks of N-GPU jobs, by its settings."""
    settings = SETTINGS if where == "single" else SPREADS
    runs = [run for run in everything() if run.alone is (where == "single")]
    rows = []
    for name, value in settings.items():
        found: dict[str, list[Run]] = {}
        for run in runs:
            found.setdefault(str(value(run.spec)), []).append(run)
        for nth, word in enumerate(sorted(found, key=lambda word: (not word.isdecimal(), word.zfill(4)))):
            families = len({run.family for run in found[word]})
            head = name if nth == 0 else ""
            rows.append([head, word, str(len(found[word])), str(families), *_figures(found[word])])
    return table(["setting", "value", "runs", "families", "median", "p95", "maximum"], rows)
