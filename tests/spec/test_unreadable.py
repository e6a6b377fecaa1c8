"""What is no configuration: empty, of another kind, not text, too large, not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load
from memcalc.spec.yaml_source import MAX_CHARACTERS
from tests.spec.files import SIZES, refusal


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file has no configuration."),
        ("# only a comment\n", "the file has no configuration."),
        ("{}", "the file has no configuration."),
        ("null", "the file has no configuration."),
        ("42", "the file holds 42, not a configuration."),
        ("hello", "the file holds 'hello', not a configuration."),
        ("[1, 2]", "the file holds a list, not a configuration."),
    ],
)
def test_a_file_without_blocks_is_refused(folder: Path, text: str, problem: str) -> None:
    remedy = "Write a `model:` block, or `preset: NAME` (`memcalc models` lists the presets)."

    assert refusal(folder, text) == f"run.yaml: {problem} {remedy}"


@pytest.mark.parametrize(
    ("data", "byte"), [(b"\xff\xfe\x00", 0), (b"name: \xe9\n", 6), ("model: {}".encode("utf-16"), 0)]
)
def test_a_file_that_is_not_utf_8_is_refused(folder: Path, data: bytes, byte: int) -> None:
    message = f"run.yaml: byte {byte} is not UTF-8 text. Save the file as text in UTF-8."

    assert refusal(folder, data) == message


def test_a_huge_file_is_refused_without_being_read_as_a_whole(folder: Path) -> None:
    """Five million characters: at most four bytes for each of the million that a configuration may have are read."""
    assert refusal(folder, "#" * (5 * MAX_CHARACTERS)) == (
        "run.yaml: the file has more than 4,000,000 bytes, the limit for its type. "
        "Name the configuration file itself, and check its permissions."
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "nope",
            (
                "nope: no file, preset or hub id has this name. `memcalc models` lists the presets, `memcalc models "
                "QUERY` searches the published models."
            ),
        ),
        ("gpt33", "gpt33: no file, preset or hub id has this name. Did you mean gpt3?"),
        (
            "lama-3-8b.yaml",
            "lama-3-8b.yaml: the file does not exist. Did you mean llama-3-8b?",
        ),
        (
            "x/gpt3",
            (
                "x/gpt3: not in memcalc's catalogue or in the local hub cache, and the hub is off. "
                "Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to look on the hub, or name its config.json."
            ),
        ),
        (
            ".",
            ".: the directory has no config.json. Name a file in the directory, or run `memcalc check` on all files.",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(folder: Path, source: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(source)

    assert str(caught.value) == message


@pytest.mark.parametrize("source", ["a" * 5000, "gpt3\0", "../" * 2000 + "x", "\udce9"])
def test_a_name_that_no_system_can_look_up_is_refused(folder: Path, source: str) -> None:
    with pytest.raises(InputError, match="no file, preset or hub id has this name"):
        load(source)


def test_a_file_that_may_not_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "secret.yaml"
    file.write_text(f"model: {SIZES}\n")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("memcalc.files.os.open", refuse)
    with pytest.raises(InputError) as caught:
        load(file)

    assert str(caught.value) == (
        f"{file}: the file cannot be read: Permission denied. Name the configuration file itself, and check its permissions."
    )


@pytest.mark.parametrize("name", ["train.py", "train.ipynb"])
def test_a_python_program_is_not_a_configuration(folder: Path, name: str) -> None:
    (folder / name).write_text("import torch\n")
    with pytest.raises(
        InputError, match=r"a Python program is not a configuration\. Run it without a GPU: `memcalc dry"
    ):
        load(folder / name)
