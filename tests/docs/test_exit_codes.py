"""The exit codes that the reference lists are those that the code has, and so are the reasons of exit code 3."""

from __future__ import annotations

import ast
import pkgutil
import re
import signal
from importlib import import_module
from pathlib import Path

import pytest

import memcalc
from memcalc.cli.app import BUG, INTERRUPTED
from memcalc.cli.dry_run import TIMED_OUT
from memcalc.cli.signals import _ENDING
from memcalc.errors import MemcalcError
from tests.sources import tree_of

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()

# The modules that end a command with exit code 3, each with the words of the reference that stand for its reason.
REASONS = {
    "catalogue/resolution.py": "The Hugging Face hub returns no `config.json`",
    "cells/cluster.py": "No Dask scheduler answers",
    "cells/local_processes.py": "an extra of memcalc",
    "cli/app.py": "too little memory for the command",
    "cli/output.py": "A result could not be written",
    "cli/dry_run.py": "temporary report of a dry run",
    "files.py": "A result could not be written",
    "json_lines.py": "standard output, a file, a record",
    "measuring/run_process.py": "a GPU that other processes use, too little free memory for the model alone",
    "measuring/client.py": "The process that ran the training step ended unexpectedly",
    "measuring/devices.py": "no GPU or driver",
    "nullcuda/build.py": "no Linux, no C compiler",
    "nullcuda/dry_run.py": "temporary report of a dry run",
    "nullcuda/elf.py": "an extra of memcalc",
    "nullcuda/torch_build.py": "no CUDA build of torch",
    "nullcuda/tracing.py": "The process that ran the training step ended unexpectedly",
    "recomputation/selective.py": "an extra of memcalc",
    "validation/single_run.py": "`measure --headroom`",
    "validation/suite.py": "another process that writes the same records",
    "recorder/history.py": "its version lacks a required feature",
    "report/html/html_report.py": "A result could not be written",
    "report/plots/files.py": "an extra of memcalc",
    "report/sweeps/files.py": "an extra of memcalc",
    "spec/hardware/local_gpu.py": "`--gpu auto`",
    "step/adapters.py": "an extra of memcalc",
    "step/causal_lm.py": "an extra of memcalc",
    "step/huggingface.py": "a kernel's package",
    "step/losses.py": "a kernel's package",
    "step/optimizers.py": "an optimizer's or a kernel's package",
    "step/packages.py": "PyTorch",
    "step/quantization.py": "an extra of memcalc",
    "tracing/child.py": "The process that ran the training step ended unexpectedly",
}


def rows() -> dict[str, str]:
    return dict(re.findall(r"^\| (\w+) \| (.+) \|$", SECTION, re.MULTILINE))


def errors(base: type[MemcalcError]) -> set[type[MemcalcError]]:
    return {base}.union(*(errors(each) for each in base.__subclasses__()))


def makes(tree: ast.Module) -> bool:
    """Whether a module names the errors of exit code 3 in what it raises, returns or asks for their code."""
    names = {"Unavailable", "NotWritten"}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    asked = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "exit_code" and isinstance(node.value, ast.Name)
    }
    return bool(names & (called | asked))


def test_every_exit_code_is_listed_and_none_else() -> None:
    for module in pkgutil.walk_packages(memcalc.__path__, "memcalc."):
        if module.name.startswith(("memcalc.cli.", "memcalc.snapshots.", "memcalc.files", "memcalc.errors")):
            import_module(module.name)
    ours = {each.exit_code for each in errors(MemcalcError) if each.__module__.startswith("memcalc.")}
    signals = {128 + number for number in (signal.SIGINT, *_ENDING)}

    assert set(rows()) == {"code", "other"} | {str(code) for code in {0, INTERRUPTED, BUG, TIMED_OUT} | ours | signals}


def test_every_reason_of_exit_code_3_is_listed() -> None:
    package = ROOT / "memcalc"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.name != "errors.py" and re.search("Unavailable|NotWritten", path.read_text()) and makes(tree_of(path))
    }

    assert found == set(REASONS)


@pytest.mark.parametrize("module", REASONS)
def test_the_reference_has_the_reason(module: str) -> None:
    assert REASONS[module] in SECTION
