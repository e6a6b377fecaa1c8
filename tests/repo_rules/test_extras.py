"""Hints at what to install name packages that pip finds: the extras of pyproject.toml, written out."""

import re
import tomllib
from pathlib import Path

from memcalc.extras import REQUIREMENTS, installation

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def written_out(extra: str) -> tuple[str, ...]:
    """The requirements of an extra, those of the extras that it includes in their place."""
    found: list[str] = []
    for requirement in EXTRAS[extra]:
        inner = re.fullmatch(r"llm-memcalc\[(\w+)\]", requirement)
        found += written_out(inner[1]) if inner else [requirement]
    return tuple(found)


def test_hints_install_what_the_extras_do() -> None:
    assert {extra: written_out(extra) for extra in EXTRAS if extra != "dev"} == REQUIREMENTS
    assert installation("hf") == "pip install 'torch>=2.6' 'nvidia-ml-py>=12.535' 'transformers>=4.51'"


def test_no_hint_names_memcalc_as_a_package_of_an_index() -> None:
    named = [path for path in sorted((ROOT / "memcalc").rglob("*.py")) if "llm-memcalc" in path.read_text()]

    assert named == []
