"""Streams that are closed, full or broken; and what may leave the program on them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memcalc.cli.app import main
from tests.fuzz.test_formats import COMMAND, CONTROL
from tests.thinning import quick_every

MEMCALC = f"{sys.executable} -m memcalc"


def shell(line: str, folder: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", "-c", line], capture_output=True, cwd=folder, check=False, timeout=60)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("estimate gpt2 >&-", 0),
        pytest.param("estimate gpt2 2>&- >&-", 0, marks=pytest.mark.long),
        pytest.param("estimate nope 2>&-", 2, marks=pytest.mark.long),
        pytest.param("estimate nope >&- 2>&- <&-", 2, marks=pytest.mark.long),
        ("estimate - <&-", 2),
        ("check NOFIT --gpu t4 >&-", 1),
        pytest.param("estimate nope 2>/dev/full", 2, marks=pytest.mark.long),
        pytest.param("--help >&-", 0, marks=pytest.mark.long),
    ],
)
def test_closed_streams_change_nothing_but_what_is_seen(line: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("preset: llama-3-70b\n")
    done = shell(f"{MEMCALC} {line.replace('NOFIT', 'large.yaml')}", tmp_path)

    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert done.stderr == b"" or b"<&-" in line.encode() or line == "estimate - <&-"


@pytest.mark.parametrize("form", quick_every(2, ["table", "json"]))
def test_a_full_disk_is_said_once(form: str) -> None:
    done = shell(f"{MEMCALC} estimate gpt2 --format {form} >/dev/full")

    assert done.returncode == 3
    assert done.stderr == b"error: standard output could not be written: No space left on device.\n"


@pytest.mark.parametrize("unbuffered", quick_every(2, ["PYTHONUNBUFFERED=", "PYTHONUNBUFFERED=1"]))
def test_a_disk_that_is_full_in_the_middle(unbuffered: str, tmp_path: Path) -> None:
    """Without a buffer, as in most containers, Python itself writes once and drops what was not taken."""
    done = shell(f"ulimit -f 8; {unbuffered} {MEMCALC} estimate gpt2 --format json >out.json", tmp_path)

    assert done.returncode == 3
    assert done.stderr == b"error: standard output could not be written: File too large.\n"


@pytest.mark.parametrize("unbuffered", quick_every(2, ["PYTHONUNBUFFERED=", "PYTHONUNBUFFERED=1"], first=1))
def test_a_reader_that_goes_in_the_middle(unbuffered: str) -> None:
    line = f"{unbuffered} {MEMCALC} sweep gpt2 --vary b=1..4000 --format csv | head -n 1 >/dev/null"
    done = shell(f"{line}; exit ${{PIPESTATUS[0]}}")

    assert (done.returncode, done.stderr) == (141, b"")


SLOW_READER = """
import os, subprocess, sys, time
receiving, sending = os.pipe()
os.set_blocking(sending, False)
process = subprocess.Popen([sys.executable, "-m", "memcalc", *sys.argv[1:]], stdout=sending)
os.close(sending)
time.sleep(2)
text = b""
while chunk := os.read(receiving, 1 << 16):
    text += chunk
print(process.wait(), len(text.splitlines()))
"""


@pytest.mark.parametrize("unbuffered", quick_every(2, ["", "1"], first=1))
def test_a_pipe_that_is_not_waited_for(unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent's setting of a pipe is the child's, too."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = "sweep gpt2 --vary b=1..4000 --format csv".split()
    done = subprocess.run(
        [sys.executable, "-c", SLOW_READER, *words], capture_output=True, check=False, text=True, timeout=60
    )

    assert (done.stdout, done.stderr) == ("0 4001\n", "")


def test_colors_on_a_full_disk() -> None:
    done = shell(f"FORCE_COLOR=1 {MEMCALC} estimate gpt2 >/dev/full")

    assert (done.returncode, done.stderr.count(b"error:")) == (3, 1)


@pytest.mark.parametrize("command", ["models", "--help", "estimate gpt2 --format json"])
def test_a_reader_that_has_gone(command: str) -> None:
    done = shell(f"{MEMCALC} {command} | true; exit ${{PIPESTATUS[0]}}")

    assert (done.returncode, done.stderr) == (141, b"")


def test_a_file_does_not_take_the_place_of_a_closed_output(tmp_path: Path) -> None:
    """The next file that is opened would get the number of standard output, and the report would go into it."""
    shell(f"{MEMCALC} check gpt2 --gpu h100-80gb --report json=report.json --format markdown >&-", tmp_path)

    assert (tmp_path / "report.json").read_text().startswith('{\n  "schema_version"')
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


# Each would do something to a terminal or a log: colors, a title, a line of its own, a command of GitHub Actions.
HOSTILE = (
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "a\rb",
    "a\n::error file=x::forged",
    "##[set-env name=PATH]x",
    "::add-mask::x",
    "\u202egnp.exe",
    "\u061cALM",
    "\x85next\u2028line",
    "\x9b31m",
    "\x7f\x08\x08",
    "\udcff",
    "<!--<script>alert(1)</script>",
    "| *a* | `b` |",
)
RUNS = 500


def run_with(name: str, number: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, str]:
    """One of many ways in which a name gets into what is printed; what was requested, stdout and stderr."""
    quoted = "".join(f"\\u{ord(sign):04x}" if sign < " " or sign > "~" else sign for sign in name)
    config, log = folder / "run.yaml", folder / "train.log"
    words = {
        0: ["estimate", "FILE", "--format", "table"],
        1: ["estimate", "FILE", "--format", "json"],
        2: ["estimate", "FILE", "--format", "markdown"],
        3: ["estimate", "FILE", "--format", "csv"],
        4: ["check", "FILE", "--gpu", "h100-80gb", "--format", "table"],
        5: ["check", "FILE", "--gpu", "h100-80gb", "--format", "junit"],
        6: ["check", "FILE", "--gpu", "h100-80gb", "--format", "sarif"],
        7: ["check", "FILE", "--gpu", "h100-80gb", "--format", "markdown"],
        8: ["diff", "FILE", "gpt2"],
        9: ["sweep", "FILE", "--vary", "b=1,2", "--format", "csv"],
        10: ["estimate", "gpt2", "--set", f"name={name}"],
        11: ["estimate", name],
        12: ["oom", "LOG"],
        13: ["replay", "EVENTS"],
        14: ["measure", "--compare", "RECORDS"],
        15: [name],
        16: ["estimate", "gpt2", f"--{name}"],
    }[number % 17]
    kind = number % 4
    text = {
        0: f'name: "{quoted}"\npreset: gpt2\n',
        1: f'preset: "{quoted}"\n',
        2: f'preset: gpt2\ntraining:\n  "{quoted}": 1\n',
        3: f'preset: gpt2\ntraining:\n  recompute: "{quoted}"\n',
    }[kind]
    config.write_text(text)
    log.write_bytes(
        f"{name} CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity; 14.5 GiB already "
        f"allocated; 1 GiB free; 14.6 GiB reserved in total by PyTorch) {name}\n".encode("utf-8", "replace")
    )
    events = folder / "events.jsonl"
    events.write_text(
        '{"format":"memcalc-events","version":1,"columns":["kind","storage","bytes","phase","line"]}\n'
        f'["phase",-1,0,"{quoted}"]\n["alloc",1,4096,"{quoted}","{quoted}"]\n'
    )
    records = folder / "records.jsonl"
    records.write_text(f'{{"record":"{quoted}"}}\n')
    files = {"FILE": config, "LOG": log, "EVENTS": events, "RECORDS": records}
    main([str(files.get(word, word)) for word in words])
    out, err = capsys.readouterr()
    return " ".join(words), out, err


@pytest.mark.parametrize("runs", [51, pytest.param(RUNS, marks=pytest.mark.long)])
def test_no_control_characters_leave_the_program(
    runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either stream, in any format, whatever is named how: 17 commands x 14 names, and some again."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    found = []
    for number in range(runs):
        name = HOSTILE[number % len(HOSTILE)]
        words, out, err = run_with(name, number, tmp_path, capsys)
        found += [
            (words, name, stream[-200:]) for stream in (out, err) if CONTROL.search(stream) or COMMAND.search(stream)
        ]
    assert found == []


def test_annotations_cannot_be_forged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file, one annotation: nothing in it begins a second one."""
    for name in HOSTILE:
        quoted = "".join(f"\\u{ord(sign):04x}" if sign < " " or sign > "~" else sign for sign in name)
        (tmp_path / "run.yaml").write_text(f'preset: gpt2\n"{quoted}": 1\n')
        main(["check", str(tmp_path / "run.yaml"), "--gpu", "h100-80gb", "--format", "github"])
        out, err = capsys.readouterr()

        assert [line.startswith("::error file=") for line in out.splitlines()] == [True, False]
        assert CONTROL.search(out + err) is None
        assert "##[" not in out + err


WRAPPED = """
import os, signal, sys
import memcalc.report.screens.listings as m

class Name:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.{signal})
        for _ in range(10**7):
            pass

def rows():
    type("Owner", (), {{"name": Name()}})

m.gpu_rows = rows
"""


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_python_wraps_into_another_exception(signal: str, code: int, tmp_path: Path) -> None:
    """As it does with everything that is raised while a class is being made, of which imports make thousands."""
    (tmp_path / "sitecustomize.py").write_text(WRAPPED.format(signal=signal))
    root = Path(__file__).parents[2]
    done = shell(f"PYTHONPATH={tmp_path}:{root} {MEMCALC} gpus")

    assert (done.returncode, done.stderr) == (code, b"")
