"""What the page's worker calls, without a browser: the answers are those of the command line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from memcalc.api import load
from memcalc.cli.app import main
from memcalc.page.engine import parts
from memcalc.page.form import choices
from memcalc.page.request import FormRun, run_of

CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
RUNS: list[dict[str, Any]] = [
    {"model": "gpt2", "gpu": "h100-80gb", "fields": {"training.micro_batch_size": "2"}},
    {"model": "gpt2", "gpu": "", "more": "num_layers=2\nb=3"},
    {
        "model": "llama-3.2-1b",
        "gpu": "t4",
        "gpus": "8",
        "fields": {"parallelism.zero_stage": "3", "parallelism.tensor_parallel": "2"},
    },
    {"model": "gpt2", "gpu": "l4", "fields": {"training.finetune": "lora", "training.lora.rank": "4"}},
    {"model": "meta-llama/Llama-3.2-1B", "gpu": "h100-80gb", "gpus": "4", "fields": {"parallelism.zero_stage": "3"}},
    {"text": json.dumps(CONFIG_JSON), "gpu": "l4", "fields": {"training.recipe": "pure"}},
    {"text": "preset: gpt2\ntraining:\n  b: 2\n", "gpu": "l4"},
]


def answer(**request: Any) -> list[dict[str, Any]]:
    return [json.loads(part) for part in parts(json.dumps(request))]


def printed(command: str, capsys: pytest.CaptureFixture[str], folder: Path, text: str = "") -> str:
    """What a command of the page prints as JSON, in a directory that has the pasted file."""
    words = shlex.split(command)
    if text:
        (folder / words[2]).write_text(text)
        words[2] = str(folder / words[2])
    capsys.readouterr()
    main([*words[1:], "--format", "json"])
    return capsys.readouterr().out


def same(document: str, command_output: str) -> None:
    """Equal, but for how non-ASCII characters are written to a stream with another encoding than UTF-8."""
    assert json.loads(document) == json.loads(command_output)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run)[:40])
def test_the_copied_command_gives_the_same_document(
    run: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, *more, copies = answer(kind="estimate", run=run)
    assert first["part"] == "answer", first
    assert copies["part"] == "copies"
    same(copies["document"], printed(copies["command"], capsys, tmp_path, run.get("text", "")))
    assert [part["section"]["place"] for part in more] == ["timeline", "verdict"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run)[:40])
def test_the_copied_yaml_is_the_same_run(run: dict[str, Any], tmp_path: Path) -> None:
    copies = answer(kind="estimate", run=run)[-1]
    if "text" in run:
        (tmp_path / "config.json").write_text(run["text"])
    path = tmp_path / "copied.yaml"
    path.write_text(copies["yaml"])
    there, here = load(path), run_of(FormRun(**run)).spec
    assert there.model_dump(exclude={"name"}) == here.model_dump(exclude={"name"})


def test_a_fit_is_that_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told: list[str] = []
    run = {"model": "gpt2", "gpu": "t4", "gpus": "2", "more": "num_layers=4"}
    request = {"kind": "fit", "run": run, "maximize": "micro_batch_size"}
    first, copies = (json.loads(part) for part in parts(json.dumps(request), told.append))
    assert copies["command"] == "memcalc fit gpt2 --gpu t4 --maximize micro_batch_size --gpus 2 --set num_layers=4"
    same(copies["document"], printed(copies["command"], capsys, tmp_path))
    assert {"lines", "table", "timeline"} >= {section["kind"] for section in first["view"]["sections"]}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            {"kind": "estimate", "run": {"model": "gpt2", "gpu": "rtx-a4000", "more": "b=64"}},
            "Cheapest change that fits: ",
        ),
        ({"kind": "estimate", "run": {"model": "gpt2"}}, "Choose a GPU to check whether it fits."),
        (
            {"kind": "estimate", "run": {"text": "model_name_or_path: gpt2\nper_device_train_batch_size: 4\n"}},
            "padding",
        ),
        ({"kind": "fit", "run": {"model": "gpt2"}}, "no GPU is given. Choose one."),
        pytest.param({"kind": "fit", "run": {"model": "llama-3-8b", "gpu": "t4"}}, "GPU gb200", marks=pytest.mark.long),
        (
            {"kind": "fit", "run": {"model": "llama-3-70b", "gpu": "t4", "gpus": "4", "more": "num_layers=8"}},
            "invalid layouts were excluded",
        ),
    ],
)
def test_answers_name_fields_of_the_page_and_no_options(request_: dict[str, Any], words: str) -> None:
    shown = json.dumps([part for part in answer(**request_) if part["part"] != "copies"], ensure_ascii=False)
    assert words in shown
    assert not re.search(r"(?<![\w-])--\w", shown)


def test_a_difference_shows_both_runs() -> None:
    a, b = {"model": "gpt2", "gpu": "t4"}, {"text": "preset: gpt2\n", "gpu": "t4", "more": "b=4"}
    first, copies = answer(kind="diff", run=b, other=a)
    sides, components, phases = first["view"]["sections"]
    assert [view["title"] for view in sides["views"]] == ["A", "B"]
    assert [section["kind"] for section in sides["views"][0]["sections"]] == ["verdict", "bars", "timeline"]
    assert components["title"].startswith("At the peak: A in ")
    assert phases["title"] == "Phases"
    assert json.loads(copies["document"])["totals"]["allocated"]["difference"] > 0


def test_the_largest_batch_of_a_generation_comes_after_the_answer() -> None:
    run = {"model": "gpt2", "gpu": "t4", "more": "inference.prompt_length=64\ninference.new_tokens=16"}
    first, timeline, cache, _ = answer(kind="estimate", run=run)
    early = next(section for section in first["view"]["sections"] if section.get("place") == "generation")
    assert timeline["section"]["place"] == "timeline"
    assert cache["section"]["place"] == "generation"
    assert [row[0] for row in early["rows"]] == ["per token", "per sequence", "all"]
    assert [row[0] for row in cache["section"]["rows"][3:]] == ["largest batch", "longest context"]


def test_a_run_without_known_requests_is_shown_by_phase() -> None:
    run = {"model": "gpt2", "gpu": "t4", "fields": {"parallelism.pipeline_parallel": "2"}}
    _, timeline, _, copies = answer(kind="estimate", run=run)
    section = timeline["section"]
    phases = json.loads(copies["document"])["phases"]
    assert section["title"] == "Peak of each phase"
    assert "pipeline parallelism" in section["note"]
    assert section["document"]["points"]["allocated_bytes"] == [phase["allocated_bytes"] for phase in phases]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({}, "model: no model is given. Enter a preset or a hub id, or paste a config.json or YAML."),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"model": "gpt2", "gpu": "no-such-gpu"}, "no-such-gpu"),
        ({"model": "gpt2", "more": "bb=3"}, "unknown field 'bb'"),
        ({"model": "gpt2", "fields": {"training.micro_batch_size": "two"}}, "micro_batch_size"),
        ({"model": "gpt2", "gpus": "0"}, "gpus = 0 is not a positive whole number."),
        (
            {"model": "gpt2", "gpus": "6", "fields": {"parallelism.tensor_parallel": "4"}},
            "Set gpus to a multiple of 4, or change these sizes.",
        ),
        ({"text": '{"model_type": '}, "config.json"),
        ({"text": "model: [1"}, "config.yaml"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_run_is_one_clear_message(run: dict[str, Any], message: str) -> None:
    (part,) = answer(kind="estimate", run=run)
    assert part["part"] == "error"
    assert message in part["message"]
    assert "Traceback" not in part["message"]
    assert "--set" not in part["message"]  # an option that the page does not have


def test_a_hub_id_that_is_not_known_is_offered_to_be_fetched() -> None:
    """The page has a button for that; the command line's way, an installation, is not possible in it."""
    (part,) = answer(kind="estimate", run={"model": "meta-llama/Llama-3.1-88B", "gpu": "t4"})
    assert part["part"] == "error"
    assert part["hub_id"] == "meta-llama/Llama-3.1-88B"
    assert "Did you mean meta-llama/Llama-3.1-8B" in part["message"]
    assert "Fetch its config.json" in part["message"]
    assert "pip install" not in part["message"]


def test_other_errors_offer_no_fetching() -> None:
    (part,) = answer(kind="estimate", run={"model": "meta-llama/Llama-3.2-1B", "more": "bb=3"})
    assert part["part"] == "error"
    assert "hub_id" not in part


def test_a_name_that_is_markup_stays_text() -> None:
    name = "<img src=x onerror=alert(1)>"
    first = answer(kind="estimate", run={"text": f"name: '{name}'\npreset: gpt2\n"})[0]
    assert first["view"]["sections"][0]["subject"][0].startswith(name)  # the script sets it as text


def test_the_form_offers_fields_that_exist_and_values_that_are_accepted() -> None:
    """Each value alone on a GPT-2 of two layers, or it is refused by a rule that names the field it contradicts."""
    found = choices()
    assert {"gpt2", "llama-3-8b"} <= set(found["models"])
    fields = [field for block in found["blocks"] for field in block["fields"]]
    assert len({field["path"] for field in fields}) == len(fields)
    for field in fields:
        assert field["kind"] in ("choice", "number", "text"), field
        assert (field["kind"] == "choice") == bool(field["values"]), field
        for value in field["values"]:
            given = {"model.num_layers": "2", field["path"]: value}
            request = {"kind": "estimate", "run": {"model": "gpt2", "fields": given}}
            part = json.loads(next(iter(parts(json.dumps(request)))))
            assert part["part"] == "answer" or "unknown" not in part["message"], part
