"""The documentation as a site: every page is in its navigation, and guides stay short."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.site import outside

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
WORDS_OF_GUIDES = 15_000
WORDS_OF_A_GUIDE = 2_000


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects of MkDocs's extensions."""


def tagged(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
    return suffix


Loader.add_multi_constructor("tag:yaml.org,2002:python/", tagged)
SITE: Any = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def navigated(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inside = entry.values() if isinstance(entry, dict) else entry
    return [page for part in inside for page in navigated(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigated(SITE["nav"])) == sorted(PAGES)


def test_pages_are_guides_reference_explanations_or_reports() -> None:
    folders = {page.partition("/")[0] for page in PAGES if "/" in page}

    assert folders == {"guides", "reference", "explanations", "reports"}
    assert {page for page in PAGES if "/" not in page} == {"index.md", "page.md", "questions.md", "contributing.md"}


def test_guides_are_short() -> None:
    words = {path.name: len(path.read_text().split()) for path in (DOCS / "guides").glob("*.md")}

    assert sum(words.values()) <= WORDS_OF_GUIDES
    assert [name for name, count in words.items() if count > WORDS_OF_A_GUIDE] == []


def test_a_broken_link_fails_the_build() -> None:
    assert SITE["strict"] is True
    assert {SITE["validation"][kind] for kind in ("omitted_files", "unrecognized_links", "anchors")} == {"warn"}


@pytest.mark.parametrize(
    ("target", "page", "expected"),
    [
        ("../../configs/gpt2.yaml", "reference/presets.md", "configs/gpt2.yaml"),
        ("../examples/project", "guides/checking.md", "docs/examples/project"),
        ("../explanations/formulas.md", "guides/estimate.md", None),
        ("../pictures/gpt2.png", "guides/trace.md", None),
        ("../CHANGELOG.md", "contributing.md", "CHANGELOG.md"),
    ],
)
def test_links_that_leave_the_pages_lead_to_the_repository(target: str, page: str, expected: str | None) -> None:
    assert outside(target, page) == expected


def test_each_generated_number_of_the_readme_has_its_source() -> None:
    shown = re.findall(r"<!-- generated: (\S+)", (ROOT / "README.md").read_text())
    table = (DOCS / "reports" / "index.md").read_text()

    assert shown
    assert [name for name in shown if f"`{name}`" not in table] == []


# Numbers that the README's own sentences state, and the row of the table with their source.
TYPED = {
    "1,784 ids": "published models",
    "8, 16, 16, 18 and 20 bytes": "bytes per parameter of each recipe",
    "Python 3.11": "oldest Python",
}
# Names and settings with digits, which state nothing.
NAMES = ("Llama 3 8B", "micro-batch 4", "mixed-16, -18, -20", "exits with 1 ")


def test_each_typed_number_of_the_readme_has_its_source() -> None:
    prose = (ROOT / "README.md").read_text()
    table = (DOCS / "reports" / "index.md").read_text()
    for part in (r"(?ms)^```.*?^```$", r"(?ms)<!-- generated: .*?<!-- end -->", r"\]\([^)]*\)"):
        prose = re.sub(part, "", prose)
    assert [number for number in TYPED if number not in prose] == []
    for name in (*TYPED, *NAMES):
        prose = prose.replace(name, "")

    assert re.findall(r".*(?<!\w)\d.*", re.sub(r"`[^`\n]*`", "", prose)) == []
    assert [row for row in TYPED.values() if f"| {row} |" not in table] == []


def test_versions_of_the_site_are_pinned() -> None:
    lines = (ROOT / "constraints-site.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]

    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned)
    assert any(line.startswith("mkdocs-material==") for line in pinned)
