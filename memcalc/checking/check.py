"""The logic of `check`: find configs, estimate each, compare it with its limit and the baseline."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from memcalc.checking.baseline import Baseline, growth_of, read_baseline, same_path, with_allowance
from memcalc.checking.discovery import DiscoveredFiles, find_configs
from memcalc.checking.patterns import is_pattern
from memcalc.checking.policy import NO_POLICY, Limits, Policy
from memcalc.checking.report import BUDGET, CheckOutcome, CheckReport, Describe, Sizes, Status, urgency
from memcalc.errors import InputError, InputErrors, MemcalcError
from memcalc.importers.loading import load
from memcalc.ledger.verdict import Answer
from memcalc.progress import Progress, silent
from memcalc.spec.hardware.gpus import find_gpu, with_budget
from memcalc.spec.spec import Spec
from memcalc.units import exact_size
from memcalc.verdict.judge import size, size_against

MOST_DESCRIBED = 100  # configs: a description may take as long as its check

_STANDARD_INPUT = "-"


class _Task(NamedTuple):
    path: str
    limits: Limits


def check(
    paths: Iterable[str | os.PathLike[str]],
    asked: Limits = Limits(),  # noqa: B008 - immutable, and sets no limit
    policy: Policy = NO_POLICY,
    *,
    baseline: str | Path | None = None,
    jobs: int | None = None,
    skip_others: bool = False,
    describe: Describe | None = None,
    progress: Progress = silent,
) -> CheckReport:
    """Estimate every configuration under `paths`.

    Args:
        paths: files, which are always checked, directories, which are searched, and patterns; none: the policy's paths.
        asked: limits for all files; they override the policy.
        policy: a settings file.
        baseline: the JSON of an earlier check, in place of the policy's.
        jobs: number of processes, in place of the policy's; None: one per core if there are enough files.
        skip_others: also skip named files that do not look like a configuration.
        describe: makes `CheckOutcome.description`, for at most MOST_DESCRIBED configurations: those that do not fit,
            then the closest to their limit. Picklable.
        progress: called with the number of finished files.

    Raises:
        InputError: the GPU, the overrides or the baseline are invalid, or there is nothing to check. An invalid
            configuration is an outcome, not an error: the others are still estimated.
    """
    if asked.gpu is not None:
        find_gpu(asked.gpu)  # rejects an unknown GPU once, rather than once per file
    asked = asked.with_gpu()
    if baseline is None and policy.baseline is not None:
        baseline = policy.here(policy.baseline)
    before = None if baseline is None else read_baseline(baseline)
    if before is None and asked.max_growth is not None:
        raise InputError("--max-growth needs a baseline.", "Add --baseline FILE, the JSON of an earlier check.")
    wanted = list(paths) or [policy.here(path) for path in policy.paths]
    if not wanted:
        raise InputError(
            "nothing to check: no path is given.", "Name files or directories, or add `paths = [...]` to memcalc.toml."
        )
    found = find_configs(wanted, policy.excludes, skip_others=skip_others)
    tasks = [_Task(path, policy.limits_of(path, asked)) for path in found.files]
    jobs = 1 if _STANDARD_INPUT in found.files else jobs or policy.jobs
    at_once = describe if len(tasks) <= MOST_DESCRIBED else None
    outcomes = mapped(partial(_outcome, describe=at_once), tasks, jobs, "configurations", progress)
    if before is not None:
        outcomes = [_compared(outcome, task, before) for outcome, task in zip(outcomes, tasks, strict=True)]
    if describe is not at_once:
        chosen = _most_urgent(outcomes)
        repeated = mapped(partial(_outcome, describe=describe), [tasks[at] for at in chosen], jobs, "details", progress)
        for at, outcome in zip(chosen, repeated, strict=True):
            outcomes[at] = outcomes[at]._replace(description=outcome.description)
    gone = set(before or ()) - {same_path(path) for path in found.files}
    return CheckReport(
        tuple(outcomes),
        found.skipped,
        asked.budget,
        before is not None,
        tuple(sorted(gone)),
        skip_others,
        tuple(_remarks(found, () if paths else policy.idle(found.files), before)),
    )


def _most_urgent(outcomes: Sequence[CheckOutcome]) -> list[int]:
    """Return the indices of the outcomes to describe; standard input cannot be read twice."""
    valid = [at for at, each in enumerate(outcomes) if each.sizes is not None and each.path != _STANDARD_INPUT]
    return sorted(valid, key=lambda at: urgency(outcomes[at]))[:MOST_DESCRIBED]


def _remarks(found: DiscoveredFiles, idle: Iterable[str], before: Baseline | None) -> Iterator[str]:
    """Yield notes on inputs that have no effect; `idle` are patterns of the settings that match no file."""
    yield from (
        f"{folder} is a link to a directory and was not followed; name it to check it" for folder in found.linked
    )
    yield from (f"{pattern} in the settings matches no configuration" for pattern in idle)
    if before and not any(same_path(path) in before for path in found.files):
        yield "the baseline has none of these configurations: nothing was compared"


def _outcome(task: _Task, describe: Describe | None) -> CheckOutcome:
    path, limits = task
    try:
        if is_pattern(path):
            raise InputError("no file matches this pattern.", "Correct or remove it.")  # noqa: TRY301 - as all others
        spec = load(path, limits.overrides, gpu=limits.gpu)
        if spec.hardware.gpu is None and limits.budget is not None:  # the memory of a GPU, as in `estimate --budget`
            spec = load(spec, gpu=with_budget(None, exact_size(limits.budget)))
        if spec.hardware.gpu is None:
            raise InputError(  # noqa: TRY301 - as above
                "no GPU and no budget to check against.",
                "Add --gpu GPU or --budget SIZE, or set hardware.gpu in the file.",
            )
        return _outcome_of(path, spec, limits, describe)
    except InputErrors as several:  # a report has one line per file; `estimate` lists all errors
        return _broken(path, str(several.errors[0]))
    except MemcalcError as error:
        return _broken(path, str(error))
    except Exception as error:  # noqa: BLE001 - a bug of memcalc in one file must not hide the others
        text = f"a bug of memcalc: {type(error).__name__}: {error}. Please report it with the file."
        return CheckOutcome(path, "broken", message=" ".join(text.split()))


def _broken(path: str, text: str) -> CheckOutcome:
    """Return the outcome of an invalid file; its message omits the file and line."""
    name = re.escape(path), re.escape(Path(path).name)
    place = re.match(rf"(?:{'|'.join(name)})(?::(\d+))?: ", text)
    if place is None:
        return CheckOutcome(path, "broken", message=text)
    return CheckOutcome(path, "broken", message=text[place.end() :], line=int(place[1]) if place[1] else None)


def _outcome_of(path: str, spec: Spec, limits: Limits, describe: Describe | None) -> CheckOutcome:
    """Return the outcome of one run: by its lower bound if that exceeds the limit, else as in `estimate`."""
    gpu = spec.gpu
    assert gpu is not None
    end, words = gpu.usable_bytes, f"usable on {gpu.label}"
    if limits.budget is not None and limits.budget <= end:
        end, words = limits.budget, BUDGET
    margin = 0 if limits.margin is None else limits.margin.of(end)
    limit = end - margin
    result = size_against(spec, limit)
    verdict, headline = result.judgement, result.headline
    assert verdict is not None
    sizes = Sizes(
        spec.name,
        result.ledger.peak_bytes,
        headline.reserved_bytes,
        headline.device_bytes,
        result.ledger.peak_phase,
        headline.rank,
        gpu.name,
    )
    return CheckOutcome(
        path,
        _STATUSES[verdict.answer],
        sizes,
        verdict.needed_bytes,
        "device",
        verdict.limit_bytes,
        is_bound=verdict.device_bytes is None,
        interval=None if verdict.interval is None else verdict.interval[:2],
        unmodelled=verdict.unmodelled,
        limit=words,
        margin_bytes=margin,
        notes=result.notes,
        # A description has reserved and device memory even if a bound decided the verdict.
        description=describe(size(spec, limit) if verdict.device_bytes is None else result) if describe else None,
    )


_STATUSES: dict[Answer, Status] = {"fits": "fits", "does-not-fit": "does not fit", "unknown": "unknown"}


def _compared(outcome: CheckOutcome, task: _Task, before: Baseline) -> CheckOutcome:
    """Return the outcome with its change from the baseline; growth beyond the allowance fails."""
    if outcome.sizes is None:
        return outcome
    change = growth_of(outcome.path, outcome.sizes, before)
    most = task.limits.max_growth
    growth = with_allowance(change, None if change is None or most is None else most.of(change[0]))
    too_much = growth is not None and growth.allowed is not None and growth.difference > growth.allowed
    return outcome._replace(growth=growth, status="grew" if too_much and outcome.status == "fits" else outcome.status)


T = TypeVar("T")
U = TypeVar("U")

WORTH_IT = 64  # files; with fewer, starting processes costs more time than it saves
_SHARES = 32  # chunks per process: files differ in cost, and all processes shall end at about the same time


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def mapped(
    function: Callable[[T], U],
    items: Sequence[T],
    jobs: int | None,
    what: str = "items",
    progress: Progress = silent,
) -> list[U]:
    """Return `function(item)` for each item, in order.

    Args:
        function: must be picklable, as must its results.
        items: must be picklable.
        jobs: number of processes; None: one per core if there are enough items.
        what: what the items are, for progress.
        progress: called with the number of finished items.
    """
    if jobs is None:
        jobs = cores() if len(items) >= WORTH_IT else 1
    jobs = min(jobs, len(items))
    if jobs <= 1:
        return list(_told(map(function, items), what, progress, len(items)))
    from concurrent.futures import ProcessPoolExecutor  # imported late: a check of one file starts faster

    with ProcessPoolExecutor(jobs, initializer=_begin) as pool:
        try:
            found = pool.map(function, items, chunksize=max(1, len(items) // (jobs * _SHARES)))
            return list(_told(found, what, progress, len(items)))
        except BaseException:  # interrupted: do not wait for the remaining items
            processes = list((pool._processes or {}).values())  # noqa: SLF001 -- public from Python 3.14 on
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise


def _told(items: Iterator[T], what: str, progress: Progress, total: int) -> Iterator[T]:
    for number, item in enumerate(items, start=1):
        progress(what, number, total)
        yield item


def _begin() -> None:
    """Initialize a process of the pool: ignore Ctrl-C, and end when the parent ends."""
    import signal
    import threading

    # Ctrl-C is sent to all processes of a terminal; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End the process when its parent ends, even if killed."""
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait((parent.sentinel,))
        os._exit(1)
