"""What is typed wrongly ends with 2 and one clear line; the rest with the codes that CI relies on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memcalc
from memcalc.cli.tree import COMMANDS
from tests.thinning import quick_every

ROOT = Path(__file__).parents[2]
MISSING = "error: Missing argument 'CONFIG': a Hugging Face hub id, a preset (see `memcalc models`), a YAML file, a config.json or its directory, another framework's configuration, or - for standard input. Try `memcalc estimate --help`.\n"
WRONG = {
    "estimate": MISSING,
    "estimat gpt3": "error: No such command 'estimat'. Did you mean 'estimate'? Try `memcalc --help`.\n",
    "predict gpt3": "error: No such command 'predict'. Try `memcalc estimate CONFIG`.\n",
    "infer gpt3": ("error: No such command 'infer'. Try `memcalc estimate CONFIG --set inference.new_tokens=N`.\n"),
    "estimate gpt2 --set max_new_tokens=64": (
        "error: --set max_new_tokens=64: unknown field 'max_new_tokens'. "
        "Set inference.new_tokens and inference.prompt_length.\n"
    ),
    "estimate gpt33": "error: gpt33: no file, preset or hub id has this name. Did you mean gpt3?\n",
    "estimate gpt3 --format xml": (
        "error: Invalid value for '--format' / '-f': 'xml' is not one of 'table', 'json', 'markdown', 'csv'. "
        "Try `memcalc estimate --help`.\n"
    ),
    "estimate gpt3 --frobnicate": "error: No such option: --frobnicate (Possible options: --format). Try `memcalc estimate --help`.\n",
    "measure": "error: measure needs one configuration. Name CONFIG or --model NAME, e.g. `memcalc measure gpt2`.\n",
    "measure gpt2 --model gpt2": (
        "error: measure needs one configuration. Name CONFIG or --model NAME, e.g. `memcalc measure gpt2`.\n"
    ),
    "estimate gpt3 --gpu": "error: Option '--gpu' requires an argument.\n",  # advised --set gpu=VALUE
    "estimate gpt3 extra": "error: Got unexpected extra argument(s) (extra). Try `memcalc estimate --help`.\n",
    "estimate gpt3 -b x": (
        "error: Invalid value for '--batch' / '-b': not a whole number; write digits only. "
        "Try `memcalc estimate --help`.\n"
    ),
    "trace gpt3 --steps 0": (
        "error: Invalid value for '--steps': the value must be 1 or greater. Try `memcalc trace --help`.\n"
    ),
    "recompute gpt3 --host-bandwidth x": (
        "error: Invalid value for '--host-bandwidth': not a number. Try `memcalc recompute --help`.\n"
    ),
    "dry-run -- python a.py": (
        "error: dry-run needs a GPU to simulate. Add --gpu GPU, which `memcalc gpus` lists, or --budget SIZE.\n"
    ),
    "diff gpt3": "error: Missing argument 'B': second configuration. Try `memcalc diff --help`.\n",
    "estimate none/run.yaml": (
        "error: none/run.yaml: the file does not exist. Check the path. `memcalc models` lists the presets, "
        "`memcalc models QUERY` searches the published models.\n"
    ),
    "estimate gpt3 --set torch_version=2.13": (
        "error: --set: training.torch_version: torch_version = 2.13 is not a known value. Write 'v2.13'.\n"
    ),
    "estimate gpt3 --set zero_optimization.foo=1": (
        "error: --set zero_optimization.foo=1: unknown field 'foo' in zero_optimization. Choose from "
        "reduce_bucket_size, prefetch_bucket_size, param_persistence_threshold, overlap_comm, separate_no_decay, "
        "copies_fp32_weights, casts_fp32_weights, automatic, bf16_optimizer, own_adam.\n"
    ),
    "check configs --budget lots": (
        "error: --budget: 'lots' is not a size. Write a number and a unit, such as 70GiB (2^30 bytes) or 80GB (10^9 "
        "bytes).\n"
    ),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_command_lines(line: str, run) -> None:
    assert run(*line.split()) == (2, "", WRONG[line])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, run) -> None:
    outcome = run(command, "--help")

    assert outcome.code == 0
    assert outcome.out.startswith(f"Usage: memcalc {command} ")


def test_help_lists_every_command(run) -> None:
    code, out, _ = run("--help")

    assert code == 0
    assert [line.split()[0] for line in out.split("Commands:\n")[1].splitlines()] == list(COMMANDS)


def test_no_arguments_show_the_help(run) -> None:
    assert run() == run("--help")


def test_version(run) -> None:
    assert run("--version") == (0, f"memcalc {memcalc.__version__}\n", "")


def test_python_dash_m() -> None:
    process = subprocess.run([sys.executable, "-m", "memcalc", "--version"], capture_output=True, text=True, check=True)

    assert process.stdout == f"memcalc {memcalc.__version__}\n"


def test_interruption_is_130(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memcalc.report.screens.listings.gpu_rows", interrupted)

    assert run("gpus").code == 130


def test_a_closed_pipe_is_quiet() -> None:
    process = shell("memcalc schema | head -n 1; exit ${PIPESTATUS[0]}")

    assert process.stderr == ""
    assert process.returncode in (0, 141)  # 0: the pipe took it all before it closed


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = f'memcalc() {{ {sys.executable} -m memcalc "$@"; }}; {command}'
    return subprocess.run(
        ["/bin/bash", "-c", program], capture_output=True, text=True, check=False, env=os.environ | environment
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", quick_every(3, ["estimate gpt2", "schema", "gpus"]))
def test_a_full_disk(command: str) -> None:
    process = shell(f"memcalc {command} > /dev/full")

    assert (process.returncode, process.stderr) == (
        3,
        "error: standard output could not be written: No space left on device.\n",
    )


def test_a_bug_does_not_read_as_a_no(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import memcalc.report.screens.listings as m; m.gpu_rows = lambda: 1 / 0\n"
    )
    process = shell("memcalc gpus", PYTHONPATH=f"{tmp_path}:{ROOT}")

    assert process.returncode == 70
    assert process.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_an_error_of_ours_is_shown_as_it_is(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only MemcalcError is caught: a bug must not look like wrong input."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("memcalc.report.screens.listings.gpu_rows", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run("gpus")


@pytest.mark.parametrize("encoding", quick_every(3, ["ascii", "latin-1", "utf-8"]))
def test_terminals_without_unicode(encoding: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "memcalc", "estimate", "gpt3", "--explain"],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": encoding},
    )

    assert (process.returncode, process.stderr) == (0, b"")
