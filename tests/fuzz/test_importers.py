"""Other frameworks' files with changed fields: sized or refused by one message, and no field in no list."""

import copy
import json
import random
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from memcalc.errors import InputError
from memcalc.importers.loading import import_file
from tests.fuzz.test_fuzz import SECONDS_ALLOWED, invoke, judge, time_limit
from tests.importers.cases import CASES

VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, 8, 64, -1, 2**31, 2**63, 10**30, 0.0, 0.5, -1.5, 1e308, True, False, "", "auto", "none", "full"),
    *(
        "true",
        "8",
        "4096",
        "bf16",
        "adamw",
        "cpu",
        "[0]",
        "$1",
        "${HOME}",
        "${.x}",
        "${model.x}",
        "a b",
        "\u2028",
        "\x07",
    ),
    *(
        [],
        [1],
        ["q_proj"],
        [0, 1],
        ["a", ["b"]],
        [{"a": 1}],
        {},
        {"a": 1},
        {"enabled": True},
        {"stage": 3},
        {"_target_": "x"},
    ),
)
WORDS = ("tomorrow", "data_parallel", "model", "dtype", "bf16", "moe", "zero_stage", "a.b", "", "*", "\u00fc")
SETTINGS = ("data_parallel=2", "preset=gpt2", "zero_stage=0", "s=128", "dtype=bf16", "vocab_size=50304")


def _places(data: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value, blocks included."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*before, key))


def _change(rng: random.Random, data: Any) -> None:
    """One field deleted, changed, renamed, moved up or added, in place."""
    places = list(_places(data))
    if not places:
        return
    *outer, last = rng.choice(places)
    block = data
    for key in outer:
        block = block[key]
    kind = rng.random()
    if kind < 0.6:
        block[last] = copy.deepcopy(rng.choice(VALUES))
    elif kind < 0.75:
        del block[last]
    elif isinstance(block, dict):
        name = rng.choice((*WORDS, *(str(place[-1]) for place in places)))
        block[name] = copy.deepcopy(rng.choice((block[last], *VALUES)))


def _toml(data: Any) -> str:
    """Of two levels, as torchtitan's files are; what TOML cannot say is said as JSON in quotes."""
    lines: list[str] = []
    for section, fields in data.items():
        lines.append(f"[{json.dumps(section)}]")
        for name, value in (fields if isinstance(fields, dict) else {"value": fields}).items():
            plain = isinstance(value, bool | int | float | str) or (
                isinstance(value, list) and not any(map(_deep, value))
            )
            lines.append(f"{json.dumps(name)} = {json.dumps(value if plain else json.dumps(value))}")
    return "\n".join(lines)


def _deep(value: Any) -> bool:
    return isinstance(value, dict | list) or value is None


def _script(rng: random.Random, text: str) -> str:
    """Words of a shell script changed, dropped or doubled."""
    words = text.split(" ")
    for _ in range(rng.choice([1, 1, 2, 4])):
        i = rng.randrange(len(words))
        value = rng.choice(
            ("$1", "8", "-3", "--bf16", "fp8", "$(date)", "'", '"', ";", "|", "&&", "\\", "", "$((1/0))", "(", "if")
        )
        words[i : i + 1] = rng.choice(([value], [], [words[i], words[i]], [words[i], shlex.quote(value)]))
    return " ".join(words)


def changed(rng: random.Random, name: str) -> tuple[str, str]:
    """A file's name and its text, some of its fields changed."""
    file, text, _, _ = CASES[name]
    suffix = Path(file).suffix
    if suffix == ".sh":
        return file, _script(rng, text)
    data = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    for _ in range(rng.choice([1, 1, 2, 5])):
        _change(rng, data)
    if suffix == ".toml":
        return file, _toml(data)
    return file, json.dumps(data) if suffix == ".json" else yaml.safe_dump(data, allow_unicode=True)


def left_out(path: Path) -> str | None:
    """Return a field that is in no list and no note; None if all are listed."""
    try:
        found = import_file(path)
    except InputError:
        return None
    if found is None:
        return None
    told = {place for place, *_ in (*found.mapped, *found.no_effect, *found.not_modelled)} | set(found.unknown)
    text = path.read_text()
    data = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    for place in _leaves(data):
        parts = place.split(".")
        around = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}  # a block may be told as a whole
        if not told & around and not any(note.startswith(place) for note in found.notes):
            return place
    return None


def _leaves(data: dict[str, Any], before: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}"


def run(seed: int, samples: int, folder: Path) -> list[str]:
    """The complaints about a number of files."""
    codes: Counter[int] = Counter()
    complaints = []
    for index in range(samples):
        label = f"{seed}:{index}"
        rng = random.Random(label)
        name = rng.choice(list(CASES))
        file, text = changed(rng, name)
        path = folder / file
        path.write_text(text)
        given = [*CASES[name][2], *rng.sample(SETTINGS, rng.choice([0, 0, 1, 2]))]
        words = [word for setting in given for word in ("--set", setting)]
        try:
            with time_limit(5 * SECONDS_ALLOWED):
                code, out, err = invoke(["estimate", str(path), *words, "--format", "json"])
                dropped = None if path.suffix == ".sh" else left_out(path)
            codes[code] += 1
            complaint = judge(code, out, err) or (f"{dropped!r} is in no list" if dropped is not None else None)
        except Exception as error:  # noqa: BLE001 -- whatever escapes is the finding
            complaint = f"{type(error).__name__}: {str(error)[:200]}"
        if complaint:
            complaints.append(f"{label} ({name}): {complaint}")
    print(f"\n{samples} files, exit codes {dict(codes)}")
    return complaints


@pytest.mark.parametrize("samples", [1, pytest.param(30, marks=pytest.mark.long)])
def test_some_files(samples: int, tmp_path: Path) -> None:
    assert run(1, samples, tmp_path) == []


@pytest.mark.long
def test_twenty_thousand_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        complaints = run(2, 20_000, tmp_path)

    assert complaints == []
