"""`memcalc sweep`: the screen, the files, the refusals."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import memcalc
from memcalc.spec.limits import Limit
from memcalc.spec.origin import Origin
from tests.cli.conftest import Run
from tests.records import pin_records

LLAMA = ("sweep", "llama-3-8b", "--gpu", "h100-80gb", "--set", "zero_stage=3", "--set", "data_parallel=8")

SCREEN = """\
gpt2: 24 configurations on Tesla T4: 22 fit, 1 close, 1 do not fit

0 to 9: tenths of usable memory; | boundary; ? close; . too large; - invalid

  recompute  micro_batch_size: 1 to 12  fits to
       none  23345667?99|.              11
       full  223344556678|              12
"""


FP16 = ("dtype=fp16", "attention=memory-efficient")  # a T4 has no flash attention, and this kernel in fp16 only
ON_A_T4 = ("--gpu", "t4", "--set", FP16[0], "--set", FP16[1])


def test_the_screen_shows_the_boundary(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    pin_records(monkeypatch)
    code, out, err = run("sweep", "gpt2", *ON_A_T4, "--vary", "b=1..12", "--vary", "recompute=none,full")

    assert (code, err) == (0, "")
    assert out.startswith(SCREEN)
    assert "Add --replay N to replay the N closest." in " ".join(out.split())


def test_a_map_that_is_too_wide_says_what_it_shows(run: Callable[..., Run]) -> None:
    assert "micro_batch_size: 1 to 90, one in 2 shown" in run("sweep", "gpt2", "--vary", "b=1..90").out


def test_the_boundary_is_where_estimates_stop_fitting(run: Callable[..., Run]) -> None:
    fits = [memcalc.estimate("gpt2", f"b={b}", *FP16, gpu="t4").fits for b in (11, 12)]

    assert fits == [True, False]


def test_the_closest_are_replayed_on_request(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many replays as there are configurations each is that of `estimate`."""
    pin_records(monkeypatch)
    words = ("sweep", "gpt2", *ON_A_T4, "--vary", "b=7..13", "--format", "json")
    plain, replayed = (json.loads(run(*words, *more).out)["configurations"] for more in ((), ("--replay", "7")))

    verdicts = [each["verdict"] for each in plain]
    assert verdicts == ["fits", "fits", "close", "fits", "fits", "does-not-fit", "does-not-fit"]
    assert plain[2]["fits"] is None
    assert [each["replayed"] for each in plain] == [False, False, False, True, True, True, False]
    assert [each["on_front"] for each in plain] == [each["micro_batch_size"] == 11 for each in plain]
    for each in replayed:
        result = memcalc.estimate("gpt2", f"b={each['micro_batch_size']}", *FP16, gpu="t4")
        assert each["replayed"]
        assert (each["verdict"], each["fits"]) == (result.verdict, result.fits)
        assert each["reserved_bytes"] == result.headline.reserved_bytes
        assert each["device_bytes"] == result.headline.device_bytes
        assert each["peak_bytes"] == result.ledger.peak_bytes


def test_csv_has_a_line_for_each_configuration(run: Callable[..., Run]) -> None:
    code, out, _ = run("sweep", "gpt2", "--gpu", "t4", "--vary", "tensor_parallel=1,5", "--vary", "b=1,2", "-f", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    result = memcalc.estimate("gpt2", "b=2", gpu="t4")

    assert code == 0
    assert [row["valid"] for row in rows] == ["true", "true", "false", "false"]
    assert int(rows[1]["peak_bytes"]) == result.ledger.peak_bytes
    assert int(rows[1]["device_bytes"]) == result.headline.device_bytes
    assert rows[1]["fits"] == str(result.fits).lower()
    assert (rows[2]["peak_bytes"], rows[0]["reason"]) == ("", "")
    assert "does not divide num_attention_heads = 12" in rows[2]["reason"]


def test_json_holds_the_axes_and_every_configuration(run: Callable[..., Run]) -> None:
    _, out, _ = run("sweep", "gpt2", "--vary", "recompute=none,full", "--vary", "b=1..3", "--format", "json")
    document = json.loads(out)
    phases = [key for key in document["configurations"][0] if key.endswith("_1_bytes")]

    assert document["schema_version"] == 2
    assert document["axes"][1] == {"fields": ["training.micro_batch_size"], "values": [[1], [2], [3]]}
    assert len(document["configurations"]) == 6
    assert document["configurations"][0]["fits"] is None, "no card was named"
    assert document["configurations"][0]["verdict"] is None
    assert document["unmodelled"] == []
    assert "backward_1_bytes" in phases


def test_files_are_written_by_their_suffix(run: Callable[..., Run], tmp_path: Path) -> None:
    table, document, picture, page = (tmp_path / f"sweep{suffix}" for suffix in (".csv", ".json", ".svg", ".html"))
    outputs = ("--output", str(table), "--output", str(document), "--plot", str(picture), "--plot", str(page))
    code, *_ = run(*LLAMA, "--vary", "b=1..4", "--vary", "recompute=none,full", *outputs)
    cells = [each for each in ET.parse(picture).iter() if each.tag.endswith("rect")]

    assert code == 0
    assert len(table.read_text().splitlines()) == 1 + 8
    assert len(json.loads(document.read_text())["configurations"]) == 8
    assert len(cells) == 8
    assert 'stroke="#CC0000"' in picture.read_text(), "the frontier"
    assert page.read_text().startswith("<!doctype html>")


def test_parquet_says_what_it_needs(run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it was not installed

    code, _, err = run("sweep", "gpt2", "--vary", "b=1", "--output", str(tmp_path / "sweep.parquet"))

    assert code == 3
    assert "pip install 'pyarrow>=15'" in err
    assert not (tmp_path / "sweep.parquet").exists()


def test_parquet_has_the_numbers_of_the_json_with_their_types(run: Callable[..., Run], tmp_path: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet", reason="pyarrow, the extra parquet, is not installed")
    file, document = tmp_path / "sweep.parquet", tmp_path / "sweep.json"
    varied = ("--vary", "b=1..2", "--vary", "recompute=none,full", "--vary", "tensor_parallel=1,5")

    code, _, _ = run("sweep", "gpt2", *varied, "--output", str(file), "--output", str(document))

    assert code == 0
    table = parquet.read_table(file)
    assert table.to_pylist() == json.loads(document.read_text())["configurations"]
    types = {field.name: str(field.type) for field in table.schema}
    assert types["peak_bytes"] == types["micro_batch_size"] == "int64"
    assert types["headroom_bytes"] == "int64", "of all columns that are empty without a card, too"
    assert (types["fits"], types["reason"], types["recompute"]) == ("bool", "string", "string")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--vary: nothing is varied. Add --vary FIELD=VALUES, e.g. --vary micro_batch_size=1..64."),
        (("--vary", "b"), "--vary b: the '=' is missing. Write --vary field=values, such as b=1..64."),
        (("--vary", "batch=1"), "--vary: unknown field 'batch'."),
        (
            ("--vary", "b=4..1"),
            (
                "--vary b=4..1: 4..1 has no number. Write FIRST..LAST or FIRST..LAST..STEP, with FIRST <= LAST and "
                "STEP "
                ">= 1."
            ),
        ),
        (
            ("--vary", "b=1,,2"),
            "--vary b=1,,2: '' is not a value. Separate values by commas, e.g. none,selective,full.",
        ),
        (("--vary", "b=1", "--vary", "b=2"), "--vary b=2: b is varied twice. Give each field one list of values."),
        (("--vary", "b=1..4000", "--vary", "s=1..4000"), "--vary: 16,000,000 configurations are more than 4,000,000."),
        (
            ("--vary", "tensor_parallel=5"),
            "the configuration is invalid: parallelism.tensor_parallel: tensor_parallel = 5 ",
        ),
        (("--vary", "b=0,a"), "none of 2 configurations is valid; the first: training.micro_batch_size: "),
        (
            ("--vary", "b=1", "--plot", "x.gif"),
            "x.gif ends in '.gif'. The suffix decides what is written: .svg, .html.",
        ),
    ],
)
def test_what_is_no_sweep_is_refused(run: Callable[..., Run], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("sweep", "gpt2", *arguments)

    assert (code, out) == (2, "")
    assert " ".join(err.split()).startswith(f"error: {message}")


def test_what_tensor_parallelism_cannot_be_is_said_once(run: Callable[..., Run]) -> None:
    code, out, _ = run("sweep", "gpt2", "--vary", "tensor_parallel=1,12", "--vary", "b=1..3", "--gpus-per-node", "8")

    assert code == 0
    assert out.count("excluded") == 1
    assert "tensor_parallel = 12 is more than the 8 GPUs of a node" in " ".join(out.split())


def test_what_holds_memory_and_is_not_modelled_never_fits(run: Callable[..., Run], tmp_path: Path) -> None:
    limit = Limit("evaluation during training", holds_memory=True)
    table = memcalc.sweep(memcalc.load("gpt2").with_origin(Origin(limits=(limit,))), {"b": [1, 11, 64]}, gpu="t4")

    assert [table.answers[number] for number in table.verdict] == ["close", "close", "does-not-fit"]


def test_what_no_number_holds_is_too_large(run: Callable[..., Run]) -> None:
    """Ten thousand sequences of ten million tokens need more bytes than 64 bits count."""
    arguments = ("--set", "max_position_embeddings=10000000", "--gpu", "h100-80gb", "--vary", "s=10000000")
    code, out, _ = run("sweep", "llama-3-8b", *arguments, "--vary", "b=1,10000")

    assert code == 0
    assert "2 configurations on NVIDIA H100 SXM: 0 fit, 2 do not fit" in out
    assert "1 configuration not estimated: It needs more than 1 PiB per GPU" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "l4", "--vary", "gpu=t4,h200"), "--gpu: gpu is both varied and set. Keep one of the two."),
        (("--vary", "b=1,2", "--set", "b=7"), "--set: micro_batch_size is both varied and set."),
    ],
)
def test_a_field_that_is_varied_and_given_is_refused(
    words: tuple[str, ...], message: str, run: Callable[..., Run]
) -> None:
    code, _, err = run("sweep", "gpt2", *words)

    assert code == 2
    assert message in err


def test_models_are_varied(run: Callable[..., Run]) -> None:
    out = json.loads(run("sweep", "gpt2", "--vary", "preset=gpt2,gpt2-xl", "-f", "json").out)
    peaks = [memcalc.estimate(name).ledger.peak_bytes for name in ("gpt2", "gpt2-xl")]

    assert [each["peak_bytes"] for each in out["configurations"]] == peaks
    assert out["notes"] == []


@pytest.mark.parametrize("text", ["", "null", "[1]", "3"])
def test_standard_input_that_is_no_configuration(
    text: str, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, _, err = run("sweep", "-", "--vary", "b=1,2")

    assert code == 2
    assert "standard input: the file " in err


def test_what_is_too_large_for_a_table_does_not_fit(run: Callable[..., Run]) -> None:
    words = ("--gpu", "h200", "--vary", "b=1,1000000", "-f", "csv")
    rows = list(csv.DictReader(io.StringIO(run("sweep", "llama-3-8b", *words).out)))

    assert [(row["valid"], row["fits"]) for row in rows] == [("true", "false"), ("false", "false")]


def test_plans_of_recomputation_are_varied(run: Callable[..., Run]) -> None:
    plans = ("none", "[0,1,2]", "[[0,1],[2]]")
    rows = csv.DictReader(io.StringIO(run("sweep", "gpt2", "--vary", f"recompute={','.join(plans)}", "-f", "csv").out))
    peaks = [memcalc.estimate("gpt2", f"recompute={plan}").ledger.peak_bytes for plan in plans]

    assert [int(row["peak_bytes"]) for row in rows] == peaks


@pytest.mark.parametrize("verb", ["estimate", "fit", "check", "sweep", "recompute"])
def test_a_gpu_that_is_named_twice(run: Callable[..., Run], tmp_path: Path, verb: str) -> None:
    """By --gpu and as a field that is set: each verb says so in the same words."""
    config = tmp_path / "run.yaml"
    config.write_text("preset: gpt2\n")
    more = ("--vary", "b=1,2") if verb == "sweep" else ()
    code, _, err = run(verb, str(config), "--gpu", "t4", "--set", "gpu=h200", *more)

    assert (code, "--gpu: gpu is set twice. Keep one of the two." in " ".join(err.split())) == (2, True)


def test_a_gpu_that_is_set_is_named_above_the_map(run: Callable[..., Run]) -> None:
    assert "on Tesla T4" in run("sweep", "gpt2", "--set", "gpu=t4", "--vary", "b=1,2").out


CELLS = """\
gpt2: 4 cells traced on fake tensors: 1 fit, 1 do not fit, 2 invalid

Cells
  micro_batch_size  num_attention_heads  allocated GiB  reserved  device  headroom
                 4                   12           4.00      4.00    4.00      0.00  fits
                 4                    5              -         -       -         -  invalid
                 5                   12           5.00      5.00    5.00     -1.00  does not fit
                 5                    5              -         -       -         -  invalid
"""


def test_cells_that_are_run(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The runs are those of tests/cells/stub_child.py, in processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memcalc.cells.local_processes.CHILD", "tests.cells.stub_child")
    words = ("sweep", "gpt2", "--by", "trace", "--gpu", "t4", "--vary", "b=4,5", "--vary", "num_attention_heads=12,5")

    code, out, err = run(*words, "--output", "cells.csv")
    again = run(*words, "--format", "json")

    assert code == 0
    assert out.startswith(CELLS)
    assert "4 cells in memcalc-cells.jsonl." in out
    assert sorted(line.split(": ", 1)[1] for line in err.splitlines()) == [
        "micro_batch_size=4, num_attention_heads=12: measured, 4.00 GiB",
        "micro_batch_size=5, num_attention_heads=12: measured, 5.00 GiB",
    ]
    document = json.loads(again.out)
    assert [cell["verdict"] for cell in document["cells"]] == ["fits", None, "does-not-fit", None]
    assert again.err == ""  # nothing was run
    rows = list(csv.DictReader(io.StringIO((tmp_path / "cells.csv").read_text())))
    assert [row["allocated_bytes"] for row in rows] == [str(4 << 30), "", str(5 << 30), ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("gpt2", "--vary", "b=1", "--workers", "2"),
            "--workers is an option of runs, but formulas run nothing. Add --by trace, null or dry-run.",
        ),
        (("gpt2", "--vary", "b=1", "--by", "trace", "--replay", "2"), "--replay is an option of --by formulas"),
        (("gpt2", "--vary", "b=1", "--by", "trace", "--timeout", "2"), "--timeout is an option of a command"),
        (("gpt2", "llama-7b", "--vary", "b=1"), "a sweep takes one configuration"),
        (
            ("--by", "dry-run", "--gpu", "t4", "--set", "b=1", "--vary", "b=1", "--", "true"),
            "--set is an option of traces",
        ),
        (("gpt2", "--by", "trace"), "nothing is varied"),
        (("gpt2", "--by", "trace", "--vary", "num_attention_heads=5,7"), "none of 2 configurations is valid"),
    ],
)
def test_options_that_do_not_go_together(run: Callable[..., Run], words: tuple[str, ...], message: str) -> None:
    code, _, err = run("sweep", *words)

    assert code == 2
    assert message in " ".join(err.split())
