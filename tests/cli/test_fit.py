"""`memcalc fit`: its answers, its document, its messages and exit codes."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc import api
from memcalc.search.layouts import HOLDABLE
from tests.cli.conftest import Run
from tests.schemas import validate_result

SMALL = ("gpt2", "--set", "recipe=amp", "--set", "num_layers=4", "--gpu", "rtx-a4000")
FEW_LAYOUTS = ("--hold", "pipeline_parallel", "--hold", "context_parallel")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The answers of searches, by their arguments."""
    return {}


@pytest.fixture(autouse=True)
def _search_once(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Search once for the screen and the document of one command."""

    def fit(*words: Any, progress: Any, **options: Any) -> Any:
        key = repr((words, options))
        if key not in found:
            found[key] = search(*words, progress=progress, **options)
        return found[key]

    search = api.fit
    monkeypatch.setattr(api, "fit", fit)


def document(run: Callable[..., Run], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = run("fit", *arguments, "--format", "json")
    assert err == ""
    return code, json.loads(out)


def test_layouts_over_given_gpus(run: Callable[..., Run]) -> None:
    code, found = document(run, *SMALL, "--gpus", "4", "--top", "2")
    layouts = found["layouts"]

    assert code == 0
    assert found["fits"] is True
    assert len(layouts["best"]) == 2
    totals = [layout["cost_seconds"]["total"] for layout in layouts["fitting"]]
    assert totals == sorted(totals)
    for layout in layouts["fitting"]:
        degrees = [layout[f"{kind}_parallel"] for kind in ("tensor", "pipeline", "context", "data")]
        assert degrees[0] * degrees[1] * degrees[2] * degrees[3] == 4
        assert layout["device_bytes"] <= found["gpu"]["usable_bytes"]
        steps = layout["micro_batch_size"] * layout["gradient_accumulation_steps"] * layout["data_parallel"]
        assert steps == found["sequences_per_step"] == 4
    for layout in layouts["best"]:
        assert sum(layout["components"].values()) == layout["allocated_bytes"]
        assert layout["allocated_bytes"] + sum(layout["outside_allocated"].values()) == layout["device_bytes"]
        terms = {name: value for name, value in layout["cost_seconds"].items() if name != "total"}
        assert sum(terms.values()) == pytest.approx(layout["cost_seconds"]["total"])
        assert terms.keys() == found["cost_terms"].keys()


def test_one_quantity_alone(run: Callable[..., Run]) -> None:
    code, found = document(run, *SMALL, "--maximize", "micro_batch_size")
    largest = found["maxima"]["micro_batch_size"]

    assert code == 0
    assert found["layouts"] is None
    assert memcalc.estimate("gpt2", "recipe=amp", "num_layers=4", f"b={largest['value']}", gpu="rtx-a4000").fits
    assert not memcalc.estimate(
        "gpt2", "recipe=amp", "num_layers=4", f"b={largest['next_value']}", gpu="rtx-a4000"
    ).fits


def test_no_is_an_answer_with_its_own_code(run: Callable[..., Run]) -> None:
    large = ("llama-3-8b", "--set", "num_layers=2", "--set", "recipe=mixed-16", "--gpu", "t4")
    assert run("fit", *large, "--maximize", "micro_batch_size").code == 1
    assert run("fit", *large).code == 1
    code, found = document(run, *large, "--minimize", "recompute")
    assert (code, found["fits"], found["minima"]["recompute"]) == (1, False, None)
    needed = found["minima"]["all_recomputed"]["device_bytes"]
    recomputed = memcalc.estimate("llama-3-8b", "num_layers=2", "recipe=mixed-16", "recompute=full", gpu="t4")
    assert needed == recomputed.headline.device_bytes
    assert found["nearest"]
    out = run("fit", *large, "--maximize", "sequence_length").out
    assert "sequence length: none fits (1 needs at least " in out


def test_what_does_not_fit_as_it_is_but_on_a_layout_is_a_yes(run: Callable[..., Run]) -> None:
    half = ("llama-3-8b", "--set", "num_layers=16", "--set", "recipe=mixed-16", "--gpu", "h100-80gb")
    code, found = document(run, *half, "--gpus", "8", *FEW_LAYOUTS)

    assert code == 0
    assert found["as_it_is"]["fits"] is False
    assert found["layouts"]["best"][0]["fits"] is True
    assert found["nearest"]
    for change in found["nearest"]:
        assert change["device_bytes"] <= found["gpu"]["usable_bytes"] or "hardware.gpu" in " ".join(change["set"])
        assert change["result"]
        assert change["cost"]


def test_why_lists_what_is_left_out(run: Callable[..., Run]) -> None:
    plain = run("fit", *SMALL, "--gpus", "4").out
    told = run("fit", *SMALL, "--gpus", "4", "--why").out

    assert "--why lists them" in plain
    assert "zero_stage = 3 with pipeline_parallel = 2: not searched" in " ".join(told.split())


def test_a_choice_that_is_left_out_stands_before_its_reason(run: Callable[..., Run]) -> None:
    few = ("--set", "num_layers=4", "--gpus", "4", "--node", "2", *FEW_LAYOUTS)
    told = " ".join(run("fit", "gpt2", "--gpu", "t4", *few, "--why").out.split())

    assert "tensor_parallel = 4: tensor-parallel ranks communicate in every layer and stay inside a node" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2",), "error: no GPU is given. Add --gpu GPU or set hardware.gpu; `memcalc gpus` lists the names.\n"),
        (
            ("gpt2", "--gpu", "t4", "--maximize", "layers", "--minimize", "gpus"),
            "error: --maximize and --minimize exclude each other. Use one at a time.\n",
        ),
        (("gpt2", "--gpu", "t4", "--gpus", "0"), "error: --gpus: gpus = 0 is out of range. Set 1 to 131,072.\n"),
        (("gpt2", "--gpu", "t4", "--node", "0"), "error: --node: 0 GPUs per node are too few. Set 1 or more.\n"),
        (
            ("gpt2", "--gpu", "t4", "--nic", "0"),
            "error: --nic: 0 Gbit/s per GPU is not a bandwidth. Set more than 0.\n",
        ),
        (
            ("gpt2", "--gpu", "t4", "--nic", "nan"),
            "error: --nic: nan Gbit/s per GPU is not a bandwidth. Set more than 0.\n",
        ),
        (
            ("gpt2", "--gpu", "t4", "--nic", "inf"),
            "error: --nic: inf Gbit/s per GPU is not a bandwidth. Set more than 0.\n",
        ),
        (
            ("gpt2", "--gpu", "t4", "--hold", "layers"),
            f"error: --hold: 'layers' is not known. Name one of {', '.join(HOLDABLE)}.\n",
        ),
    ],
)
def test_wrong_questions(run: Callable[..., Run], arguments: tuple[str, ...], message: str) -> None:
    assert run("fit", *arguments) == Run(2, "", message)


def test_gpus_that_the_run_cannot_be_spread_over(run: Callable[..., Run]) -> None:
    code, found = document(run, *SMALL, "--set", "tensor_parallel=3", "--gpus", "4")

    assert code == 0
    assert found["as_it_is"] is None
    assert found["not_as_it_is"] == "the run splits its model over 3 GPUs, which do not divide 4"


@pytest.mark.parametrize(
    "question",
    [(), ("--maximize", "sequence_length"), ("--minimize", "gpu_kind"), ("--minimize", "recompute")],
)
def test_no_run_and_no_layout(run: Callable[..., Run], question: tuple[str, ...]) -> None:
    """Nothing is said of three GPUs that nobody asked about."""
    held = ("gpt2", "--gpu", "t4", "--gpus", "8", "--hold", "tensor_parallel", "--set", "tensor_parallel=3")
    code, out, err = run("fit", *held, *question)

    assert (code, err) == (1, "")
    assert "the run is invalid: the run splits its model over 3 GPUs, which do not divide 8." in " ".join(out.split())
    assert "No layout is valid: --why lists the excluded layouts." in " ".join(out.split())
    assert "The largest" not in out
    assert "largest:" not in out


def test_a_ladder_that_ends_has_no_next_values(run: Callable[..., Run]) -> None:
    run_of_all = ("fit", "gpt2", "--gpu", "h100-80gb", "--maximize")

    assert "next values were tried" not in run(*run_of_all, "sequence_length").out
    assert "8 next values were tried" in run(*run_of_all, "micro_batch_size").out


def test_a_larger_model_by_its_fields(run: Callable[..., Run]) -> None:
    command = ("llama-3-8b", "--gpu", "h200", "--set", "recipe=pure", "--maximize", "parameters")
    _, found = document(run, *command)
    largest = found["maxima"]["parameters"]

    assert any(word.startswith("model.hidden_size=") for word in largest["set"])
    again = memcalc.estimate("llama-3-8b", "recipe=pure", *largest["set"], gpu="h200")
    assert again.headline.device_bytes == largest["estimate"]["device_bytes"]
    printed = " ".join(run("fit", *command).out.split())
    assert "as options: " + " ".join(word.partition(".")[2] for word in largest["set"]) in printed


def test_most_gpus_of_a_search(run: Callable[..., Run]) -> None:
    code, out, _ = run("fit", "llama-3-8b", "--gpu", "t4", "--minimize", "gpus", "--gpus", "4")

    assert code == 1
    assert "No number of GPUs up to 4 is enough." in out


def test_a_global_batch_ties_every_layout(run: Callable[..., Run]) -> None:
    _, found = document(run, *SMALL, "--set", "global_batch_size=12", "--gpus", "4")

    assert found["sequences_per_step"] == 12
    assert {layout["data_parallel"] for layout in found["layouts"]["fitting"]} <= {1, 2, 4}
    _, odd = document(run, *SMALL, "--set", "global_batch_size=6", "--gpus", "4")
    assert {layout["data_parallel"] for layout in odd["layouts"]["fitting"]} <= {1, 2}
    assert any("6 sequences of a step" in choice["reason"] for choice in odd["pruned"])


def test_what_cannot_be_said_is_a_no_unless_it_is_accepted(run: Callable[..., Run]) -> None:
    """Layouts over 5 GPUs with 40 GB may fit, and none does for sure."""
    run_of_megatron = ("llama-3-8b", "--set", "implementation=megatron", "--gpu", "a100-40gb")
    question = (*run_of_megatron, "--minimize", "gpus", "--gpus", "5")
    code, found = document(run, *question)

    assert (code, found["verdict"], found["fits"]) == (1, "unknown", False)
    assert found["minima"]["gpus"] is None
    assert found["minima"]["may_be_fewer"] is True
    accepted = run("fit", *question, "--accept-unknown")
    assert accepted.code == 0
    assert "No number of GPUs up to 5 is enough for sure; some layouts may fit." in accepted.out


def test_where_nothing_fits_the_reason_stands(run: Callable[..., Run]) -> None:
    """The peak of a step of AdamW over 8 billion parameters: a smaller batch is no help, and is not offered."""
    question = ("llama-3-8b", "--gpu", "t4", "--maximize", "micro_batch_size")
    _, found = document(run, *question)
    out = " ".join(run("fit", *question).out.split())

    assert found["maxima"]["micro_batch_size"]["next_verdict"] == "does-not-fit"
    assert found["reason"]["phase"].startswith("optimizer_step")
    assert found["reason"]["optimizer_lists"] > 0
    assert found["reason"]["remedy"] is None
    assert "The peak is in optimizer_step_1" in out
    assert "No single change that keeps the training result makes the run fit." in out


def test_offloads_say_what_the_host_holds(run: Callable[..., Run]) -> None:
    half = ("--set", "num_layers=16", "--set", "recipe=pure", "--set", "b=4")
    _, found = document(run, "llama-3-8b", *half, "--gpu", "a100-40gb")
    offloads = [change for change in found["nearest"] if any("offload" in word for word in change["set"])]

    assert offloads
    for change in found["nearest"]:
        assert (change["host_bytes"] > 0) == (change in offloads)
        assert change["node_host_bytes"] >= change["host_bytes"]


def test_a_layout_is_written_as_another_programs_file(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that is printed gives the layout's own memory, up to block remainders.

    Programs of Accelerate reduce gradients once a step, and memcalc's own step after each micro-batch.
    """
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "--gpus", "4", *FEW_LAYOUTS, "--write", "run.yaml", "--as", "accelerate")

    screen = run("fit", *words).out
    code, found = document(run, *words)

    assert code == 0
    validate_result(found)
    assert "Wrote run.yaml for Accelerate. Add these settings, which it cannot contain:" in screen
    command = shlex.split(screen.partition("it cannot contain:\n")[2].replace("\\\n", " "))
    assert command == shlex.split(found["written"]["command"])
    assert command[:5] == ["memcalc", "estimate", "run.yaml", "--gpu", "rtx-a4000"]
    again = json.loads(run(*command[1:], "--format", "json").out)
    kinds = ("data_parallel", "tensor_parallel", "pipeline_parallel", "zero_stage", "engine")
    spread = {kind: again["spec"]["parallelism"][kind] for kind in kinds}
    (layout,) = (each for each in found["layouts"]["best"] if {kind: each[kind] for kind in kinds} == spread)
    assert again["peak"]["allocated_bytes"] == pytest.approx(layout["allocated_bytes"], rel=0.003)
    assert spread["pipeline_parallel"] == 1  # which Accelerate has not


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--write", "run.yaml"), "--write and --as need each other. Write --write FILE --as accelerate."),
        (("--as", "axolotl"), "--write and --as need each other."),
        (
            ("--write", "run.json", "--as", "axolotl"),
            "run.json: a file of axolotl ends in .yaml or .yml. Write run.yaml.",
        ),
        (("--write", "run.yaml", "--as", "axolotl", "--maximize", "layers"), "the search for layers lists no layouts."),
        (("--write", "run.yaml", "--as", "nemo"), "'nemo' is not one of"),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    run: Callable[..., Run], words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("fit", *SMALL, *words)

    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_nothing_fits(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two = ("--set", "num_layers=8", "--gpu", "t4", "--gpus", "2", *FEW_LAYOUTS)
    code, _, err = run("fit", "llama-3-70b", *two, "--write", "run.toml", "--as", "torchtitan")

    assert (code, err) == (1, "warning: no layout fits, so run.toml is not written.\n")
    assert list(tmp_path.iterdir()) == []
