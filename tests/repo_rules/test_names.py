"""Names: a class has a name of its own in the package, and a module is named by a noun."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.sources import tree_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "memcalc"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")

# Prepositions, adverbs, pronouns and question words, and participles that were names of modules before.
NO_NOUNS = frozenset(
    """
    about after afterwards again alike around arriving before beginning behind beside biased broken built bought cached
    configured cut described drawn foreign frozen given grouped held how judged kept largest made measured moving named
    near nearest one others outside passing paging placing planned played pruned quantized quick reading_back real
    rehearsed remembered repeated salvage saving shown sized smallest spoken standing stepping tokenwise told traced
    uncompiled unobserved unsized unwatched varying watched what when which whole whose wide written
    """.split()
)

MOST_FILES = 32  # modules of one directory


def classes() -> dict[str, list[str]]:
    """Where each class is defined, nested ones included."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def test_class_names_are_unique_in_the_package() -> None:
    assert {name: places for name, places in classes().items() if len(places) > 1} == {}


def test_modules_are_nouns() -> None:
    assert [str(path.relative_to(PACKAGE)) for path in MODULES if path.stem in NO_NOUNS] == []


def test_no_directory_of_code_has_many_files() -> None:
    """About 30: a reader finds a file by its name at a glance."""
    files: dict[Path, int] = defaultdict(int)
    for path in MODULES:
        files[path.parent.relative_to(PACKAGE)] += 1

    assert {str(folder): count for folder, count in files.items() if count > MOST_FILES} == {}
