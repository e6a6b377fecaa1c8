"""The report of `check` as workflow commands of GitHub Actions: annotations in the pull request.

Source: docs.github.com, "Workflow commands for GitHub Actions"; what is escaped how: actions/runner,
src/Runner.Common/ActionCommand.cs.
"""

from __future__ import annotations

from memcalc.checking.report import CheckReport
from memcalc.report.checks.text import HARMLESS, RULES, sentence, summary
from memcalc.text import harmless, harmless_lines, without_commands
from memcalc.units import Unit


def github_lines(report: CheckReport, unit: Unit) -> list[str]:
    """Return an annotation per config that fails, a line per config that fits, notices, and the summary."""
    lines = [f"::warning title=memcalc::{_data(remark)}" for remark in report.remarks]
    for outcome in report.outcomes:
        notes = (note for note in outcome.notes if not note.startswith(HARMLESS))
        lines += [f"::notice file={_property(outcome.path)},title=memcalc::{_data(note)}" for note in notes]
        if not report.fails(outcome):
            lines.append(without_commands(harmless(f"{outcome.status}: {outcome.path}: {sentence(outcome, unit)}")))
            continue
        line = "" if outcome.line is None else f"line={outcome.line},"
        properties = f"file={_property(outcome.path)},{line}title={_property(RULES[outcome.status][1])}"
        lines.append(f"::error {properties}::{_data(sentence(outcome, unit))}")
    failed_for_nothing = not report.outcomes and report.exit_code
    return [*lines, f"::error::{_data(summary(report))}" if failed_for_nothing else summary(report)]


def _data(text: str) -> str:
    """Return the text escaped for the message of a workflow command."""
    return harmless_lines(text).replace("%", "%25").replace("\n", "%0A").replace("##[", "#\\x23[")


def _property(text: str) -> str:
    """Return the text escaped for a property, which ends at a colon or comma."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
