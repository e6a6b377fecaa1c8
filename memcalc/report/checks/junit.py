"""JUnit XML report of `check`, for GitLab, Jenkins, CircleCI, Azure and others.

JUnit itself has published no schema. This is the one of Jenkins's xUnit plugin, `junit-10.xsd`, which pytest writes
too: a configuration is a test case, one that does not fit or grew has failed, an invalid one is in error.
"""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

from memcalc.checking.report import CheckOutcome, CheckReport
from memcalc.report.checks.text import RULES, place, sentence, summary
from memcalc.text import harmless_lines
from memcalc.units import Unit

NAME = "memcalc check"

# What XML 1.0 cannot hold, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: CheckReport, unit: Unit) -> str:
    """Return the report as one test suite."""
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
