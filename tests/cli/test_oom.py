"""`memcalc oom`: its answer, its document, its exit codes."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import memcalc
from tests.cli.conftest import Run

MESSAGE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.24 GiB (GPU 0; 15.78 GiB total capacity; 10.34 GiB already "
    "allocated; 435.50 MiB free; 14.21 GiB reserved in total by PyTorch)\n"
)
GIB = 2**30


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "error.log"
    path.write_text(f"step 1\n{MESSAGE}step 2\n{MESSAGE.replace('GPU 0', 'GPU 1')}")
    return str(path)


def test_a_message_is_explained(run: Callable[..., Run], log: str) -> None:
    code, out, err = run("oom", log)

    assert (code, err) == (0, "")
    assert "FRAGMENTATION: 3.87 GiB is cached but split" in out
    assert "1. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in out


def test_the_document(run: Callable[..., Run], log: str) -> None:
    code, out, _ = run("oom", log, "--format", "json", "--config", "gpt2", "--set", "b=2", "--gpu", "v100-16gb")
    document = json.loads(out)
    first, second = document["reports"]

    assert code == 0
    assert document["explained_report"] == 1
    assert (first["line"], second["line"]) == (2, 4)
    assert first["figures"]["asked"] == {"bytes": round(1.24 * GIB), "slack_bytes": 5368710}  # half of 0.01 GiB
    assert first["account"]["cached"] == round(14.21 * GIB) - round(10.34 * GIB)
    assert first["cause"] == "fragmentation"
    assert first["device"] == {"kind": "cuda", "index": 0}
    assert all(check["holds"] for check in first["checks"])
    assert first["advice"][0]["enough"] is True
    config = document["config"]
    assert sum(config["components"].values()) == config["allocated_bytes"]
    assert config["budget_bytes"] == round(14.21 * GIB) + round(435.5 * 2**20)


def test_another_report(run: Callable[..., Run], log: str) -> None:
    assert " ".join(run("oom", log, "--report", "2").out.split()).startswith(f"{log}:4: PyTorch on cuda:1")
    code, _, err = run("oom", log, "--report", "3")
    assert code == 2
    assert err == f"error: {log}: report 3 does not exist. The log has reports 1 to 2.\n"


def test_no_message(run: Callable[..., Run], tmp_path: Path) -> None:
    path = tmp_path / "fine.log"
    path.write_text("all is well\n")
    code, out, err = run("oom", str(path))

    assert (code, out) == (2, "")
    assert err == (
        f"error: {path}: no out-of-memory message of PyTorch, PaddlePaddle, TensorFlow or JAX. Pass the complete "
        "output of the run; several ranks may write to several files.\n"
    )


def test_no_file(run: Callable[..., Run], tmp_path: Path) -> None:
    path = tmp_path / "missing.log"
    code, _, err = run("oom", str(path))
    assert (code, err) == (
        2,
        f"error: {path}: the file cannot be read: No such file or directory. Name the log of the run.\n",
    )
    assert run("oom", str(tmp_path)).code == 2


def test_a_change_without_a_configuration_is_refused(run: Callable[..., Run], log: str) -> None:
    code, _, err = run("oom", log, "--set", "b=2")

    assert code == 2
    assert err == "error: --set, --gpu and --budget need a configuration. Add --config CONFIG.\n"


def test_standard_input(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(MESSAGE.encode())))

    assert run("oom", "-").out.startswith("standard input:1: PyTorch on cuda:0, requested 1.24 GiB")


def test_the_verb_of_the_library(log: str) -> None:
    diagnosis = memcalc.oom(log, "gpt2", "b=2")

    assert diagnosis.finding.cause.name == "fragmentation"
    assert diagnosis.explained is not None
    assert diagnosis.explained.result.spec.training.micro_batch_size == 2
