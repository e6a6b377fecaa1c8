"""The search of `memcalc fit`: layouts, largest and smallest values, and changes that fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from memcalc.errors import InputError
from memcalc.ledger.result import Result
from memcalc.progress import Progress, silent
from memcalc.search.costs import fixed_sequences, step_sequences, token_seconds
from memcalc.search.layouts import HOLDABLE, Space
from memcalc.search.maxima import MAXIMA, maximum
from memcalc.search.minima import MINIMA, MOST_GPUS, fewest_gpus, gpu_verdicts, least_recompute
from memcalc.search.offers import OfferSearch, checked_prices, offers
from memcalc.search.ranking import best_of, rank
from memcalc.search.result import FitQuery, FitResult, Nearest
from memcalc.search.variants import is_hopeless, varied, violated_rule
from memcalc.spec.hardware.gpus import GpuSpec, all_gpus, find_gpu
from memcalc.spec.hardware.interconnect import System, system_of
from memcalc.spec.spec import Spec
from memcalc.suggestions.candidates import OTHER_CARD, RESULTS, ChangeCandidate, candidates
from memcalc.suggestions.change_search import ChangeSearch, ProposedChange, SuggestedChange
from memcalc.suggestions.run_overrides import UserRun, overrides_to
from memcalc.verdict.judge import judge, size
from memcalc.verdict.reasons import Reason, host_bytes, reason_of


def fit(run: UserRun, query: FitQuery, progress: Progress = silent) -> FitResult:
    """Answer the query of `memcalc fit`.

    Args:
        run: the run.
        query: the query.
        progress: called with the number of layouts and changes done.

    Raises:
        InputError: no GPU is given, or the query is invalid.
    """
    spec = run.spec
    gpu, fixed_fields = _checked(spec, query)
    system = system_of(gpu, query.node, query.nic_gbit)
    gpus = query.gpus or spec.parallelism.ranks
    sequences = step_sequences(spec, gpus)
    asked, unasked = _spread_over(run, gpus)
    result = None if asked is None else size(run.as_read(asked))
    answer = FitResult(query, gpu, system, gpus, sequences, result, unasked, spec.name)
    needs_base = query.minimize not in ("gpus", "cost")
    own = asked is not None and gpus == spec.parallelism.ranks
    everything = query.maximize is None and query.minimize is None
    if everything or (needs_base and not own):
        space = Space(spec, gpus, system.node, sequences, fixed_fields)
        ranking = rank(space, system, spec, fixed_fields, query.top, progress, as_read=run.as_read)
        answer.ranking = ranking
        answer.pruned = dict(space.pruned)
        answer.best = best_of(ranking, query.top, run.as_read)
    answer.base_is_best = bool(answer.best) and not own
    answer.base = base = answer.best[0].variant if answer.base_is_best else asked
    if base is not None:
        for what in MAXIMA[:2] if everything else filter(None, [query.maximize]):
            found = maximum(what, base, run.as_read)
            answer.maxima[what] = replace(found, overrides=overrides_to(run, found.result.spec) if found.result else ())
    _minimized(answer, run, fixed_fields, progress)
    if answer.changed is not None:
        answer.smallest_changes = _nearest(run, answer.changed, gpu, system, progress)
    answer.reason = _reason(answer)
    return answer


def _reason(answer: FitResult) -> Reason | None:
    """Return the reason for a run that does not fit: with the smallest value, or if no change makes it fit."""
    if answer.query.maximize is not None:
        failed = next((found for found in answer.maxima.values() if found.smallest is not None), None)
        return None if failed is None or failed.smallest is None else reason_of(size(failed.smallest))
    return None if answer.changed is None or answer.smallest_changes else reason_of(answer.changed)


def _checked(spec: Spec, query: FitQuery) -> tuple[GpuSpec, frozenset[str]]:
    if spec.hardware.gpu is None:
        raise InputError("no GPU is given.", "Add --gpu GPU or set hardware.gpu; `memcalc gpus` lists the names.")
    for option, value, known in (
        ("--maximize", query.maximize, MAXIMA),
        ("--minimize", query.minimize, MINIMA),
        *(("--hold", field, HOLDABLE) for field in query.fixed_fields),
    ):
        if value is not None and value not in known:
            raise InputError(f"{value!r} is not known.", f"Name one of {', '.join(known)}.", option)
    if query.maximize is not None and query.minimize is not None:
        raise InputError("--maximize and --minimize exclude each other.", "Use one at a time.")
    if query.gpus is not None and not 1 <= query.gpus <= MOST_ASKED:
        raise InputError(f"gpus = {query.gpus} is out of range.", f"Set 1 to {MOST_ASKED:,}.", "--gpus")
    return find_gpu(spec.hardware.gpu), frozenset(query.fixed_fields)


MOST_ASKED = 131_072


def _spread_over(user: UserRun, gpus: int) -> tuple[Spec | None, str]:
    """Return the run with data parallelism adjusted to the number of GPUs, or why it is invalid."""
    spec = user.spec
    world, replicas = spec.parallelism.ranks, spec.parallelism.data_parallel
    model_parallel = world // replicas
    if gpus == world:
        return spec, ""
    if gpus % model_parallel:
        return None, f"the run splits its model over {model_parallel} GPUs, which do not divide {gpus}"
    replicas = gpus // model_parallel
    training = {}
    total, micro = spec.training.global_batch_size, spec.training.micro_batch_size
    if total is not None:
        if total % (micro * replicas):
            return (
                None,
                f"global_batch_size = {total} cannot be split into micro-batches of {micro} on {replicas} replicas",
            )
        training = {"gradient_accumulation_steps": total // (micro * replicas)}
    run = varied(spec, parallelism={"data_parallel": replicas}, training=training)
    violation = violated_rule(run)
    if violation is not None:
        return None, violation.problem
    try:
        user.as_read(run)
    except InputError as error:
        return None, error.problem
    return run, ""


def _minimized(answer: FitResult, run: UserRun, fixed_fields: frozenset[str], progress: Progress) -> None:
    wanted, gpu, base, spec = answer.query.minimize, answer.gpu, answer.base, run.spec
    if wanted == "gpus":
        batch = fixed_sequences(spec)
        most = answer.query.gpus or MOST_GPUS
        answer.fewest, answer.may_be_fewer = fewest_gpus(
            spec, gpu, answer.system, batch, fixed_fields, most, progress=progress, as_read=run.as_read
        )
        if answer.fewest is not None:
            answer.gpus, answer.sequences = answer.fewest, step_sequences(spec, answer.fewest)
            space = Space(spec, answer.gpus, answer.system.node, answer.sequences, fixed_fields)
            answer.ranking = rank(
                space, answer.system, spec, fixed_fields, answer.query.top, progress, as_read=run.as_read
            )
            answer.best = best_of(answer.ranking, answer.query.top, run.as_read)
            answer.pruned = dict(space.pruned)
    elif wanted == "cost":
        _offered(answer, run, fixed_fields, progress)
    elif base is None:
        return
    elif wanted == "gpu_kind":
        answer.gpu_verdicts = gpu_verdicts(base, gpu.vendor, run.as_read)
    elif wanted == "recompute":
        answer.least_recompute = least_recompute(base, run.as_read)
        if answer.least_recompute is None:
            answer.all_recomputed = size(run.as_read(varied(base, training={"recompute": "full"})))


def _offered(answer: FitResult, run: UserRun, fixed_fields: frozenset[str], progress: Progress) -> None:
    """Fill in the offers, and the layouts of the offer with the lowest cost per token."""
    query = answer.query
    search = OfferSearch(fixed_fields, query.gpus or MOST_GPUS, query.top, progress, as_read=run.as_read)
    answer.offers = offers(run.spec, checked_prices(query.prices), search, query.node, query.nic_gbit)
    first = answer.offers[0]
    answer.gpu, answer.system = first.gpu, first.system
    if first.layouts is not None:
        answer.gpus, answer.sequences, answer.ranking, answer.best, answer.pruned, _ = first.layouts


def _nearest(run: UserRun, result: Result, gpu: GpuSpec, system: System, progress: Progress) -> list[Nearest]:
    """Return the smallest changes that make the run fit: single ones, and pairs that are not enough alone."""
    judged = 0

    def outcome(changed: Result) -> tuple[int, bool | None]:
        nonlocal judged
        progress("changes", judged)
        judged += 1
        found = judge(changed.spec)
        return found.needed_bytes, found.fits

    def priced(change: SuggestedChange) -> Nearest:
        slowdown = _slowdown(change, result.spec, system, before)
        fixed_fields = host_bytes(change.spec) if _on_host(change.spec) != ("none", "none") else (0, 0)
        return Nearest(change, slowdown, *fixed_fields)

    def price(change: ProposedChange) -> tuple[float, ...]:
        return _order(change, _slowdown(change, result.spec, system, before))

    before = token_seconds(result.spec, system)
    offered = [*candidates(result.spec), *_larger_gpus(gpu)]
    words = overrides_to(run, result.spec)
    finder = ChangeSearch(run, offered, result.ledger.peak_bytes, outcome, is_hopeless, price, words)
    fitting = [change for change in finder.singles() if change.fits]
    return sorted(map(priced, (*fitting, *finder.pairs())), key=lambda found: _order(found.change, found.slowdown))


def _order(change: ProposedChange, slowdown: float | None) -> tuple[float, ...]:
    """Return the sort key of a change: same GPUs, more GPUs, another GPU, another result; then its size."""
    time = inf if slowdown is None else slowdown
    return RESULTS.index(change.result), len(change.levers), change.spec.parallelism.ranks, change.costly_changes, time


def _larger_gpus(gpu: GpuSpec) -> Iterator[ChangeCandidate]:
    larger = [other for other in all_gpus() if other.usable_bytes > gpu.usable_bytes and other.vendor == gpu.vendor]
    for other in sorted(larger, key=lambda other: (other.usable_bytes, other.name)):
        yield ChangeCandidate("larger card", (f"hardware.gpu={other.name}",), "another GPU", OTHER_CARD)


def _slowdown(change: ProposedChange, base: Spec, system: System, before: float) -> float | None:
    """Return the relative GPU time per token by the cost model (-0.1: a tenth less); None with offload."""
    if _on_host(change.spec) != _on_host(base):
        return None
    other = None if change.spec.hardware.gpu == base.hardware.gpu else find_gpu(change.spec.hardware.gpu or "")
    return token_seconds(change.spec, system if other is None else system_of(other)) / before - 1


def _on_host(spec: Spec) -> tuple[str, str]:
    return spec.parallelism.offload, spec.training.offload_activations
