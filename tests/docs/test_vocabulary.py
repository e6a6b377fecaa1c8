"""No text of the repository has the phrases that the language guide calls never right.

Read are pages and workflows; of the package the strings, docstrings, comments, C sources and data files; of the tests,
tools and benchmarks the docstrings and comments; and the names of the tests.
"""

import ast
import io
import re
import tokenize
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
    r"lets? (\w+ )?go": "frees, releases",
    r"(gives?|gave|given) back": "frees",
    r"(hands?|handed) out": "allocates",
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
    r"(config(uration)?|file|model)s?( (is|are))?( \w+)? as (it is|they are)": "unchanged, default settings",
    r"whose": "with, of which; or two sentences",
    r"(allocator|command|engine|file|gpu|kernel|layer|model|process|program|rank|run|stage|tensor)(s|es)? who": "that",
}
PHRASES = re.compile(r"\b(" + "|".join(phrase.replace(" ", r"\s+") for phrase in NEVER) + r")\b")  # of lower case

# Names are not prose: code, options, and the name before the colon in a docstring's list of arguments. A diagram is
# made of names. The output of commands counts as prose.
NAMES = re.compile(r"```mermaid\n.*?^```$|`[^`\n]+`|--[a-z-]+|^ +\w+:", re.MULTILINE | re.DOTALL)

EXAMPLES = {".log", ".py", ".toml", ".yaml", ".yml"}
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "Makefile")
    ),
    *(ROOT / name for name in ("action.yml", ".pre-commit-hooks.yaml", ".pre-commit-config.yaml", "mkdocs.yml")),
    *sorted((ROOT / ".github").rglob("*.yml")),
    *sorted((ROOT / "configs").glob("*.yaml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for path in (ROOT / "docs" / "examples").rglob("*.*") if path.suffix in EXAMPLES),
    *sorted((ROOT / "memcalc" / "data").rglob("*.yaml")),
    *sorted((ROOT / "memcalc" / "data").glob("*.schema.json")),
    *sorted((ROOT / "memcalc" / "nullcuda" / "src").iterdir()),
    *(ROOT / "memcalc" / "page" / "static" / name for name in ("index.html", "page.js", "views.js", "worker.js")),
]
MODULES = sorted((ROOT / "memcalc").rglob("*.py"))


def found(text: str) -> list[str]:
    """Return the phrases, in lower case: a search that ignores case takes twice as long."""
    return [match[0] for match in PHRASES.finditer(NAMES.sub("", text).lower())]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages(path: Path) -> None:
    assert found(path.read_text()) == []


def comments(source: str) -> Iterator[str]:
    """Comments; none if no line with one has such a phrase, because reading all tokens takes long."""
    if not any("#" in line and PHRASES.search(line.lower()) for line in source.splitlines()):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def docstrings(source: str) -> Iterator[str]:
    """Every docstring of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def texts(source: str) -> Iterator[str]:
    """Every string of a module, docstrings included, and every comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    yield from comments(source)


@pytest.mark.parametrize("package", sorted({path.relative_to(ROOT).parts[1] for path in MODULES}))
def test_strings_docstrings_and_comments(package: str) -> None:
    modules = [path for path in MODULES if path.relative_to(ROOT).parts[1] == package]
    wrong = [(path.name, phrase) for path in modules for text in texts(path.read_text()) for phrase in found(text)]

    assert wrong == []


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "tools"])
def test_docstrings_and_comments(folder: str) -> None:
    sources = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}
    read = ((path, text) for path, source in sources.items() for text in (*docstrings(source), *comments(source)))
    wrong = [(str(path), phrase) for path, text in read for phrase in found(text)]

    assert wrong == []


def test_the_phrases_are_found_across_lines_and_names_are_not() -> None:
    assert found("errors in\n  the median") == ["in\n  the median"]
    assert found("`rehearsal` and --rehearse") == []
    assert found("Args:\n    whose: the program.") == []
    assert found("the module lets them go") == ["lets them go"]
    assert found("a file is read as it is, by a program who needs it") == ["file is read as it is", "program who"]
    assert found("as soon as it is read, by people who need it") == []


def test_strings_docstrings_and_comments_are_read() -> None:
    source = '''"""Made anew."""\nNOTE = f"{1} lets go"\nX = 1  # in vain\n'''

    assert [phrase for text in texts(source) for phrase in found(text)] == ["anew", "lets go", "in vain"]


def test_names_of_tests() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in re.findall(r"^ *def (\w+)", path.read_text(), re.MULTILINE)
        if found(name.replace("_", " "))
    ]

    assert wrong == []
