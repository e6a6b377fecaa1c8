"""What a model is based on, a preset or a config.json, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spec.files import LLAMA, refusal


@pytest.mark.parametrize("key", ["preset", "hf_config"])
@pytest.mark.parametrize(
    ("name", "rest"),
    [
        (
            "nope.json",
            (
                "nope.json: the file does not exist. Check the path. `memcalc models` lists the presets, `memcalc "
                "models QUERY` searches the published models."
            ),
        ),
        ("gpt33", "gpt33: no file, preset or hub id has this name. Did you mean gpt3?"),
        ("[gpt3]", "{key} = a list is not a name. Write a path or the name of a preset."),
        ("3", "{key} = 3 is not a name. Write a path or the name of a preset."),
        (
            "..",
            (
                "..: the directory has no config.json. Name a file in the directory, or run `memcalc check` on all "
                "files."
            ),
        ),
    ],
)
def test_a_missing_base_is_rejected_at_its_place(folder: Path, key: str, name: str, rest: str) -> None:
    message = refusal(folder, f"name: x\n{key}: {name}\n")

    assert message == f"run.yaml:2: {key}: {rest.format(key=key)}"


def test_preset_and_hf_config_exclude_each_other(folder: Path) -> None:
    message = refusal(folder, "preset: gpt3\nhf_config: config.json\n")

    assert message == "run.yaml:1: preset: preset and hf_config exclude each other. Keep one of the two."


@pytest.mark.parametrize("name", ["run.yaml", "chain.yaml"])
def test_a_base_that_is_based_on_another_is_refused(folder: Path, name: str) -> None:
    """Above all a file that is based on itself."""
    (folder / "chain.yaml").write_text("preset: gpt2\n")
    message = refusal(folder, f"preset: {name}\n")

    assert message == f"run.yaml:1: preset: {name} refers to another configuration. Name that configuration directly."


def test_an_error_in_the_base_names_both_files(folder: Path) -> None:
    (folder / "bad.json").write_text(json.dumps(LLAMA | {"vocab_size": "x"}))
    (folder / "bad.yaml").write_text("model:\n  l: 4\n  l: 5\n")

    assert refusal(folder, "name: x\nhf_config: bad.json\n") == (
        "run.yaml:2: hf_config: bad.json: vocab_size: 'x' is not a whole number from 1 to 2^40. "
        "Write the size as digits, without quotes."
    )
    assert refusal(folder, "preset: bad.yaml\n") == (
        "run.yaml:1: preset: bad.yaml:3: model.l: the key 'l' is repeated, first on line 2. Keep one of the two."
    )


def test_a_config_json_of_no_known_family_is_refused(folder: Path) -> None:
    message = refusal(folder, json.dumps(LLAMA | {"model_type": "lama"}), name="their.json")

    assert message.startswith(
        "their.json: model_type: memcalc has no formulas for the model family 'lama', and transformers"
    )


def test_a_config_json_without_a_model_type_is_rejected_with_the_missing_key(folder: Path) -> None:
    without = {key: value for key, value in LLAMA.items() if key != "model_type"}

    assert refusal(folder, json.dumps(without, indent=1), name="their.json") == (
        'their.json: model_type is missing, so the family of this Hugging Face config.json is unknown. Add the key, e.g. "model_type": "llama".'
    )
