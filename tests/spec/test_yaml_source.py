"""YAML read strictly: plain data with the line of every key, or one message with the line at fault."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import InputError
from memcalc.spec.yaml_source import MAX_CHARACTERS, MAX_DEPTH, MAX_NODES, YamlSource, parse_yaml

PLAIN = "Use plain mappings, lists, numbers, words, true and false."
SYNTAX = "Check indentation, quotes and colons there."


def refusal(text: str) -> str:
    """The whole message for a text that is refused."""
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "run.yaml")
    assert caught.value.problem
    assert caught.value.remedy
    return str(caught.value)


def bomb(levels: int, width: int = 9) -> str:
    """Aliases that multiply at each level: width^levels values in a few hundred bytes."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def test_plain_values_are_read_as_they_stand() -> None:
    text = "a: 1\nb: -2\nc: 0.5\nd: word\ne: 'quoted 1'\nf: true\ng:\nh: [1, x]\ni: {j: 1_000}\nk: null\nl: +3\nm: .5\n"

    assert parse_yaml(text, "").data == {
        "a": 1,
        "b": -2,
        "c": 0.5,
        "d": "word",
        "e": "quoted 1",
        "f": True,
        "g": None,
        "h": [1, "x"],
        "i": {"j": 1000},
        "k": None,
        "l": 3,
        "m": 0.5,
    }


def test_an_exponent_is_a_number_as_in_json() -> None:
    """YAML 1.1 takes 1e-2 for a word; JSON, which config.json is, takes it for a number. In quotes it is a word."""
    values = parse_yaml("a: 1e-2\nb: 2.5E+3\nc: '1e3'\n", "").data

    assert values == {"a": 0.01, "b": 2500.0, "c": "1e3"}


def test_json_is_yaml() -> None:
    assert parse_yaml('{"a": {"b": [1, 2.5, "x", null, false]}}', "").data == {"a": {"b": [1, 2.5, "x", None, False]}}


def test_an_alias_stands_for_its_anchor() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\n", "").data == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize("text", ["", "\n", "# nothing but a comment\n", "null", "---\n", "---\n...\n"])
def test_nothing_is_nothing(text: str) -> None:
    assert parse_yaml(text, "run.yaml").data is None


def test_every_key_has_its_line() -> None:
    source = parse_yaml("# comment\nmodel:\n  d: 64\n\n  moe:\n    num_experts: 8\nlist: [1,\n  2]\n", "run.yaml")

    assert source.where(("model",)) == "run.yaml:2: model"
    assert source.where(("model", "d")) == "run.yaml:3: model.d"
    assert source.where(("model", "moe", "num_experts")) == "run.yaml:6: model.moe.num_experts"
    assert source.where(("list", 1)) == "run.yaml:8: list.1"


def test_a_missing_key_has_the_line_of_its_block() -> None:
    """The message about a missing field has the line of the block that lacks it."""
    source = parse_yaml("name: x\nmodel:\n  d: 64\n", "run.yaml")

    assert source.where(("model", "num_layers")) == "run.yaml:2: model.num_layers"
    assert source.where(("training", "dropout")) == "run.yaml:1: training.dropout"
    assert source.where(()) == "run.yaml:1"


def test_a_key_given_on_the_command_line_says_so() -> None:
    source = parse_yaml("model:\n  d: 64\n", "run.yaml")
    source.overridden["model", "d"] = "--set"
    source.overridden["model", "moe"] = "--set"

    assert source.where(("model", "d")) == "--set: model.d"
    assert source.where(("model", "moe", "num_experts")) == "--set: model.moe.num_experts"
    assert source.where(("model", "l")) == "run.yaml:1: model.l"


def test_a_mapping_in_memory_has_no_lines() -> None:
    assert YamlSource({"a": 1}, "configuration").where(("a",)) == "configuration: a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "run.yaml:3: a: the key 'a' is repeated, first on line 1. Keep one of the two."),
        (
            "m:\n  x: 1\n  y: 2\n  x: 3\n",
            "run.yaml:4: m.x: the key 'x' is repeated, first on line 2. Keep one of the two.",
        ),
        ("m: {x: 1, x: 1}\n", "run.yaml:1: m.x: the key 'x' is repeated, first on line 1. Keep one of the two."),
    ],
)
def test_a_repeated_key_is_rejected_with_both_lines(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize("value", [".nan", ".NaN", ".inf", "-.inf", "+.Inf"])
def test_numbers_that_are_not_finite_are_refused(value: str) -> None:
    message = f"run.yaml:2: t.dropout: {value} is not a finite number. Write a plain number."

    assert refusal(f"t:\n  dropout: {value}\n") == message


@pytest.mark.parametrize("value", ["1e400", "-1e999", "1.0e+400"])
def test_numbers_too_large_for_a_float_are_refused(value: str) -> None:
    assert refusal(f"a: {value}\n") == f"run.yaml:1: a: {value} is not a finite number. Write a plain number."


@pytest.mark.parametrize("value", ["010", "0x10", "0b101", "1:30", "-017", "1:30.5", "0_7"])
def test_numbers_of_another_base_are_refused(value: str) -> None:
    """YAML 1.1 reads 010 as 8, 0x10 as 16 and 1:30 as 90; whoever writes a size means none of these."""
    message = f"run.yaml:1: s: {value} is not decimal: YAML reads it in another base. Write a plain number."

    assert refusal(f"s: {value}\n") == message


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    """Python itself refuses to read it: the conversion would take quadratic time."""
    message = refusal("a: " + "9" * 5000)

    assert message == f"run.yaml:1: a: {'9' * 37}... cannot be read as int. Write a plain value without a tag."


@pytest.mark.parametrize(("value", "kind"), [("!!bool 4", "bool"), ("!!int ''", "int"), ("!!float '.'", "float")])
def test_a_tag_that_contradicts_its_value_is_refused(value: str, kind: str) -> None:
    text = value.split()[1].strip("'")
    message = f"run.yaml:1: a: {text} cannot be read as {kind}. Write a plain value without a tag."

    assert refusal(f"a: {value}\n") == message


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("a: 2024-01-01\n", "timestamp"),
        ("a: 2024-01-01 12:00:00\n", "timestamp"),
        ("a: !!python/object/apply:os.system ['true']\n", "python/object/apply:os.system"),
        ("a: !!python/name:os.system\n", "python/name:os.system"),
        ("a: !!binary aGVsbG8=\n", "binary"),
        ("a: !!set {x, y}\n", "set"),
        ("a: !!omap [x: 1]\n", "omap"),
        ("a: !mine {x: 1}\n", "!mine"),
        ("a: !" + "x" * 100 + " 1\n", "!" + "x" * 36 + "..."),
    ],
)
def test_dates_and_tags_of_any_language_are_refused(text: str, tag: str) -> None:
    assert refusal(text) == f"run.yaml:1: a: {tag!r} is not a type of value that a configuration has. {PLAIN}"


def test_no_tag_is_ever_executed(tmp_path: Any) -> None:
    """The command of a Python tag would leave a file behind."""
    witness = tmp_path / "executed"
    refusal(f"a: !!python/object/apply:os.system ['touch {witness}']\n")

    assert not witness.exists()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: &a [1, *a]\n", "run.yaml:1"),
        ("x: 1\nmodel: &m\n  l: 1\n  m: *m\n", "run.yaml:3"),
        ("&a {b: *a}\n", "run.yaml:1"),
    ],
)
def test_an_alias_that_refers_to_itself_is_refused(text: str, place: str) -> None:
    message = f"{place}: an alias refers to itself, or aliases nest beyond {MAX_DEPTH} levels. Write the value out."

    assert refusal(text) == message


def test_aliases_that_nest_beyond_measure_are_refused() -> None:
    """a0 in a1 in a2 ... in a40: 41 levels, of which the file itself shows two."""
    chain = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 41))

    assert "an alias refers to itself, or aliases nest beyond 32 levels." in refusal(chain)


@pytest.mark.parametrize("levels", [5, 8, 30])
def test_aliases_that_multiply_are_refused_at_once(levels: int) -> None:
    """9^5 = 59,049 values are more than any configuration; 9^30 would fill every memory there is."""
    start = time.process_time()
    message = refusal(bomb(levels))

    assert ": the aliases in this file expand to more than 20,000 values. " in message
    assert message.endswith("Write the values out instead of nesting aliases.")
    assert time.process_time() - start < 2


def test_a_few_aliases_are_fine() -> None:
    """9^3 = 729 values."""
    assert len(parse_yaml(bomb(3), "").data["a2"]) == 9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: {<<: {b: 1, c: 2}, c: 3}", {"b": 1, "c": 3}),
        ("x: &x {b: 1}\na:\n  c: 2\n  b: 3\n  <<: *x", {"b": 3, "c": 2}),
        ("x: &x {b: 1, c: 1}\ny: &y {b: 2, d: 2}\na: {<<: [*x, *y]}", {"b": 1, "c": 1, "d": 2}),
        ("x: &x {b: {c: 1}}\ny: &y {<<: *x}\na: {<<: *y}", {"b": {"c": 1}}),
    ],
)
def test_merge_keys(text: str, expected: dict[str, Any]) -> None:
    """As YAML 1.1 has them: a mapping's own keys go over what it merges, the first of several over the others."""
    source = parse_yaml(text, "run.yaml")

    assert source.data["a"] == expected
    assert {("a", key) for key in expected} <= source.lines.keys()


def test_merge_keys_of_no_mapping_are_refused() -> None:
    assert refusal("a:\n  <<: 1\n") == ("run.yaml:2: a: a merge key (<<) takes mappings. Name the anchor of one.")
    assert "an alias refers to itself" in refusal("a: &a\n  <<: *a\n")


@pytest.mark.parametrize(
    ("text", "place"), [("? [model]\n: 1\n", "run.yaml:1"), ("a:\n  ? {b: 1}\n  : 1\n", "run.yaml:2: a")]
)
def test_keys_that_are_no_words_are_refused(text: str, place: str) -> None:
    assert refusal(text) == f"{place}: a key must be a word. Write `name: value` lines."


def test_a_template_is_rendered_first() -> None:
    """YAML reads {{ name }} as a mapping that is the key of a mapping: the remedy was to write `name: value` lines."""
    with pytest.raises(InputError, match=r"run\.yaml:1: preset: a key must be a word\. Render the template first"):
        parse_yaml("preset: {{ name }}\n", "run.yaml")


@pytest.mark.parametrize(("text", "line"), [("a: 1\n---\nb: 2\n", 2), ("---\na: 1\n---\n", 3)])
def test_several_documents_are_refused(text: str, line: int) -> None:
    rule = "the file holds more than one document (a line of ---)."

    assert refusal(text) == f"run.yaml:{line}: {rule} Keep one document per file."


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 40 + "]" * 40,
        "a: " + "{b: " * 40 + "}" * 40,
        "[" * 100_000,
        "[" + "1," * (4 * MAX_NODES) + "]",
        "- " * 50_000,
    ],
)
def test_deep_and_long_files_are_refused_at_once(text: str) -> None:
    start = time.process_time()
    rule = "the file nests or repeats beyond 32 levels or 20,000 values."

    assert refusal(text) == f"run.yaml:1: {rule} Remove the parts that a configuration does not need."
    assert time.process_time() - start < 2


def test_a_nesting_at_the_limit_is_read() -> None:
    data = parse_yaml("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH, "").data
    for _ in range(MAX_DEPTH):
        (data,) = data

    assert data == 1


def test_a_file_at_the_limit_is_read_and_one_beyond_is_refused() -> None:
    assert parse_yaml("#" * MAX_CHARACTERS, "").data is None
    message = "run.yaml: the file has 1,000,001 characters; a configuration has at most 1,000,000."

    assert refusal("#" * (MAX_CHARACTERS + 1)) == f"{message} Name the configuration file itself."


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a:\n\tb: 1\n", 2, "found character that cannot start any token"),
        ("a: {b: 1\n", 2, "did not find expected ',' or '}'"),
        ("x: 1\na: *missing\n", 2, "found undefined alias"),
        ("a: 'x\n", 2, "found unexpected end of stream"),
        ("a: b: c\n", 1, "mapping values are not allowed in this context"),
        ("%YAML 9.9\n---\na: 1\n", 1, "found incompatible YAML document"),
    ],
)
def test_what_is_not_yaml_is_refused_with_the_line(text: str, line: int, problem: str) -> None:
    assert refusal(text) == f"run.yaml:{line}: this is not YAML: {problem}. {SYNTAX}"


def test_control_characters_are_refused() -> None:
    assert refusal("a: \x00\n") == f"run.yaml: this is not YAML: control characters are not allowed. {SYNTAX}"


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**12), 10**12)
        | st.floats(-1e6, 1e6)
        | st.text("abc_-. :#", max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("abcd", min_size=1, max_size=3), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_json_data_comes_back_as_it_was(data: object) -> None:
    """What a program writes as JSON, floats in any notation included, is read as the same values."""
    read = parse_yaml(json.dumps({"a": data}), "run.yaml").data["a"]

    assert read == data
    assert not isinstance(data, float) or math.isclose(read, data, rel_tol=0, abs_tol=0)
