"""Text formats of `check`, by name: JSON, JUnit XML, workflow commands of GitHub, SARIF and Markdown."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from memcalc.checking.report import CheckOutcome, CheckReport
from memcalc.report.checks.text import HARMLESS, RULES, place, sentence, summary
from memcalc.text import harmless, harmless_lines, json_safe, without_commands
from memcalc.units import Unit

FORMS = ("json", "junit", "github", "sarif", "markdown")


def rendered(report: CheckReport, form: str, unit: Unit) -> str:
    """Return the report in one of FORMS, without a final line break. Sizes in JSON are bytes."""
    match form:
        case "json":
            from memcalc.documents.check import check_document

            return _dumped(check_document(report))
        case "junit":
            return junit_xml(report, unit)
        case "github":
            return "\n".join(github_lines(report, unit))
        case "sarif":
            from memcalc.report.checks.sarif import sarif_document

            return _dumped(sarif_document(report, unit))
        case _:
            from memcalc.report.checks.table import check_markdown

            return check_markdown(report, unit)


def _dumped(document: Any) -> str:
    return json_safe(json.dumps(document, indent=2))


def github_lines(report: CheckReport, unit: Unit) -> list[str]:
    """Return workflow commands of GitHub Actions: an annotation per config that fails, notices, and the summary.

    Source: docs.github.com, "Workflow commands for GitHub Actions"; what is escaped how: actions/runner,
    src/Runner.Common/ActionCommand.cs.
    """
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


NAME = "memcalc check"

# What XML 1.0 cannot hold, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: CheckReport, unit: Unit) -> str:
    """Return the report as one test suite, for GitLab, Jenkins, CircleCI, Azure and others.

    JUnit itself has published no schema. This is the one of Jenkins's xUnit plugin, `junit-10.xsd`, which pytest writes
    too: a configuration is a test case, one that does not fit or grew has failed, an invalid one is in error.
    """
    cases = [line for outcome in report.outcomes for line in _case(outcome, unit, fails=report.fails(outcome))]
    failures, errors = report.count("does not fit") + report.count("grew"), report.count("broken")
    if not report.outcomes and report.exit_code:
        errors = 1
        cases = _element(NAME, f"    <error type={_attribute('nothing')} message={_attribute(summary(report))}/>")
    tests = max(len(report.outcomes), errors)
    counts = f'tests="{tests}" failures="{failures}" errors="{errors}"'
    return "\n".join(
        (
            '<?xml version="1.0" encoding="UTF-8"?>',
            f"<testsuites name={_attribute(NAME)} {counts}>",
            f' <testsuite name={_attribute(NAME)} {counts} skipped="0">',
            *cases,
            f"  <system-out>{_text(summary(report))}</system-out>",
            " </testsuite>",
            "</testsuites>",
        )
    )


def _case(outcome: CheckOutcome, unit: Unit, *, fails: bool) -> list[str]:
    text = sentence(outcome, unit)
    if not fails:
        output = "\n".join((text, *outcome.notes))
        return _element(outcome.path, f"    <system-out>{_text(output)}</system-out>")
    tag = "error" if outcome.status == "broken" else "failure"
    kind = _attribute(RULES[outcome.status][0])
    return _element(
        outcome.path, f"    <{tag} type={kind} message={_attribute(text)}>{_text(f'{place(outcome)}: {text}')}</{tag}>"
    )


def _element(name: str, inner: str) -> list[str]:
    return [f"  <testcase name={_attribute(name)} classname={_attribute(NAME)}>", inner, "  </testcase>"]


def _attribute(text: str) -> str:
    return quoteattr(_plain(text)).replace("##[", "&#35;#[")


def _text(text: str) -> str:
    """Return the text of an element, with no line that GitHub Actions would read as a workflow command."""
    return escape(_plain(text)).replace("::", "&#58;:").replace("##[", "&#35;#[")


def _plain(text: str) -> str:
    return harmless_lines(_FORBIDDEN.sub("\ufffd", text))
