"""Lookup and reading of a configuration's text: a file, a preset by name, or standard input."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from memcalc.catalogue.resolution import is_hub_id, refuse_url, similar_ids
from memcalc.errors import InputError
from memcalc.files import decoded, is_file, read_bytes
from memcalc.spec.fields import nearest
from memcalc.spec.presets import preset_names, preset_path, presets_folder
from memcalc.spec.yaml_source import MAX_CHARACTERS, YamlSource, parse_yaml

STANDARD_INPUT = "standard input"
_PROGRAMS = (".py", ".ipynb")
_SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".sh", ".py", ".jsonl", ".pickle", ".gz")
MODEL_CONFIG = "config.json"  # in a model's directory, as written by save_pretrained
_read: list[tuple[object, bytes]] = []  # the stream that was read, and its content


def read_source(source: str | Path) -> YamlSource:
    """Return the configuration at a path, else the preset of that name; "-" reads standard input.

    Messages name a file by its path as the user gave it, and a preset by its file name.

    Raises:
        InputError: the file does not exist, cannot be read, or is not UTF-8 YAML.
    """
    if str(source) == "-":
        return parse_yaml(standard_input(), STANDARD_INPUT)
    path = find_config(source)
    label = path.name if path.parent == presets_folder() else str(path)
    data = read_bytes(path, 4 * MAX_CHARACTERS, "Name the configuration file itself, and check its permissions.")
    return parse_yaml(decoded(data, label), label)


def standard_input() -> str:
    """Return the text of standard input. It is read once, and later calls return the same text.

    Raises:
        InputError: it is not UTF-8.
    """
    if not _read or _read[0][0] is not sys.stdin:
        _read[:] = [(sys.stdin, sys.stdin.buffer.read(4 * MAX_CHARACTERS + 1))]
    return decoded(_read[0][1], STANDARD_INPUT)


def _list(folder: Path) -> None:
    """Check that a directory can be listed.

    Raises:
        InputError: it cannot.
    """
    try:
        with os.scandir(folder):
            pass
    except OSError as error:
        remedy = "Check the permissions, or leave the directory out."
        raise InputError(f"the directory cannot be listed: {error.strerror}.", remedy, str(folder)) from None


def find_config(source: str | Path) -> Path:
    """Return the file of `source`: itself, the config.json in a directory, else the preset of that name.

    Raises:
        InputError: none exists; the message suggests the nearest presets and hub ids.
    """
    path = Path(source)
    try:
        if path.is_file():
            if path.suffix.lower() in _PROGRAMS:
                raise InputError(
                    "a Python program is not a configuration.",
                    "Run it without a GPU: `memcalc dry-run --gpu GPU -- python FILE`.",
                    str(source),
                )
            return path
        if path.is_dir():
            _list(path)
            if is_file(path / MODEL_CONFIG):
                return path / MODEL_CONFIG
            raise InputError(
                "the directory has no config.json.",
                "Name a file in the directory, or run `memcalc check` on all files.",
                str(source),
            )
        if path.exists():
            raise InputError(
                "this is a pipe or a device, not a file.", "Write `-` to read standard input.", str(source)
            )
    except (OSError, ValueError):  # a name longer than the system allows, or with a null character
        pass
    preset = preset_path(str(source))
    if preset is not None:
        return preset
    refuse_url(str(source))
    if path.suffix.lower() in _SUFFIXES:
        raise InputError("the file does not exist.", _suggestion(str(source), "Check the path. "), str(source)[:200])
    raise InputError("no file, preset or hub id has this name.", _suggestion(str(source)), str(source)[:200])


def names_hub_id(source: str | Path) -> bool:
    """Return whether a configuration is named by a hub id (ORG/NAME): no file, directory or preset has this name."""
    name = str(source)
    if not is_hub_id(name) or preset_path(name) is not None:
        return False
    try:
        return not Path(name).exists()
    except (OSError, ValueError):
        return False


def _suggestion(name: str, first: str = "") -> str:
    """Return a remedy for a name without a file or preset; `first` begins the remedy if no name is similar."""
    presets = preset_names()
    wanted = name[:80].lower().removesuffix(".yaml")
    spellings = (wanted, re.sub(r"(?<=[a-z])(?=\d)", "-", wanted))  # "llama3" is "llama-3"
    found = [preset for preset in presets if preset.startswith(tuple(f"{each}-" for each in spellings))][:2]
    found += [preset for preset in presets if wanted.startswith(f"{preset}-")]  # "gpt3-175b"
    alike = nearest(wanted, presets)
    if alike is not None and set(re.findall(r"\d+", alike)) == set(re.findall(r"\d+", wanted)):  # of the same size
        found.append(alike)
    if not found:
        found = [*similar_ids(name), *([alike] if alike else [])]
    if found:
        return f"Did you mean {' or '.join(dict.fromkeys(found))}?"
    return f"{first}`memcalc models` lists the presets, `memcalc models QUERY` searches the published models."
