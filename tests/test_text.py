"""What is printed: no control characters, no commands of GitHub Actions, no secrets, and of a bounded length."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import InputError, MemcalcError, NotWritten
from memcalc.text import (
    CONTROLS,
    MASK,
    harmless,
    harmless_lines,
    json_safe,
    masked,
    shortened_in_the_middle,
    without_commands,
)

# As actions/runner finds commands: "::" at the beginning of a line after blanks, "##[" anywhere.
COMMAND = re.compile(r"^\s*::|##\[", re.MULTILINE)
TEXTS = st.text(st.sampled_from("a:#[ \n\r\t\x00\x1b\x7f\x85\u200f\u202e\u2028\u2069é::##")) | st.text()


@given(TEXTS)
def test_a_line_has_no_control_characters(text: str) -> None:
    assert CONTROLS.search(harmless(text)) is None
    assert harmless(harmless(text)) == harmless(text)


@given(TEXTS)
def test_lines_have_no_commands(text: str) -> None:
    found = without_commands(text)

    assert CONTROLS.search(found.replace("\n", "")) is None
    assert COMMAND.search(found) is None
    assert found.count("\n") == text.count("\n")


def test_what_is_harmless_stays() -> None:
    text = "x·W + b: std::vector, 日本語 # [1]\n  a line"

    assert without_commands(text) == harmless_lines(text) == text
    assert harmless("a\tb\x1b[31m\u202e") == r"a\x09b\x1b[31m\u202e"
    assert without_commands("  ::error::x\n##[group]") == "  \\x3a:error::x\n\\x23#[group]"


@given(st.recursive(TEXTS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)))
def test_json_says_the_same(value: object) -> None:
    for ascii_only in (True, False):
        found = json_safe(json.dumps(value, indent=2, ensure_ascii=ascii_only))

        assert json.loads(found) == value
        assert CONTROLS.search(found.replace("\n", "")) is None
        assert COMMAND.search(found) is None


@given(TEXTS, TEXTS, TEXTS)
def test_an_input_error_is_one_line(problem: str, remedy: str, where: str) -> None:
    text = str(InputError(problem, remedy, where))

    assert CONTROLS.search(text) is None


def test_long_values_are_shortened_where_the_sentence_keeps_its_ends() -> None:
    error = InputError(f"name = {'x' * 500_000} is not a name.", "Write a name.", "y" * 5_000)

    assert len(str(error)) < 1_500
    assert str(error).endswith("is not a name. Write a name.")
    assert shortened_in_the_middle("abc", 3) == "abc"
    assert len(shortened_in_the_middle("x" * 1_000, 100)) == 100


def test_messages_in_several_lines_keep_their_lines() -> None:
    assert str(MemcalcError("one\ntwo \x1b[31m")) == "one\ntwo \\x1b[31m"
    assert str(NotWritten("a\nb", "No space left on device", "")) == (
        r"a\x0ab could not be written: No space left on device."
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hf-token", "abc", "--lr", "1"], ["--hf-token", MASK, "--lr", "1"]),
        (["--token", "--lr", "1"], ["--token", "--lr", "1"]),
        (["WANDB_API_KEY=secret", "python"], [f"WANDB_API_KEY={MASK}", "python"]),
        (["--api_key=x"], [f"--api_key={MASK}"]),
        (["--password", "p"], ["--password", MASK]),
        (["hf_abcdefghijklmnop"], [MASK]),
        (["a=hf_abcdefghijklmnop,b"], [f"a={MASK},b"]),
        (["ghp_0123456789abcdefghij"], [MASK]),
        (["https://me:pw@host/x"], [f"https://{MASK}@host/x"]),
        (["0123456789abcdef0123456789abcdef01234567"], [MASK]),
        (["--tokenizer", "gpt2", "--max-tokens", "9"], ["--tokenizer", "gpt2", "--max-tokens", "9"]),
        (["--set", "b=4", "https://host:80/x"], ["--set", "b=4", "https://host:80/x"]),
    ],
)
def test_secrets_are_masked(words: list[str], expected: list[str]) -> None:
    assert masked(words) == expected
