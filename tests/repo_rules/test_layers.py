"""The architecture, checked: who may import whom, and who may import what.

The picture is in docs/explanations/architecture.md. A package that is not listed here has no place yet: give it one.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sources import tree_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "memcalc"

# From the top down. Packages on one line have the same height and never import each other.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("page",),
    ("__init__",),
    ("api",),
    ("report",),
    ("documents",),
    ("validation",),
    ("checking", "search", "recomputation", "diagnosis", "replaying", "cells"),
    ("sweeping",),
    ("verdict",),
    ("suggestions",),
    ("exporters",),
    ("importers",),
    ("estimation", "tracing", "nullcuda", "measuring"),
    ("simulation",),
    ("sharding",),
    ("stream",),
    ("generation",),
    ("states",),
    ("architectures",),
    ("operators",),
    ("programs",),
    ("layout",),
    ("recorder",),
    ("step",),
    ("snapshots",),
    ("allocator",),
    ("events",),
    ("ledger",),
    ("frameworks",),
    ("spec",),
    ("catalogue",),
    ("data",),
    ("workspaces",),
    ("progress", "jupyter"),
    ("units",),
    ("json_lines",),
    ("files", "directories"),
    ("errors",),
    ("text", "extras"),
    ("startup",),
)
HEIGHT = {name: -i for i, layer in enumerate(LAYERS) for name in layer}

TORCH_SIDE = {"step", "recorder", "tracing", "nullcuda", "measuring"}
EVERYWHERE = set(HEIGHT)
BASE = {"cli", "units", "json_lines", "files", "directories", "errors", "text", "extras", "startup"}
THIRD_PARTY = {
    "torch": TORCH_SIDE,
    "transformers": TORCH_SIDE | {"spec"},  # what a config.json of a family without formulas means, only it knows
    "diffusers": TORCH_SIDE | {"spec"},  # and of a UNet, only it
    "rich": {"cli", "report"},
    "huggingface_hub": {"catalogue"},
    "typer": {"cli"},
    "matplotlib": {"report"},
    "scipy": {"recomputation"},
    "elftools": {"nullcuda"},
    "distributed": {"cells"},
    "pynvml": {"measuring"},
    "numpy": EVERYWHERE - BASE,
    "pydantic": EVERYWHERE - BASE,
    "pydantic_core": {"spec"},
    "typing_extensions": {"documents"},
    "yaml": EVERYWHERE - BASE,
}

VERBS = (
    "estimate trace measure dry_run replay oom recompute fit sweep check diff compare load models gpus schema"
).split()


class Import(NamedTuple):
    """One import statement's target, and where it stands."""

    importer: str  # the package of ours that holds the statement
    target: str  # dotted
    where: str


def layer_of(dotted: str) -> str:
    """The package of ours that a dotted name such as "memcalc.spec.model" belongs to."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement at any depth; expressions, which are most of a tree and hold none, are not visited."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, ())
            if isinstance(inner, list):  # the body of a lambda or of a conditional is an expression
                nodes += inner
                yield from inner


def imports() -> Iterator[Import]:
    """Every import in the package, those inside functions included."""
    children = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    for path in sorted(PACKAGE.rglob("*.py")):
        importer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in statements(tree_of(path)):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "memcalc":
                # `from memcalc import spec` is an import of memcalc.spec; the version may be read by all.
                names = [alias.name for alias in node.names if alias.name != "__version__"]
                targets = [f"memcalc.{name}" if name in children else "memcalc" for name in names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{where}: relative import"
                targets = [str(node.module)]
            else:
                continue
            yield from (Import(importer, target, where) for target in targets)


@cache
def all_imports() -> tuple[Import, ...]:
    """Every import in the package, read once."""
    return tuple(imports())


def test_every_package_has_its_place() -> None:
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    assert packages <= set(HEIGHT)


def test_arrows_point_down() -> None:
    up = [
        f"{i.where}: {i.importer} imports {i.target}"
        for i in all_imports()
        if i.target.split(".")[0] == "memcalc"
        and i.importer != layer_of(i.target)
        and HEIGHT[i.importer] <= HEIGHT[layer_of(i.target)]
    ]

    assert up == []


def test_third_parties_are_known_only_where_they_belong() -> None:
    strays = [
        f"{i.where}: {i.importer} imports {i.target}"
        for i in all_imports()
        if (top := i.target.split(".")[0]) not in sys.stdlib_module_names
        and top != "memcalc"
        and i.importer not in THIRD_PARTY.get(top, set())
    ]

    assert strays == []


def test_no_package_is_named_like_a_verb() -> None:
    """`memcalc.trace` is a function; a package of that name would replace it as soon as it is imported."""
    names = {path.stem for path in PACKAGE.iterdir()}

    assert names.isdisjoint(VERBS)


@pytest.mark.parametrize(
    ("statement", "target"),
    [("import torch", "torch"), ("def f():\n    from memcalc.spec import model", "memcalc.spec")],
)
def test_the_walk_sees_imports_at_any_depth(
    statement: str, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "stray.py").write_text(statement)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)

    assert [(i.importer, i.target) for i in imports()] == [("ledger", target)]
