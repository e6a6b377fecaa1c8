"""Tables of docs/explanations/verdict.md: errors of estimates on recorded runs."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from benchmarks.verdict_runs import loaded
from memcalc.measuring.measurement import DONE, OUT_OF_MEMORY
from memcalc.units import format_bytes
from memcalc.verdict.judge import size
from memcalc.verdict.recorded_errors import FILE
from tools.markdown import table
from tools.recorded_errors import OTHER_RANK, RECORDINGS, Compared, compared, recorded_runs

WORTH_A_ROW = 0.01  # error of reserved memory from which on a recorded run has a row of its own
MICRO_BATCH = re.compile(r" b=\d+")
NEAR = RECORDINGS / "near"  # of benchmarks/verdict_runs.py
ANSWERS = {"fits": "FITS", "does-not-fit": "DOES NOT FIT", "unknown": "CANNOT SAY"}


def errors_table() -> str:
    """The errors of replays, by kind."""
    rows = [
        [
            kind,
            found["runs"],
            found["exact"],
            f"{found['median']:.3%}",
            f"{found['worst']:+.2%}",
            f"{found['low']:+.2%} to {found['high']:+.2%}",
        ]
        for kind, found in _data()["replayed"].items()
    ]
    heads = ["run type", "runs", "byte-exact", "median error", "maximum error", "central 95%"]
    return table(heads, rows)


def replay_sentence() -> str:
    """Return README's sentence on replayed reserved memory and on verdicts near the limit of the GPU."""
    alone = [abs(each.error) for each in _replayed() if each.run.spec.parallelism.ranks == 1]
    ranks = [abs(each.error) for each in _replayed() if each.run.spec.parallelism.ranks > 1]
    answers = [(result.verdict, record["outcome"] == DONE) for record, result in near_runs()]
    wrong = sum(answer != "unknown" and (answer == "fits") is not done for answer, done in answers)
    undecided = sum(answer == "unknown" for answer, _ in answers)
    false_fits = sum(answer == "fits" and not done for answer, done in answers)
    return (
        f"The replayed reserved memory of one GPU is byte-exact on {_accuracy(alone)}.\n"
        f"For one rank of DDP, FSDP, DeepSpeed or tensor parallelism it is byte-exact on {_accuracy(ranks)}.\n"
        f"{len(answers):,} randomly sampled runs within 12% of their GPU's memory ran in PyTorch on a simulated GPU "
        f"(the null CUDA device): {false_fits} of the verdicts are a false FITS, {wrong - false_fits} a false DOES NOT "
        f"FIT, and {undecided} CANNOT SAY. Some of these runs led to corrections of the replay.\n"
    )


def _accuracy(errors: list[float]) -> str:
    exact, p95 = sum(error == 0 for error in errors), sorted(errors)[int(0.95 * len(errors))]
    return (
        f"{exact} of {len(errors)} recorded runs, with a 95th percentile error of {p95:.2%} and a maximum of "
        f"{max(errors):.1%}"
    )


def ratios_table() -> str:
    """Reserved over allocated memory, by kind."""
    rows = [
        [kind or "all runs", found["runs"], f"{found['median']:.3f}", f"{found['least']:.3f} to {found['most']:.3f}"]
        for kind, found in _data()["reserved over allocated"].items()
    ]
    return table(["run type", "runs", "median", "range"], rows)


def misses_table() -> str:
    """The recorded runs with a replay error above WORTH_A_ROW, the largest first."""
    missed = sorted((each for each in _replayed() if abs(each.error) > WORTH_A_ROW), key=lambda each: -abs(each.error))
    rows = [
        [
            f"`{(each.run.name.partition('measure ')[2] or each.run.name).replace('--set ', '')}`",
            each.run.device,
            f"{each.run.reserved:,}",
            f"{each.estimated or 0:,}",
            f"{each.error:+.2%}",
        ]
        for each in missed
    ]
    return table(["run", "device", "recorded bytes", "replayed bytes", "error"], rows)


@lru_cache(maxsize=1)
def _replayed() -> tuple[Compared, ...]:
    return tuple(each for run in recorded_runs() if (each := compared(run)).estimated is not None)


def near_records() -> list[dict[str, Any]]:
    """Records of sampled runs near the limit of their GPU; those that PyTorch refused are left out.

    So are ranks of DDP that were recorded without the memory of NCCL's buffers, which they have beside them. Of a run
    with several recorded ranks, one that ran out of memory counts.
    """
    lines = [(path.stem, line) for path in sorted(NEAR.glob("*.jsonl")) for line in path.read_text().splitlines()]
    records = [json.loads(line) | {"list": name} for name, line in lines]
    ended = [record for record in records if record["outcome"] in (DONE, OUT_OF_MEMORY)]
    right = [record for record in ended if "engine=ddp" not in record["case"] or "communication_bytes" in record]
    by_run: dict[str, dict[str, Any]] = {}
    for record in right:
        run = record["case"].partition(OTHER_RANK)[0]
        if run not in by_run or record["outcome"] == OUT_OF_MEMORY:
            by_run[run] = record
    return list(by_run.values())


@lru_cache(maxsize=1)
def near_runs() -> tuple[tuple[dict[str, Any], Any], ...]:
    """Sampled runs near the limit of their GPU, each with its result."""
    return tuple((record, size(loaded(record["case"]))) for record in near_records())


def near_summary() -> str:
    """How many verdicts were right, wrong and undecided."""
    answers = [(result.verdict, record["outcome"] == DONE) for record, result in near_runs()]
    wrong = sum(answer != "unknown" and (answer == "fits") is not done for answer, done in answers)
    undecided = sum(answer == "unknown" for answer, _ in answers)
    by_replay = sum(result.judgement.expected is (record["outcome"] == DONE) for record, result in near_runs())
    rows = [
        ["runs", len(answers)],
        ["of these completed", sum(done for _, done in answers)],
        ["wrong verdicts", wrong],
        ["undecided (CANNOT SAY)", undecided],
        ["correct by the replay alone, without its interval", by_replay],
    ]
    return table(["", ""], rows)


def _largest() -> dict[str, list[tuple[int, bool, Any]]]:
    """Runs that were tried at their largest micro-batch and one more: the batches, what PyTorch did, and the result."""
    found: dict[str, list[tuple[int, bool, Any]]] = {}
    for record, result in near_runs():
        if record["list"].startswith("largest"):
            run = MICRO_BATCH.sub("", record["case"])
            batch = result.spec.training.micro_batch_size
            found.setdefault(run, []).append((batch, record["outcome"] == DONE, result))
    pairs = {run: sorted(tried, key=lambda each: each[0]) for run, tried in found.items()}
    return {run: tried for run, tried in pairs.items() if len(tried) > 1}


def largest_summary() -> str:
    """How often the largest micro-batch is PyTorch's."""
    pairs = _largest()
    false_fits = sum(result.verdict == "fits" and not done for tried in pairs.values() for _, done, result in tried)
    rows = [
        ["runs tried at two neighboring micro-batches", len(pairs)],
        ["verdict FITS, but ran out of memory", false_fits],
        ["same largest micro-batch in PyTorch and in the replay", sum(map(_is_equal, pairs.values()))],
    ]
    return table(["", ""], rows)


def _is_equal(tried: list[tuple[int, bool, Any]]) -> bool:
    """Whether the smaller batch got through and the larger did not, and the replay says both."""
    outcomes = [done for _, done, _ in tried]
    return outcomes == [True, False] and [each[2].judgement.expected for each in tried] == outcomes


def largest_rest() -> str:
    """The runs with a different largest micro-batch, or one outside the two that were tried."""
    rows = []
    for run, tried in _largest().items():
        if not _is_equal(tried):
            batches = ", ".join(str(batch) for batch, _, _ in tried)
            outcomes = ", ".join("completed" if done else "out of memory" for _, done, _ in tried)
            rows.append([f"`{run}`", batches, outcomes, ", ".join(ANSWERS[result.verdict] for *_, result in tried)])
    return table(["run", "micro-batches", "PyTorch", "verdicts"], rows) if rows else "None.\n"


def near_misses() -> str:
    """The runs with a wrong or undecided verdict."""
    rows = []
    for record, result in near_runs():
        done = record["outcome"] == DONE
        if result.verdict != "unknown" and (result.verdict == "fits") is done:
            continue
        needed, usable = result.judgement.needed_bytes, result.judgement.limit_bytes
        outcome = "completed" if done else "out of memory"
        verdict = ANSWERS[result.verdict]
        rows.append([f"`{record['case']}`", outcome, verdict, format_bytes(needed), format_bytes(usable)])
    return table(["run", "PyTorch", "verdict", "needs", "usable"], rows) if rows else "None.\n"


def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


TABLES = {
    "replay-sentence": replay_sentence,
    "recorded-errors": errors_table,
    "recorded-ratios": ratios_table,
    "recorded-misses": misses_table,
    "near-summary": near_summary,
    "near-misses": near_misses,
    "largest-summary": largest_summary,
    "largest-rest": largest_rest,
}
