"""`memcalc estimate` from the command line to the screen."""

import csv
import io
import json
from pathlib import Path

import pytest

from tests.schemas import validate_result

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
    validate_result(document)
    assert sum(document["components"].values()) == document["peak"]["allocated_bytes"]
    assert document["fits"] is False


def test_csv_is_the_ledger(run) -> None:
    document = json.loads(run("estimate", "gpt2", "--format", "json").out)
    rows = list(csv.DictReader(io.StringIO(run("estimate", "gpt2", "--format", "csv").out)))

    assert [int(row["bytes"]) for row in rows] == [row["bytes"] for row in document["ledger"]]
    assert list(rows[0]) == list(document["ledger"][0])


def test_markdown_has_the_same_numbers(run) -> None:
    table, markdown = (run("estimate", "gpt2", "--full", "--format", form).out for form in ("table", "markdown"))
    phases = [line.split()[:2] for line in table.split("\nPhases\n")[1].split("\n\n")[0].splitlines()[1:]]

    assert all(f"{phase} | {size}" in markdown.replace("*", "") for phase, size in phases)


@pytest.mark.parametrize(("unit", "text"), [("GiB", "GiB"), ("MiB", "MiB"), ("GB", "GB"), ("bytes", "bytes")])
def test_units(unit: str, text: str, run) -> None:
    assert f" {text} reserved. Add --gpu" in " ".join(run("estimate", "gpt2", "--units", unit).out.split())


def test_textbook_ratios_of_the_papers(run) -> None:
    """Activations to 16-bit parameters of GPT-3: 0.79, 50 and 101 at b = 1, 64 and 128."""
    for batch, ratio in (("1", "0.79"), ("64", "50"), ("128", "101")):
        out = run("estimate", "gpt3", "--full", "--set", f"b={batch}").out
        line = next(line for line in out.splitlines() if line.lstrip().startswith("ratio "))

        assert line.split()[2] == ratio


def test_rank(run) -> None:
    line = ["estimate", "llama-3-70b", "--set", "pipeline_parallel=4", "--set", "gradient_accumulation_steps=4"]

    assert ", pipeline stage 3" in run(*line, "--rank", "3").out
    assert run(*line, "--rank", "4") == (
        2,
        "",
        "error: --rank 4 is not a pipeline stage. Choose from 0 to 3.\n",
    )


def test_an_unknown_component(run) -> None:
    code, out, err = run("estimate", "gpt2", "--explain", "wieghts")

    assert (code, out) == (2, "")
    assert err.startswith("error: --explain wieghts: unknown component. Choose all, parameters, recipe, weights, ")


def test_a_broken_file_names_the_line(run, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("model:\n  num_layers: 2\n  hiden_size: 64\n")
    code, out, err = run("estimate", str(path))

    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}:3: model.hiden_size: ")


@pytest.mark.long
def test_measure_without_a_gpu_is_unavailable(run) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    assert run("estimate", "gpt2", "--measure").code == 3


def test_reserved_memory_is_replayed(run) -> None:
    """Without a flag; the one that once asked for it is accepted, and changes nothing."""
    command = ("estimate", "gpt2", "--gpu", "a100-40gb", "--set", "b=32", "--format", "json")
    plain, flagged = (json.loads(run(*command, *flag)[1]) for flag in ((), ("--rehearse",)))

    assert plain == flagged
    assert plain["peak"]["confidence"] == "replay"
    assert (plain["schema_version"], plain["verdict"], plain["fits"]) == (2, "fits", True)
    interval = plain["interval"]
    assert (
        interval["low_bytes"] <= plain["peak"]["device_bytes"] <= interval["high_bytes"] <= plain["gpu"]["usable_bytes"]
    )
    assert interval["runs"] >= 20


def test_settings_of_the_allocator(run) -> None:
    """Fragmentation is why this run does not fit; with segments that grow it does."""
    settings = ("recipe=pure", "b=16", "recompute=full")
    command = ["estimate", "qwen2.5-0.5b", "--gpu", "a100-80gb"]
    command += [word for setting in settings for word in ("--set", setting)]
    code, out, _ = run(*command)
    text = " ".join(out.split())
    assert (code, text.count("DOES NOT FIT")) == (0, 1)
    assert "The peak itself fits; fragmentation adds" in text
    assert "Cheapest change that fits: --set alloc_conf=expandable_segments:True" in text
    full = " ".join(run(*command, "--full").out.split())
    assert "Run `memcalc fit qwen2.5-0.5b --gpu a100-80gb --set recipe=pure" in full
    assert "FITS: needs" in run(*command, "--alloc-conf", "expandable_segments:True").out

    code, _, err = run("estimate", "gpt2", "--alloc-conf", "expandable:True")
    assert code == 2
    assert "has no allocator option 'expandable'" in err


def test_a_dpo_file_is_sized_with_its_reference_model(run) -> None:
    """The reference alone is another 15 GiB; it was a note once, below a bold FITS."""
    text = " ".join(run("estimate", "docs/examples/dpo.yaml", "--gpu", "h200", "--full").out.split())

    assert "TRL 1.16.0 DPO" in text
    assert "FITS: needs 77.9" in text
    assert "Not modelled: the reference model" not in text


def test_what_holds_memory_and_is_not_modelled_stands_in_the_headline(run, tmp_path: Path) -> None:
    """Of a KTO file of TRL's: the reference model alone is another 15 GiB."""
    path = tmp_path / "kto.yaml"
    path.write_text(Path("docs/examples/dpo.yaml").read_text().replace("beta: 0.1", "desirable_weight: 1.5"))
    line = (str(path), "--gpu", "a100-80gb")
    text = " ".join(run("estimate", *line).out.split())

    assert "CANNOT SAY: needs at least 75" in text
    assert "Not modelled: the reference model; pairs of sequences." in text
    assert run("check", *line).code == 1
    assert run("check", *line, "--accept-unknown").code == 0


@pytest.mark.parametrize("suffix", [".svg", ".html", ".json"])
def test_plot_draws_memory_over_the_run(run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    assert run("estimate", "gpt2", "--gpu", "h100-80gb", "--plot", str(path), "--brief").code == 0
    text = path.read_text()
    for word in ("optimizer_step", "backward", "gpt2"):
        assert word in text


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_estimate(run, tmp_path: Path) -> None:
    code, out, err = run("estimate", "gpt2", "--plot", str(tmp_path / "run.gif"))
    assert (code, out) == (2, "")
    assert "ends in '.gif'. The suffix decides what is written: .png, .svg, .html, .json." in " ".join(err.split())
    code, out, err = run("estimate", "gpt2", "--set", "pipeline_parallel=2", "--plot", str(tmp_path / "run.svg"))
    assert (code, out) == (2, "")
    assert "memory over the run cannot be shown" in err


def test_what_is_not_certain_names_the_command_that_measures_it(run) -> None:
    """A trained vision tower: frozen it needs no activations; the user's own command has all of it."""
    out = " ".join(run("estimate", "google/gemma-3-4b-pt", "--gpu", "h100-80gb").out.split())

    assert "CANNOT SAY" in out
    assert "If the vision tower does not train, add `--set vision_tower=frozen`." in out
    assert "run your training command without a GPU: `memcalc dry-run --gpu h100-80gb -- COMMAND`." in out
    frozen = run("estimate", "google/gemma-3-4b-pt", "--gpu", "h100-80gb", "--set", "vision_tower=frozen").out
    assert "FITS" in frozen
    assert "dry-run" not in frozen


def test_an_interval_up_to_late_streams_is_named(run) -> None:
    """Under SHARD_GRAD_OP the flat gradients of all layers may wait; a dry run is one end of the interval."""
    fields = ("zero_stage=2", "recipe=pure", "gradient_accumulation_steps=4", "fsdp.gradient_sync=last")
    words = ("l=8", "engine=fsdp1", "data_parallel=8", "b=8", "s=4096", "recompute=full", *fields)
    settings = [each for word in words for each in ("--set", word)]
    shown = " ".join(run("estimate", "llama-3-8b", "--gpu", "h100-80gb", "--brief", *settings).out.split())

    assert "CANNOT SAY" in shown
    assert (
        "from CUDA streams that are on time to late ones, from the least to the most of NCCL's buffers, 95% of" in shown
    )
    assert "run some steps on the GPUs: a dry run has CUDA streams that are on time, and with" in shown
