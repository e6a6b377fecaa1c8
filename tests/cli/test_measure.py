"""`memcalc measure` on the CPU, small."""

import json
from pathlib import Path

import pytest

import memcalc
from memcalc.errors import Unavailable
from memcalc.measuring.job import Job, encoded
from memcalc.measuring.measure import measured, refuse_death
from memcalc.measuring.measurement import MeasuredDevice
from tests.schemas import validate_result

torch = pytest.importorskip("torch")

from memcalc.measuring.run_process import answer  # noqa: E402 -- needs torch

ROOT = Path(__file__).parents[2]

TINY = ["gpt2", "--set", "num_layers=1", "--set", "s=32", "--set", "vocab_size=64", "--device", "cpu"]

# Products of bf16 matrices take scratch memory on some CPUs.
FP32 = ["--set", "recipe=fp32", "--set", "dtype=fp32", "--set", "attention=eager"]


def test_the_screen(run, golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdict, what was off, then components and phases; on the CPU traces are exact, but for ten bytes in a step."""
    monkeypatch.setenv("COLUMNS", "100")
    out = run("measure", *TINY, "--steps", "2", *FP32).out

    golden("measure_cpu", out)


@pytest.mark.long
def test_json_is_the_document(run, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    files = ["--record", str(record), "--export", str(tmp_path / "run.jsonl")]
    code, out, _ = run("measure", *TINY, "--steps", "1", "--format", "json", "--trace", "none", *files)
    document = json.loads(out)
    record_line = json.loads(record.read_text())

    assert code == 0
    validate_result(document)
    assert (document["source"], document["device"]) == ("measure", "cpu")
    assert (document["estimate"]["source"], document["traces"]) == ("estimate", [])
    assert document["measurement"]["phases"] == record_line["phases"]
    assert (tmp_path / "run.jsonl").stat().st_size > 10_000


@pytest.mark.long
def test_estimate_with_a_measurement_beside_it(run) -> None:
    document = json.loads(run("estimate", *TINY, "--measure", "--format", "json").out)

    assert (document["source"], document["measured"]["source"]) == ("estimate", "measure")


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a MiB of memory, as its process would describe it."""
    monkeypatch.setattr("memcalc.validation.single_run.host_bytes", lambda: 2**20)
    monkeypatch.setattr(
        "memcalc.measuring.client.Worker.describe", lambda *_: (MeasuredDevice("cpu", "cpu", "x86_64"), {})
    )


@pytest.mark.usefixtures("small_host")
def test_a_run_that_cannot_fit_is_not_started(run) -> None:
    code, out, err = run("measure", *TINY, "--headroom")

    assert (code, out) == (3, "")
    assert err.startswith("error: gpt2 cannot fit cpu: the estimate is 0.")
    assert err.endswith(" and the device has 0.00 GiB. Override with --force.\n")


@pytest.mark.usefixtures("small_host")
def test_a_run_that_cannot_fit_is_warned_of_where_it_is_forced(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise Unavailable("it was started")

    monkeypatch.setattr("memcalc.validation.single_run.measure", started)
    code, _, err = run("measure", *TINY, "--headroom", "--force")
    warning, error = err.splitlines()

    assert code == 3
    assert warning.startswith("warning: gpt2 cannot fit cpu: the estimate is 0.")
    assert error == "error: it was started"


def test_what_was_measured_before_the_memory_ran_out_is_shown(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables and document of the phases until then on standard output; why, and exit code 4, beside them."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("memcalc.step.loop.TrainingRun._micro_batch", full)
    spec = memcalc.load("gpt2", "num_layers=1", "s=32", "vocab_size=64", "recipe=fp32", "dtype=fp32")
    job = Job(spec, 1, "cpu", "", str(tmp_path / "events.jsonl"))
    dead = measured(job, json.loads(encoded(answer(job))), "memcalc measure gpt2")
    monkeypatch.setattr("memcalc.validation.single_run.measure", lambda *_, **__: refuse_death(dead, None))
    code, out, err = run("measure", *TINY)
    document = json.loads(run("measure", *TINY, "--format", "json").out)

    assert code == 4
    assert err.startswith("error: gpt2 ran out of memory in zero_grad_1: CUDA out of memory. Tried to allocate 2.00")
    assert "MEASURED on cpu: 30.2 MiB allocated, in input." in out
    assert "The run ran out of memory: later phases are missing." in out
    assert [line.split()[0] for line in out.split("Phases")[1].split("Notes")[0].splitlines()[2:] if line] == [
        "model", "optimizer", "input", "zero_grad_1",
    ]  # fmt: skip
    assert document["measurement"]["outcome"] == "out of memory"


@pytest.mark.long
def test_traces_beside_records(run, golden) -> None:
    """The recorded trial run has stored traces: nothing is traced again."""
    measured_there = ROOT / "benchmarks" / "recordings" / "measured"
    (records,) = measured_there.glob("null-*.jsonl")
    kept = measured_there / "traces" / records.name
    before = kept.read_bytes()
    code, out, _ = run("measure", "--compare", str(records), "--trace", "fake", "--record", str(kept))

    assert (code, kept.read_bytes()) == (0, before)
    golden("measure_compare", out[out.index("Errors of the trace") :])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["gpt2", "--compare", "x.jsonl"],
            "error: --compare: --compare reads all configurations from its file. Remove CONFIG",
        ),
        (
            ["--suite", "x.yaml", "--set", "b=2"],
            "error: --suite: --suite reads all configurations from its file. Remove CONFIG",
        ),
        (
            ["--suite", "x.yaml", "--compare", "x.jsonl"],
            "error: --suite: --suite reads all configurations from its file.",
        ),
        (
            ["--compare", "none.jsonl"],
            "error: none.jsonl: the file does not exist or has no records. Name a file that `memcalc measure",
        ),
    ],
)
def test_what_does_not_go_together(arguments: list[str], message: str, run) -> None:
    code, out, err = run("measure", *arguments)

    assert (code, out) == (2, "")
    assert err.startswith(message)


def test_unknown_traces_are_refused(run) -> None:
    code, _, err = run("measure", *TINY, "--trace", "real")

    assert code == 2
    assert err == "error: --trace: trace = 'real' is not known. Name fake or null.\n"


def test_without_torch_it_is_unavailable(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    code, out, err = run("measure", *TINY)

    assert (code, out) == (3, "")
    assert err.startswith("error: measure needs PyTorch, which is not installed. Run: pip install ")


@pytest.mark.parametrize("words", [["--suite", "runs.yaml"], ["--compare", "records.jsonl"]])
def test_many_runs_are_for_one_process(words: list[str], run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    outcome = run("measure", *words)

    assert outcome.code == 2
    assert (
        f"error: {words[0]} runs in one process, not on 4 ranks. Start memcalc without torchrun, or measure one "
        "configuration per torchrun command.\n" in outcome.err
    )
