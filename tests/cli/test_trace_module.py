"""`memcalc trace FILE.py:NAME`: the example files print the figures that were published, to the byte.

Source: Akhilez, "Simple GPU memory allocation experiments every ML Engineer should do" (Medium, 23 August 2024), and the
program of its experiments. torch.cuda.memory_allocated printed them on a GPU with a cuBLAS workspace of 8,519,680
bytes, as that of an A100.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.cli.app import main
from tests.schemas import validate_result

pytest.importorskip("torch")

MODULES = Path(__file__).parents[2] / "docs" / "examples" / "modules"
LINEAR, NETWORK, NORM = (str(MODULES / name) for name in ("linear.py", "relu_sigmoid.py", "layer_norm.py"))


def phase_log(out: str) -> dict[str, int]:
    """The table on the screen: bytes at the end of each phase."""
    table = out.partition("Phase log: allocated, bytes\n")[2].partition("\n\n")[0]
    return {
        match[1]: int(match[2].replace(",", "")) for match in re.finditer(r"^  (\w+) +([\d,]+) ", table, re.MULTILINE)
    }


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        # Weight 256,000, bias 1,000 in two blocks of 512, x and y 1,024 each; both gradients and a second workspace.
        ([f"{LINEAR}:make_model"], {"forward_1": 8_778_752, "backward_1": 17_555_456}),
        # Weights 162,304, x and y 4,096 each, and what ReLU saves: 5 x 100 x 4 in 2,048.
        ([f"{NETWORK}:make_model"], {"forward_1": 8_692_224, "backward_1": 17_372_160}),
        ([f"{NETWORK}:make_model", "--inference"], {"forward_1": 8_690_176}),
        # x, weight, quotient and output, one block of 512 each.
        ([f"{NORM}:LayerNorm"], {"forward_1": 2_048}),
    ],
    ids=["linear", "relu-sigmoid", "inference", "layer-norm"],
)
def test_the_published_figures(words: list[str], figures: dict[str, int], run: Any) -> None:
    code, out, err = run("trace", *words, "--steps", "1", "--units", "bytes")

    assert (code, err) == (0, "")
    assert {phase: phase_log(out)[phase] for phase in figures} == figures


@pytest.mark.parametrize(("optimizer", "states"), [("adam", 2), ("sgd", 0)])
def test_four_steps_of_an_optimizer(optimizer: str, states: int, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch 100, no workspaces: 257,024 of weights and as much of gradients and of each moment, 102,400 of input."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    words = ("--inputs", f"{LINEAR}:make_batch", "--optimizer", optimizer, "--steps", "4", "--units", "bytes")

    ends = phase_log(run("trace", f"{LINEAR}:make_model", *words).out)

    size, held, output = 257_024, 257_024 + 102_400, 100_352  # 100 x 250 x 4 = 100,000 in 196 blocks
    for step in range(1, 5):
        moments = states * size if step > 1 else 0
        assert ends[f"zero_grad_{step}"] == held + moments
        assert ends[f"forward_{step}"] == held + moments + output
        assert ends[f"backward_{step}"] == held + moments + output + size
        assert ends[f"optimizer_step_{step}"] == held + states * size + size


def test_both_contexts_of_inference_hold_the_same() -> None:
    target = f"{NETWORK}:make_model"

    logs = [tuple(memcalc.trace(target, inference=mode, steps=2).phase_log()) for mode in ("no_grad", "inference_mode")]

    assert logs[0] == logs[1]
    assert logs[0][-1].end == 8_690_176


def test_json_is_the_document_without_a_configuration(run: Any) -> None:
    document = json.loads(run("trace", f"{NETWORK}:make_model", "--gpu", "a100-40gb", "--format", "json").out)

    validate_result(document)
    assert (document["name"], document["spec"], document["textbook"]) == ("relu_sigmoid.py:make_model", None, None)
    assert document["model"]["parameters"] == 200 * 100 + 100 + 100 * 200 + 200
    assert document["verdict"] == "fits"
    assert sum(document["components"].values()) == document["peak"]["allocated_bytes"]


def test_the_screen_has_the_tables_of_a_configuration(run: Any) -> None:
    out = run("trace", f"{LINEAR}:make_model", "--optimizer", "adamw", "--gpu", "a100-40gb").out

    assert out.startswith("linear.py:make_model: 64,250 parameters; training with adamw, 3 steps\n\nFITS: ")
    for title in ("At the peak: ", "Phases\n", "Memory over the run", "Phase log: ", "Largest at the peak", "Reserved"):
        assert title in out
    assert "Published formulas" not in out
    assert run("trace", f"{LINEAR}:make_model", "--format", "markdown").out.startswith("## linear.py:make_model\n")
    assert run("trace", f"{LINEAR}:make_model", "--format", "csv").out.startswith("component,module,")


def test_a_result_shows_itself(tmp_path: Path) -> None:
    traced = memcalc.trace(f"{NETWORK}:make_model", optimizer="sgd", steps=1, gpu="a100-40gb")
    log = traced.phase_log("bytes")
    traced.plot(tmp_path / "run.html")

    assert re.fullmatch(
        r"<TracedModule relu_sigmoid.py:make_model: peak 16.6 MiB in backward_1; fits a100-40gb; \d+ events>",
        repr(traced),
    )
    assert log["backward_1"].end == 17_372_160
    assert len(log) == len(tuple(log)) == 4 + 5  # baseline, model, optimizer, input; a step
    assert repr(log).splitlines()[1].split() == "phase at its end change peak".split()
    with pytest.raises(KeyError):
        log["backward_9"]
    assert "Phase log" in (tmp_path / "run.html").read_text()
    html = traced._repr_html_()
    assert html.startswith("<div")
    assert "<svg " in html
    assert "<script" not in html
    pytest.importorskip("matplotlib")
    assert type(traced.plot()).__name__ == "Figure"


PROGRAM = '''
import torch
from torch import nn

class Counting(nn.Module):
    """Its constructor reads a parameter, so that it has to be built with values."""
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = float(self.linear.weight.abs().sum())
    def forward(self, x):
        return self.linear(x) * self.scale

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Parameter(torch.zeros(16, 16))
        self.one, self.two = nn.Module(), nn.Module()
        self.one.weight, self.two.weight = shared, shared
    def forward(self, x):
        return x @ self.one.weight @ self.two.weight

class Large(nn.Module):
    """64 GiB of parameters."""
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2**15, 2**15) for _ in range(16)))
    def forward(self, x):
        return self.layers(x)

def sixteen(): return torch.zeros(2, 16)
def eight(): return torch.zeros(2, 8)
def wide(): return (torch.zeros(1, 2**15),)
def number(): return 3
def stops(): raise ValueError("no weights here")
def wrong(): return nn.Linear(4, 4)
ready = nn.Linear(8, 8)
'''


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A file of the user."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


@pytest.mark.parametrize(
    ("name", "inputs", "parameters"),
    [
        ("Counting", "eight", 72),
        ("Tied", "sixteen", 256),
        ("Large", "wide", 16 * (2**30 + 2**15)),
        ("ready", "eight", 72),
    ],
)
def test_modules_of_many_kinds(name: str, inputs: str, parameters: int, program: str, run: Any) -> None:
    out = run("trace", f"{program}:{name}", "--inputs", f"{program}:{inputs}", "--steps", "1", "-f", "json").out

    assert json.loads(out)["model"]["parameters"] == parameters


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py:make_model"], "none.py: the file does not exist. Write FILE.py:NAME, where NAME is a function"),
        (["{}"], "does not name a function in a Python file. Write FILE.py:NAME, where NAME is a function without"),
        (["{}:other"], "program.py: the file has no other. Choose from Counting, Tied, Large, sixteen, "),
        (
            ["{}:number", "--inputs", "{}:eight"],
            ":number: the function returns int, not a torch.nn.Module. Return the module.",
        ),
        (["{}:stops", "--inputs", "{}:eight"], "stops() raises ValueError: no weights here (program.py:35)"),
        (["{}:ready"], "there are no inputs: program.py has no function make_inputs. Write one that returns"),
        (["{}:wrong", "--inputs", "{}:eight"], "forward raises RuntimeError: "),
        (["{}:ready", "--inputs", "{}:eight", "--optimizer", "adamm"], "optimizer = adamm is not available for a"),
        (["{}:ready", "--set", "b=2"], "--set is an option of a configuration, but "),
        (
            ["gpt2", "--inference"],
            "--inference is an option of a module, but gpt2 is not a module. Leave --inference out.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], message: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *(word.format(program) for word in words)]) == 2

    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


ONE_LAYER = """
import sys, torch
class Stop(BaseException): pass
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x)
def make_inputs():
    return (torch.ones(4, 8),)
"""


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("import sys, torch\n", "import sys, torch\nsys.exit(0)\n", "importing it raises SystemExit: 0"),
        ("def make_inputs", "raise Stop('here')\ndef make_inputs", "importing it raises Stop: here"),
        ("super().__init__()", "super().__init__(); sys.exit(3)", "Net() raises SystemExit: 3"),
        ("return self.layer(x)", "sys.exit(3)", "forward raises SystemExit: 3"),
        ("return self.layer(x)", "raise Stop('\\x1b[1m\\n::error::x')", r"Stop: \x1b[1m\x0a::error::x"),
    ],
    ids=["import", "import-base", "init", "forward", "forward-base"],
)
def test_code_that_ends_the_program_is_reported(old: str, new: str, what: str, tmp_path: Path, run: Any) -> None:
    (tmp_path / "own.py").write_text(ONE_LAYER.replace(old, new, 1))

    code, out, err = run("trace", f"{tmp_path / 'own.py'}:Net", "--steps", "1")

    assert (code, out) == (2, "")
    assert what in err
    assert err.count("\n") == 1


def test_what_own_code_prints_is_no_part_of_the_result(tmp_path: Path, run: Any) -> None:
    (tmp_path / "talks.py").write_text(ONE_LAYER.replace("return self", "print('forward'); return self"))

    code, out, err = run("trace", f"{tmp_path / 'talks.py'}:Net", "--steps", "1", "--format", "json")

    assert code == 0
    assert json.loads(out)["name"] == "talks.py:Net"
    assert "forward" in err
