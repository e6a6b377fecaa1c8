"""Hostile requests to what the page's worker calls: an answer or one message, in seconds, without control characters."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from memcalc.errors import MOST_ERRORS
from memcalc.page.engine import parts
from tests.fuzz.page_requests import request
from tests.fuzz.test_formats import CONTROL, SECONDS
from tests.fuzz.test_fuzz import NoAnswer, time_limit

REQUESTS = 2_000


def texts(value: Any) -> Iterator[str]:
    """Every string in a part, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def complaint(answered: list[str]) -> str | None:
    """What is wrong with the parts of an answer, if anything."""
    found = [json.loads(part.encode()) for part in answered]  # the worker passes UTF-8 on
    kinds = [part["part"] for part in found]
    if not found or kinds[0] not in ("answer", "error") or not {*kinds[1:]} <= {"section", "copies", "error"}:
        return f"parts {kinds}"
    for part in found:
        for text in texts(part):
            if control := CONTROL.search(text):
                return f"{control[0]!r} in {text[:80]!r}"
            if "Traceback" in text:
                return "a traceback"
    if kinds[-1] == "copies":
        json.loads(found[-1]["document"])
        if "\n" in found[-1]["command"]:
            return "a command of several lines"
    lines = [line for part in found if part["part"] == "error" for line in part["message"].splitlines() or [""]]
    if len(lines) > MOST_ERRORS or any(not 10 < len(line) <= 3_000 for line in lines):
        return f"a message of {len(lines)} lines: {lines[0][:80]!r}"
    return None


def complaints(seed: int, samples: int) -> list[str]:
    """The complaints about a number of requests; `request(random.Random(label))` makes each again."""
    found = []
    ends: Counter[str] = Counter()
    for index in range(samples):
        label = f"{seed}:{index}"
        asked = request(random.Random(label))
        try:
            with time_limit(SECONDS):
                answered = list(parts(asked))
                problem = complaint(answered)
            ends[json.loads(answered[-1])["part"]] += 1
        except (Exception, NoAnswer) as error:  # noqa: BLE001 -- whatever escapes is the finding
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        if problem is not None:
            found.append(f"{label}: {asked[:200]}: {problem}")
    print(f"\n{samples} requests, their last parts {dict(ends)}")
    return found


def test_some_requests() -> None:
    assert complaints(1, 5) == []


@pytest.mark.long
def test_thousands_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        found = complaints(2, REQUESTS)

    assert found == []
