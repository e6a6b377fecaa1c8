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
        ("", "it has no configuration."),
        ("# only a comment\n", "it has no configuration."),
        ("{}", "it has no configuration."),
        ("null", "it has no configuration."),
        ("42", "it holds 42, not a configuration."),
        ("hello", "it holds 'hello', not a configuration."),
        ("[1, 2]", "it holds a list, not a configuration."),
    ],
)
def test_a_file_without_blocks_is_refused(folder: Path, text: str, problem: str) -> None:
    remedy = "Write at least a `model:` block; `memcalc models` lists presets to start from."

    assert refusal(folder, text) == f"run.yaml: {problem} {remedy}"


@pytest.mark.parametrize(
    ("data", "byte"), [(b"\xff\xfe\x00", 0), (b"name: \xe9\n", 6), ("model: {}".encode("utf-16"), 0)]
)
def test_a_file_that_is_not_utf_8_is_refused(folder: Path, data: bytes, byte: int) -> None:
    message = f"run.yaml: byte {byte} is not UTF-8 text. Save the file as text in UTF-8."

    assert refusal(folder, data) == message


def test_a_huge_file_is_refused_without_being_read_as_a_whole(folder: Path) -> None:
    """Five million characters: at most four bytes for each of the million that a configuration may have are read."""
    assert refusal(folder, "#" * (5 * MAX_CHARACTERS)).endswith(
        "run.yaml: has more than 4,000,000 bytes, the most of such a file. "
        "Name the configuration file itself, and check its permissions."
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "nope",
            "nope: not a file, preset or hub id. `memcalc models` lists the presets, `memcalc models QUERY` searches the published models.",
        ),
        ("gpt33", "gpt33: not a file, preset or hub id. Did you mean gpt3?"),
        (
            "lama-3-8b.yaml",
            "lama-3-8b.yaml: not a file, preset or hub id. Did you mean llama-3-8b?",
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
            ".: . is a directory without a config.json. Name a file in it, or check all of them with `memcalc check`.",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(folder: Path, source: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(source)

    assert str(caught.value) == message


@pytest.mark.parametrize("source", ["a" * 5000, "gpt3\0", "../" * 2000 + "x", "\udce9"])
def test_a_name_that_no_system_can_look_up_is_refused(folder: Path, source: str) -> None:
    with pytest.raises(InputError, match="not a file, preset or hub id"):
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
        f"{file}: cannot be read: Permission denied. Name the configuration file itself, and check its permissions."
    )
