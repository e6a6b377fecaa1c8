"""docs/questions.md: fourteen questions, each with a command and at most two sections; and every anchor of a link."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUESTIONS = (ROOT / "docs" / "questions.md").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 1
        unique = anchor
        while unique in found:
            unique = f"{anchor}-{number}"
            number += 1
        found.add(unique)
    return found


def sections(page: Path) -> list[tuple[Path, str]]:
    """The sections that a page links to, within the repository."""
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target and "#" in target]
    parted = [target.partition("#") for target in targets]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parted]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_sections(page: Path) -> None:
    lost = [(path.name, anchor) for path, anchor in sections(page) if anchor not in anchors(path)]

    assert lost == []


def test_each_of_the_fourteen_questions_has_a_command_and_one_or_two_sections() -> None:
    questions = re.findall(r"^(\d+)\. \*\*[^*]+\?\*\*(.+)$", QUESTIONS, re.MULTILINE)
    links = [LINK.findall(answer) for _, answer in questions]

    shown = re.findall(r"^```console\n\$ (memcalc [^\n]+)\n(.+?)^```$", QUESTIONS, re.MULTILINE | re.DOTALL)

    assert [int(number) for number, _ in questions] == list(range(1, 15))
    assert len(shown) == 14
    assert all(output.strip() for _, output in shown)  # which tests/docs/test_docs.py runs again
    assert all(1 <= len(targets) <= 2 for targets in links)
    assert all("#" in target for targets in links for target in targets)
