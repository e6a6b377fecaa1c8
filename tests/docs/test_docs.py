"""The documentation cannot drift: its output is real, its examples run, its links lead somewhere."""

import difflib
import re
import sys
from pathlib import Path

import pytest
import yaml

import memcalc
from tools.docs import documents, refreshed

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}

SHOWN = set(re.findall(r"^\$ memcalc ([a-z-]+)", "\n".join(TEXTS.values()), re.MULTILINE))


# Pages that compare every record with its estimate, trace a run, search layouts, or have many commands: four seconds
# each and more.
SLOW = {
    *(
        "accuracy.md",
        "accuracy-sampled.md",
        "accuracy-runs.md",
        "accuracy-ranks.md",
        "accuracy-traces.md",
        "verdicts.md",
        "programs.md",
    ),
    *(
        "fit.md",
        "oom.md",
        "questions.md",
        "families.md",
        "trace.md",
        "replay.md",
        "recompute.md",
        "recomputation.md",
        "generation.md",
        "formulas.md",
        "checking.md",
        "sweep.md",
        "verdict.md",
        "configs.md",
    ),
}
SLOW_PARTS = {"real-sentence", "replay-sentence"}


@pytest.mark.parametrize(
    "path", [path for path in documents() if path.name not in SLOW], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_commands_print_what_is_shown(path: Path) -> None:
    """`make docs` rewrites what is stale."""
    shown = path.read_text()

    assert stale(shown, refreshed(shown, keep=SLOW_PARTS, forks=sys.platform == "linux")) == [], (
        "stale: run `make docs`"
    )


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in documents() if path.name in SLOW | {"README.md"}])
def test_tables_of_records_are_fresh(path: Path) -> None:
    shown = path.read_text()

    assert stale(shown, refreshed(shown)) == [], "stale: run `make docs`"


def stale(shown: str, printed: str) -> list[str]:
    return list(difflib.unified_diff(shown.splitlines(), printed.splitlines(), "shown", "printed", lineterm=""))


@pytest.mark.parametrize("name", TEXTS)
def test_every_shown_command_prints_something(name: str) -> None:
    """But for those with redirected output. A filter that finds no line would show an empty result."""
    sessions = re.findall(r"^```console\n(.*?)^```$", TEXTS[name], re.MULTILINE | re.DOTALL)
    shown = [
        part
        for session in sessions
        for part in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE)
    ]

    assert [command for command, output in shown if not output.strip() and " > " not in command] == []


@pytest.mark.parametrize("name", TEXTS)
def test_links_within_the_repository_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXTS[name])
    local = [target for target in targets if "://" not in target]

    assert [target for target in local if not (ROOT / name).parent.joinpath(target).exists()] == []


@pytest.mark.parametrize("name", TEXTS)
def test_configs_shown_are_right(name: str) -> None:
    shown = re.findall(r"^```yaml\n(.*?)^```$", TEXTS[name], re.MULTILINE | re.DOTALL)
    parsed = [yaml.safe_load(text) for text in shown]
    whole = [config for config in parsed if {"model", "preset"} & config.keys()]

    assert all(memcalc.load(config).model.num_layers for config in whole)


def test_every_command_is_shown_with_its_output() -> None:
    from memcalc.cli.tree import COMMANDS

    assert set(COMMANDS) <= SHOWN
