"""User-facing text has none of the phrases that the language guide calls never right: pages, messages, help."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A phrase, and what to write in its place. Replace by meaning: the second column is a hint, not a substitution.
NEVER = {
    r"rests? of blocks": "unsplit block remainders",
    r"anew": "again, from scratch",
    r"(drawn )?by lot": "randomly sampled",
    r"in vain": "unnecessarily",
    r"(is|are|was|were) told": "is set, is listed, is reported",
    r"laid beside": "compared with",
    r"what is there": "name it: the tensors, the contents of the bucket",
    r"that (is|are) (not )?there": "a real GPU; without a GPU; missing",
    r"to be had": "available",
    r"to spare": "free",
    r"is taken to be": "is assumed to be",
    r"1 is taken": "assuming 1",
    r"in the words of": "in the syntax of",
    r"stands twice": "is repeated",
    r"is no field of": "unknown field",
    r"lets? go": "frees, releases",
    r"gives? back": "frees",
    r"hands? out": "allocates",
    r"highest moments?": "peak",
    r"looked at when": "evaluated after",
    r"comes to its end": "ends",
    r"in the median": "median",
    r"at worst": "maximum",
    r"rehears\w+": "allocator replay",
    r"likewise": "also, the same",
    r"those of them": "repeat the noun",
    r"passed over": "ignored",
    r"goes over": "overrides",
    r"without effect": "no effect on memory",
    r"as it comes": "default settings",
    r"say what it comes to": "set it",
    r"a way that pays": "",
    r"be content with none": "exit 0 if none is left",
}
PHRASES = re.compile(r"\b(" + "|".join(phrase.replace(" ", r"\s+") for phrase in NEVER) + r")\b", re.IGNORECASE)

# Module names, options and fields are names, not prose; a diagram is made of them. Output of commands counts as prose.
NAMES = re.compile(r"```mermaid\n.*?^```$|`[^`\n]+`|--[a-z-]+", re.MULTILINE | re.DOTALL)

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff")),
    *(ROOT / name for name in ("action.yml", ".pre-commit-hooks.yaml", ".pre-commit-config.yaml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "memcalc" / "data").glob("*.schema.json")),
]
MODULES = sorted((ROOT / "memcalc").rglob("*.py"))


def found(text: str) -> list[str]:
    return [match[0] for match in PHRASES.finditer(NAMES.sub("", text))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages(path: Path) -> None:
    assert found(path.read_text()) == []


def texts(path: Path) -> Iterator[str]:
    """Every string of a module but docstrings; of the command line those too, since they are its help."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        shown = id(node) not in docstrings or "cli" in path.parts
        if shown and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_and_help() -> None:
    wrong = [(path.name, phrase) for path in MODULES for text in texts(path) for phrase in found(text)]

    assert wrong == []


def test_the_phrases_are_found_across_lines_and_names_are_not() -> None:
    assert found("errors in\n  the median") == ["in\n  the median"]
    assert found("`rehearsal` and --rehearse") == []
