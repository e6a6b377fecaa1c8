"""The diagnosis of a log: every report in it, and its cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memcalc.diagnosis.accounting import Account, Check, account_of, checks
from memcalc.diagnosis.advice import Advice, advice_for
from memcalc.diagnosis.causes import Cause, cause_of
from memcalc.diagnosis.changes import ExplainedReport, explain
from memcalc.diagnosis.log_reader import Readable
from memcalc.diagnosis.log_scanner import Scanner
from memcalc.diagnosis.report import OutOfMemoryReport
from memcalc.diagnosis.report_assembly import collect
from memcalc.errors import InputError
from memcalc.jupyter import NotebookDisplay
from memcalc.suggestions.run_overrides import UserRun
from memcalc.text import harmless


@dataclass(frozen=True, slots=True)
class Finding:
    """One report with its interpretation."""

    report: OutOfMemoryReport  # the message
    account: Account  # the parts of the device's memory
    checks: tuple[Check, ...]  # consistency of the message's figures
    cause: Cause  # of the failure
    advice: tuple[Advice, ...]  # remedies, the most promising first


@dataclass(frozen=True, slots=True)
class Diagnosis(NotebookDisplay):
    """The out-of-memory reports of a log.

    Args:
        log: its name.
        findings: the distinct reports, in the order of their first occurrence.
        not_kept: number of messages beyond the distinct reports that are kept.
        harmless: number of messages that report that the program continued.
        chosen: index of the finding that is explained: the first one, unless another was requested.
        explained: that finding with the configuration of the run; None without a configuration.
    """

    log: str
    findings: tuple[Finding, ...]
    not_kept: int
    harmless: int
    chosen: int
    explained: ExplainedReport | None = None

    def __repr__(self) -> str:
        """Return the log and its number of reports, in one line."""
        return f"<Diagnosis of {harmless(self.log)}: {len(self.findings)} reports; line {self.finding.report.line}>"

    @property
    def finding(self) -> Finding:
        """The report that is explained."""
        return self.findings[self.chosen]


def diagnose(log: str | Path, stream: Readable, run: UserRun | None = None, report: int = 1) -> Diagnosis:
    """Find the out-of-memory reports of a log and explain them.

    Args:
        log: the name of the log.
        stream: its bytes.
        run: the run's configuration, if there is one.
        report: the number of the report to explain, from 1.

    Raises:
        InputError: the log has no such message, or no report of that number.
    """
    try:
        scanner = Scanner()
        found = collect(scanner.reports(stream))
        found.not_kept += scanner.passed if found.reports else 0
    except InputError as error:
        raise error.located(str(log)) from None
    if not found.reports:
        raise InputError(
            "no out-of-memory message of PyTorch, PaddlePaddle, TensorFlow or JAX.",
            "Pass the complete output of the run; several ranks may write to several files.",
            str(log),
        )
    if not 1 <= report <= len(found.reports):
        raise InputError(
            f"report {report} does not exist.", f"The log has reports 1 to {len(found.reports)}.", str(log)
        )
    findings = tuple(_finding(each) for each in found.reports)
    chosen = findings[report - 1]
    explained = None if run is None else explain(run, chosen.report, chosen.account)
    return Diagnosis(str(log), findings, found.not_kept, found.harmless, report - 1, explained)


def _finding(report: OutOfMemoryReport) -> Finding:
    account = account_of(report)
    cause = cause_of(report, account)
    return Finding(report, account, checks(report, account), cause, advice_for(report, account, cause))
