"""Rows of a ledger cite modules of memcalc by path, such as step/lion.py; the modules exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.sources import tree_of

PACKAGE = Path(__file__).parents[2] / "memcalc"
CITED = re.compile(r"(?<![\w/.])((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)\b")
OTHERS = ("data/data_collator.py", "data/processor/supervised.py", "generation/utils.py")  # of other projects


def cited() -> dict[str, str]:
    """Return the paths in strings of the package that begin with one of its folders, each with a file that cites it."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = (name.removeprefix("memcalc/") for name in CITED.findall(node.value))
                found |= {name: path.name for name in names if name.partition("/")[0] in folders}
    return {name: where for name, where in found.items() if name not in OTHERS}


def test_cited_modules_exist() -> None:
    found = cited()

    assert "step/lion.py" in found
    assert {name: where for name, where in found.items() if not (PACKAGE / name).is_file()} == {}
