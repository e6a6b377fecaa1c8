"""Sizing a config loads nothing heavy: the import cost is a feature, so it has a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "numpy", "scipy", "matplotlib"}

PROBE = """
import json, sys
sys.argv = ["memcalc", *sys.argv[1:]]
try:
    exec({statement!r})
except SystemExit as exit:
    assert not exit.code or exit.code == 1, exit.code  # check answers "does not fit" with 1
loaded = sorted({{name.partition(".")[0] for name in sys.modules}})
print("\\n" + json.dumps(loaded))
"""
COMMAND = "from memcalc.cli.app import main; sys.exit(main())"


def loaded(*arguments: str, statement: str = COMMAND) -> set[str]:
    """The top-level packages in memory after a statement has run in a fresh interpreter."""
    process = subprocess.run(
        [sys.executable, "-c", PROBE.format(statement=statement), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return set(json.loads(process.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        pytest.param(["estimate", "--help"], marks=pytest.mark.long),
        pytest.param(["estimate", "gpt3.yaml"], marks=pytest.mark.long),
        pytest.param(["estimate", "gpt3.yaml", "--format", "json"], marks=pytest.mark.long),
        ["check", "configs/gpt2.yaml", "configs/mixtral-8x7b.yaml", "--gpu", "h100-80gb"],
        pytest.param(["oom", "docs/examples/oom.log", "--config", "gpt2"], marks=pytest.mark.long),
        ["fit", "gpt2", "--gpu", "h100-80gb"],
        ["replay", "tests/snapshots/recorded/training-2.13.0.pickle.gz"],
        ["models"],
        ["gpus"],
    ],
    ids=" ".join,
)
def test_a_command_without_a_training_step_loads_nothing_heavy(arguments: list[str]) -> None:
    assert loaded(*arguments) & HEAVY == set()


def test_json_is_printed_without_rich() -> None:
    assert "rich" not in loaded("estimate", "gpt3.yaml", "--format", "json")


def test_the_library_loads_no_terminal() -> None:
    statement = "import memcalc; memcalc.estimate(memcalc.load('gpt3'))"

    assert loaded(statement=statement) & (HEAVY | {"rich", "typer"}) == set()


def test_the_page_loads_nothing_that_a_browser_has_not() -> None:
    """Neither a terminal nor NumPy, for which there is no wheel; nor processes, of which a browser has none."""
    run = {"model": "gpt2", "gpu": "t4", "fields": {"training.micro_batch_size": "64"}}
    for kind in ("estimate", "fit", "diff"):
        request = json.dumps({"kind": kind, "run": run, "other": run, "maximize": "micro_batch_size"})
        statement = f"from memcalc.page.engine import parts; list(parts({request!r}))"
        assert loaded(statement=statement) & (HEAVY | {"rich", "typer", "subprocess", "multiprocessing"}) == set()


def test_the_probe_sees_what_is_loaded() -> None:
    assert "numpy" in loaded(statement="import numpy")
