"""Every public function, class and module of the package says what it is for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "memcalc"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.read_text().strip())


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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_names_have_docstrings(path: Path) -> None:
    assert list(undocumented(ast.parse(path.read_text()))) == []
