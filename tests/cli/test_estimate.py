"""`memcalc estimate` from the command line to the screen."""

import csv
import io
import json
from pathlib import Path

import jsonschema
import pytest

from memcalc.report.schema import result_schema

SCREENS = {
    "gpt3": ["gpt3"],
    "llama_fits": ["llama-3-8b", "--gpu", "h100-80gb", "--set", "zero_stage=3", "--set", "data_parallel=8"],
    "llama_does_not_fit": ["llama-3-8b", "--gpu", "h100-80gb", "--set", "b=2"],
    "llama_pipeline": [
        *["llama-3-70b", "--gpu", "h100-80gb", "--set", "tensor_parallel=8", "--set", "pipeline_parallel=4"],
        *["--set", "gradient_accumulation_steps=8", "--set", "recipe=mixed-18", "--all-ranks"],
    ],
    "gpt2_parameters": ["gpt2", "--explain", "parameters"],
    "gpt3_activations": ["gpt3", "--explain", "activations"],
}


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str, columns: str, run, golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, err = run("estimate", *SCREENS[name])

    assert (code, err) == (0, "")
    golden(f"estimate_{name}_{columns}", out)


def test_json_is_the_document(run) -> None:
    code, out, _ = run("estimate", "gpt3.yaml", "--gpu", "h100-80gb", "--format", "json")
    document = json.loads(out)

    assert code == 0
    jsonschema.validate(document, result_schema())
    assert sum(document["components"].values()) == document["peak"]["allocated_bytes"]
    assert document["fits"] is False


def test_csv_is_the_ledger(run) -> None:
    document = json.loads(run("estimate", "gpt2", "--format", "json").out)
    rows = list(csv.DictReader(io.StringIO(run("estimate", "gpt2", "--format", "csv").out)))

    assert [int(row["bytes"]) for row in rows] == [row["bytes"] for row in document["ledger"]]
    assert list(rows[0]) == list(document["ledger"][0])


def test_markdown_has_the_same_numbers(run) -> None:
    table, markdown = (run("estimate", "gpt2", "--format", form).out for form in ("table", "markdown"))
    phases = [line.split()[:2] for line in table.split("\nPhases\n")[1].split("\n\n")[0].splitlines()[1:]]

    assert all(f"{phase} | {size}" in markdown.replace("*", "") for phase, size in phases)


@pytest.mark.parametrize(("unit", "text"), [("GiB", "GiB"), ("MiB", "MiB"), ("GB", "GB"), ("bytes", "bytes")])
def test_units(unit: str, text: str, run) -> None:
    assert f" {text} reserved per GPU." in run("estimate", "gpt2", "--units", unit).out


def test_textbook_ratios_of_the_papers(run) -> None:
    """Activations to 16-bit parameters of GPT-3: 0.79, 50 and 101 at b = 1, 64 and 128."""
    for batch, ratio in (("1", "0.79"), ("64", "50"), ("128", "101")):
        out = run("estimate", "gpt3", "--set", f"b={batch}").out
        line = next(line for line in out.splitlines() if line.lstrip().startswith("ratio "))

        assert line.split()[2] == ratio


def test_rank(run) -> None:
    line = ["estimate", "llama-3-70b", "--set", "pipeline_parallel=4", "--set", "gradient_accumulation_steps=4"]

    assert "peak, in " in run(*line, "--rank", "3").out
    assert run(*line, "--rank", "4") == (
        2,
        "",
        "error: --rank 4: there is no such pipeline stage. The stages of this run are 0 to 3.\n",
    )


def test_an_unknown_component(run) -> None:
    code, out, err = run("estimate", "gpt2", "--explain", "wieghts")

    assert (code, out) == (2, "")
    assert err.startswith("error: --explain wieghts: there is no such component. Choose all, parameters, weights, ")


def test_a_broken_file_names_the_line(run, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("model:\n  num_layers: 2\n  hiden_size: 64\n")
    code, out, err = run("estimate", str(path))

    assert (code, out) == (2, "")
    assert err.startswith("error: broken.yaml:3: model.hiden_size: ")


def test_measure_without_a_gpu_is_unavailable(run) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    assert run("estimate", "gpt2", "--measure").code == 3


@pytest.mark.parametrize(
    ("overrides", "close"),
    [
        (("b=32",), True),  # 36.3 of 39.4 GiB
        (("b=8",), False),  # far from it
        (("b=32", "data_parallel=2"), False),  # cannot be rehearsed
    ],
)
def test_close_to_the_card_a_rehearsal_is_offered(overrides: tuple[str, ...], close: bool, run) -> None:
    words = [word for override in overrides for word in ("--set", override)]
    _, out, _ = run("estimate", "gpt2", "--gpu", "a100-40gb", *words)

    assert ("--rehearse plays every request" in " ".join(out.split())) is close


def test_a_rehearsal_says_what_is_reserved(run) -> None:
    command = ("estimate", "gpt2", "--gpu", "a100-40gb", "--set", "b=32", "--format", "json")
    formula, rehearsed = (json.loads(run(*command, *flag)[1]) for flag in ((), ("--rehearse",)))

    assert (formula["peak"]["confidence"], rehearsed["peak"]["confidence"]) == ("formula", "replay")
    assert formula["peak"]["reserved_bytes"] != rehearsed["peak"]["reserved_bytes"]
    assert "fragmentation of the allocator beyond the reserve factor" not in rehearsed["not_modelled"]


def test_settings_of_the_allocator_are_for_rehearsals(run) -> None:
    code, out, err = run("estimate", "gpt2", "--alloc-conf", "expandable_segments:True")
    assert (code, out) == (2, "")
    assert err.rstrip().endswith("by formula no setting of the allocator is known. Add --rehearse.")
    code, _, err = run("estimate", "gpt2", "--rehearse", "--alloc-conf", "expandable:True")
    assert code == 2
    assert "has no allocator option 'expandable'" in err
