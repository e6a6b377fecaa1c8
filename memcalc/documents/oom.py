"""The document of `oom`. Bytes are integers, each with the rounding of what was printed."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from memcalc.diagnosis.causes import Name
from memcalc.diagnosis.changes import ExplainedReport
from memcalc.diagnosis.diagnosis import Diagnosis, Finding
from memcalc.diagnosis.report import Framework
from memcalc.diagnosis.sizes import PrintedSize
from memcalc.documents.shared import filled


class OomDevice(TypedDict):
    """The device of a message."""

    kind: str
    """cuda, hip, xpu, npu, mps, gpu, tpu or cpu"""
    index: int | None


class OomFigure(TypedDict):
    """A size as the message prints it."""

    bytes: int
    slack_bytes: int
    """largest difference to the exact size, since the text is rounded"""


class OomProcess(OomFigure):
    """A process that the message lists."""

    pid: int
    this_process: bool


class OomCheck(TypedDict):
    """A relation that the figures of the message must satisfy."""

    relation: str
    holds: bool
    off_bytes: int
    meaning: str | None
    """what a violation means for the run"""


class OomAdvice(TypedDict):
    """One remedy."""

    lever: str
    effect: str
    gain_bytes: int | None
    """upper bound; null: the message has no figures for it"""
    enough: bool | None
    """whether that gain would let the request succeed"""


class OomReport(TypedDict):
    """One message, however often the log repeats it."""

    framework: Framework
    wording: str
    """the message format, with the versions that print it"""
    line: int
    """of its first occurrence"""
    count: int
    speakers: list[str]
    """ranks, processes or hosts that logged it"""
    device: OomDevice
    phase: str | None
    """of a training step, from the traceback"""
    tensor: str | None
    """shape and type that did not fit"""
    operator: str | None
    advised_setting: str | None
    """setting that the message itself recommends"""
    figures: dict[str, OomFigure]
    """the figures of the message, by their meaning"""
    buffers: dict[str, OomFigure]
    """the largest buffers that the message lists"""
    processes: list[OomProcess]
    account: dict[str, int | None]
    """parts of the memory of the device; null: the message lacks it"""
    shortfall_bytes: int | None
    """missing bytes; negative: there was enough memory"""
    cause: Name
    fragmented: bool
    """whether the cache holds more than in measured healthy runs"""
    checks: list[OomCheck]
    advice: list[OomAdvice]
    """the most promising first"""


class OomInterval(TypedDict):
    """The expected range of the reserved memory of the whole step."""

    low_bytes: int
    high_bytes: int
    runs: int
    kind: str
    replayed: bool


class OomChange(TypedDict):
    """One change, or a pair of them, that saves memory."""

    levers: list[str]
    set: list[str]
    """the change in the syntax of --set"""
    cost: str
    result: str
    """effect on the training result"""
    allocated_bytes: int
    saved_bytes: int
    needed_bytes: int
    fits: bool | None


class OomConfig(TypedDict):
    """The configuration of the run (--config), compared with the message."""

    name: str
    phase: str
    allocated_bytes: int
    """of the ledger in that phase"""
    components: dict[str, int]
    held_bytes: int | None
    """allocated plus requested bytes of the run"""
    unexplained_bytes: int
    """the part of held_bytes that the ledger does not contain"""
    budget_bytes: int | None
    """what the allocator could have reserved"""
    budget_source: str | None
    needed_bytes: int
    """reserved memory of the whole step, plus unexplained_bytes"""
    needed_interval: OomInterval
    changes: list[OomChange]
    notes: list[str]


class OomDocument(TypedDict):
    """The document that `oom --format json` prints."""

    schema_version: Literal[1]
    source: Literal["oom"]
    log: str
    explained_report: int
    """number of the report that is explained, from 1"""
    messages_not_kept: int
    harmless_messages: int
    """messages after which the program continued"""
    reports: list[OomReport]
    config: OomConfig | None
    """null: --config was not given"""


def diagnosis_document(diagnosis: Diagnosis) -> OomDocument:
    """Return the document of a log."""
    explained = diagnosis.explained
    return {
        "schema_version": 1,
        "source": "oom",
        "log": diagnosis.log,
        "explained_report": diagnosis.chosen + 1,
        "messages_not_kept": diagnosis.not_kept,
        "harmless_messages": diagnosis.harmless,
        "reports": [_report(finding) for finding in diagnosis.findings],
        "config": None if explained is None else _config(explained),
    }


def _report(finding: Finding) -> OomReport:
    report, account, cause = finding.report, finding.account, finding.cause
    parts = {
        "live": account.live,
        "private": account.private,
        "cached": account.cached,
        "outside": account.outside,
        "others": account.other_processes,
        "unexplained": account.unexplained,
        "free": account.free,
        "room": account.available,
    }
    return filled(
        OomReport,
        report,
        speakers=list(report.sources),
        device={"kind": report.device_type, "index": report.device},
        phase=report.phase or None,
        tensor=report.tensor or None,
        operator=report.operator or None,
        advised_setting=report.setting or None,
        figures={name: _figure(figure) for name, figure in report.figures.by_name().items()},
        buffers={name: _figure(figure) for name, figure in report.figures.buffers},
        processes=[
            {"pid": holder.pid, **_figure(holder.bytes), "this_process": holder.pid == account.own_pid}
            for holder in report.holders
        ],
        account={name: None if figure is None else figure.bytes for name, figure in parts.items()},
        shortfall_bytes=account.shortfall,
        cause=cause.name,
        fragmented=cause.fragmented,
        checks=[filled(OomCheck, check, meaning=check.meaning or None) for check in finding.checks],
        advice=[filled(OomAdvice, advice) for advice in finding.advice],
    )


def _figure(figure: PrintedSize) -> OomFigure:
    return {"bytes": figure.bytes, "slack_bytes": figure.slack}


def _config(explained: ExplainedReport) -> OomConfig:
    needed = explained.needed
    return {
        "name": explained.result.spec.name,
        "phase": explained.phase,
        "allocated_bytes": explained.allocated,
        "components": {component.value: size for component, size in explained.components.items()},
        "held_bytes": explained.run_bytes,
        "unexplained_bytes": explained.unexplained,
        "budget_bytes": explained.budget,
        "budget_source": explained.budget_source or None,
        "needed_bytes": needed.bytes,
        "needed_interval": {
            "low_bytes": needed.low_bytes,
            "high_bytes": needed.high_bytes,
            "runs": needed.errors.runs,
            "kind": needed.errors.run_type,
            "replayed": needed.errors.replayed,
        },
        "changes": [
            filled(
                OomChange,
                change,
                set=list(change.overrides),
                allocated_bytes=change.allocated,
                saved_bytes=change.saved,
                needed_bytes=change.needed,
            )
            for change in explained.changes
        ],
        "notes": list(explained.notes),
    }
