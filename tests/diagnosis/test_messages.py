"""Real messages, from the threads named beside each: every figure right, as a person reads it."""

import io
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from memcalc.diagnosis.diagnosis import Diagnosis, diagnose

MESSAGES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "messages.yaml").read_text())
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def diagnosis_of(text: str) -> Diagnosis:
    return diagnose("error.log", io.BytesIO(text.encode()))


def by_hand(text: str) -> int:
    """ "14.81 GiB + 336.73 MiB" as bytes, each term rounded."""
    terms = re.findall(r"([+-]?) ?([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return sum((-1 if sign == "-" else 1) * round(Fraction(number) * UNITS[unit]) for sign, number, unit in terms)


def name(message: dict[str, Any]) -> str:
    return "/".join(message["from"].split("/")[3:])


def test_there_are_enough() -> None:
    frameworks = [message["framework"] for message in MESSAGES]

    assert len(MESSAGES) >= 80
    assert {each: frameworks.count(each) >= 2 for each in set(frameworks)} == dict.fromkeys(
        ("pytorch", "paddlepaddle", "tensorflow", "xla", "driver"), True
    )
    assert all(message["from"].startswith("https://github.com/") for message in MESSAGES)


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_every_figure(message: dict[str, Any]) -> None:
    diagnosis = diagnosis_of(message["text"])
    finding = diagnosis.finding
    report = finding.report

    assert len(diagnosis.findings) == 1
    assert report.framework == message["framework"]
    assert ":".join(str(part) for part in (report.device_type, report.device) if part is not None) == message["device"]
    assert {key: figure.bytes for key, figure in report.figures.by_name().items()} == {
        key: by_hand(text) for key, text in message["figures"].items()
    }
    assert {key: figure.bytes for key, figure in report.figures.buffers} == {
        key: by_hand(text) for key, text in message.get("buffers", {}).items()
    }
    assert {holder.pid: holder.bytes.bytes for holder in report.holders} == {
        pid: by_hand(text) for pid, text in message.get("processes", {}).items()
    }
    assert report.count == message.get("count", 1)
    assert report.operator == message.get("operator", "")
    assert diagnosis.harmless == message.get("harmless", 0)
    if report.framework == "pytorch":
        assert report.setting == message.get("setting", "")
        assert list(report.sources) == message.get("speakers", [])


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_the_figures_agree_but_where_the_driver_pages_or_hides(message: dict[str, Any]) -> None:
    finding = diagnosis_of(message["text"]).finding
    failed = [
        check.relation for check in finding.checks if not check.holds and check.relation != "requested > available"
    ]

    assert failed == message.get("fails", [])
    assert finding.account.own_pid == message.get("own_pid")


@pytest.mark.parametrize("message", [each for each in MESSAGES if "cause" in each], ids=name)
def test_every_cause(message: dict[str, Any]) -> None:
    assert diagnosis_of(message["text"]).finding.cause.name == message["cause"]
