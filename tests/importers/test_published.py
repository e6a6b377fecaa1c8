"""The record of published files: it covers what is claimed, and today's tables say of each field what it says."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from memcalc.importers.config_json import CONFIG_JSON
from memcalc.importers.registry import FRAMEWORKS

RECORD = Path(__file__).parents[2] / "benchmarks" / "recordings" / "published-configs.json"
FILES: list[dict[str, Any]] = json.loads(RECORD.read_text())
BY_NAME = {framework.name: framework for framework in FRAMEWORKS}
KINDS: dict[str, set[str | None]] = {
    "mapped": {"mapped"},
    "no_effect": {"no effect", "not modelled"},  # what is switched off changes nothing
    "not_modelled": {"not modelled"},
    "unknown": {None},
}


def test_every_format_was_tried_on_published_files() -> None:
    """Those of eleven frameworks, and Hugging Face's own."""
    found = {file["framework"] for file in FILES} - {None}

    assert found == {*BY_NAME, CONFIG_JSON.name} - {"NeMo 2"}  # its recipes are published as programs
    assert len(BY_NAME) == 12


def test_every_file_is_named_with_its_commit() -> None:
    assert all(len(file["commit"]) == 40 and "/" in file["repository"] and file["path"] for file in FILES)
    assert len({(file["repository"], file["path"]) for file in FILES}) == len(FILES)


def test_every_file_is_read_or_refused_with_a_message() -> None:
    lists = tuple(KINDS)
    assert all(file["refused"] or any(file[kind] for kind in lists) for file in FILES)
    assert not any("Traceback" in (file["refused"] or "") for file in FILES)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_tables_are_those_of_the_record(name: str) -> None:
    """`python benchmarks/published_configs.py` regenerates it after a table was changed."""
    wrong = defaultdict(set)
    for file in FILES:
        if file["framework"] != name:
            continue
        for kind, expected in KINDS.items():
            for field in file[kind]:
                meaning = BY_NAME[name].meaning(field)
                if (None if meaning is None else meaning.kind) not in expected:
                    wrong[kind].add(field)

    assert wrong == {}


def test_limits_of_published_files_are_those_that_a_verdict_takes() -> None:
    """Only files that are sized have some; each names what, whether it holds memory, and at least how many bytes."""
    for file in FILES:
        assert not (file["refused"] and file["limits"])
        for what, holds_memory, at_least_bytes in file["limits"]:
            assert what
            assert holds_memory or not at_least_bytes
    recipes = [file for file in FILES if file["path"] == "recipes/configs/mistral/7B_full_ppo_low_memory.yaml"]
    limits = {what: least for file in recipes for what, holds_memory, least in file["limits"] if holds_memory}
    assert limits["the reference model"] == 2 * 7_241_732_096  # Mistral 7B, in 16 bits


def test_published_files_say_what_they_leave_open() -> None:
    """Each that is estimated names the program that was taken, but for descriptions of a model alone."""
    sized = [file for file in FILES if not file["refused"]]
    assert all(file["program"] for file in sized if file["framework"] != "Hugging Face config.json")
    assert all(0 <= share < 1 for file in sized for _, _, share in file["assumed"])
