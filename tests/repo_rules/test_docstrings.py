"""Every public function, class and module of the package says what it is for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import tree_of

PACKAGE = Path(__file__).parents[2] / "memcalc"
MODULES = sorted(PACKAGE.rglob("*.py"))


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Names of public definitions without a docstring; methods of public classes included."""
    if ast.get_docstring(tree) is None:
        yield "the module"
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    while scopes:
        scope = scopes.pop()
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_") or any(
                word in ast.unparse(d) for d in node.decorator_list for word in ("override", "overload")
            ):
                continue
            if ast.get_docstring(node) is None:
                yield node.name
            if isinstance(node, ast.ClassDef):
                scopes.append(node)


@pytest.mark.parametrize("part", sorted({path.relative_to(PACKAGE).parts[0] for path in MODULES}))
def test_public_names_have_docstrings(part: str) -> None:
    """Of the modules of a package; empty ones have none."""
    missing = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] == part and path.read_text().strip()
        for name in undocumented(tree_of(path))
    ]

    assert missing == []
