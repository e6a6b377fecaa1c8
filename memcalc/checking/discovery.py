"""Discovery of configs by their text, not their parsed data: an invalid config must be found too."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from memcalc.checking.patterns import alternatives, exists, is_pattern
from memcalc.errors import InputError
from memcalc.files import MOST_CONFIG_BYTES, read_bytes
from memcalc.spec.yaml_source import is_template, is_yaml

_YAML = (".yaml", ".yml")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_TEXTS = (".txt", ".args")

# At the start of a line: `model:` with a block below it (or in braces), or a reference to a model by `preset` or
# `hf_config`.
_MARKS = re.compile(
    r"""^(?:['"]?model['"]?[ \t]*:[ \t]*(?:\#.*)?(?:\{.*)?$|['"]?(?:preset|hf_config)['"]?[ \t]*:[ \t]*\S)""",
    re.MULTILINE,
)


# Configs of other frameworks that name or contain a model: axolotl, LLaMA-Factory and TrainingArguments, LitGPT;
# torchtitan; Megatron-LM. Configs of DeepSpeed and Accelerate do not, so they are checked only if named.
_FOREIGN_YAML = (
    (
        re.compile(r"^base_model[ \t]*:[ \t]*\S", re.MULTILINE),
        re.compile(r"^(?:micro_batch_size|sequence_len)[ \t]*:", re.MULTILINE),
    ),
    (
        re.compile(r"^model_name_or_path[ \t]*:[ \t]*\S", re.MULTILINE),
        re.compile(r"^per_device_train_batch_size[ \t]*:", re.MULTILINE),
    ),
    (
        re.compile(r"^(?:checkpoint_dir|model_name)[ \t]*:[ \t]*\S", re.MULTILINE),
        re.compile(r"^train[ \t]*:[ \t]*(?:\{.*)?$", re.MULTILINE),
    ),
)
# All torchtune configs have a `model:` block; only those that train have an optimizer.
_TORCHTUNE = re.compile(r"^[ \t]+_component_[ \t]*:[ \t]*torchtune\.", re.MULTILINE)
_TRAINS = re.compile(r"^optimizer[ \t]*:", re.MULTILINE)
_FOREIGN_TOML = (re.compile(r"^\[model\]", re.MULTILINE), re.compile(r"^flavor[ \t]*=", re.MULTILINE))
# Arguments of Megatron-LM; of Trainer, after a program.
_FOREIGN_SCRIPT = (re.compile(r"--num-layers\s"), re.compile(r"--hidden-size\s"))
_TRAINER_SCRIPT = (
    re.compile(r"--model_name_or_path[=\s]"),
    re.compile(r"--per_device_train_batch_size[=\s]"),
)
# Megatron-LM arguments in a separate file, and TrainingArguments as JSON.
_ARGUMENTS = (  # blanks without line breaks: otherwise each blank line would rescan the following ones
    re.compile(r"^[^\S\n]*--num-layers\s", re.MULTILINE),
    re.compile(r"^[^\S\n]*--hidden-size\s", re.MULTILINE),
)
_FOREIGN_JSON = (
    re.compile(r'"model_name_or_path"\s*:'),
    re.compile(r'"per_device_train_batch_size"\s*:'),
)


# Largest file that is parsed without these marks. Larger YAML files are lock files and API definitions; larger texts
# and JSON files are data.
MOST_CHARACTERS = 65_536


# Most files in directories that are searched, of which many are read: seconds. A repository has fewer; a disk has more.
MOST_FILES = 100_000


class DiscoveredFiles(NamedTuple):
    """The files that the paths of the command line match."""

    files: list[str]  # named files as named, and the configs of directories, without duplicates
    skipped: int  # number of files that are not configs
    linked: list[str]  # symlinked directories, which could lead anywhere and are not followed


def _excludes_nothing(path: str) -> bool:  # noqa: ARG001 - replaces a policy's method
    return False


def find_configs(
    paths: Iterable[str | os.PathLike[str]],
    excludes: Callable[[str], bool] = _excludes_nothing,
    *,
    skip_others: bool = False,
) -> DiscoveredFiles:
    """Return named files, and the files in directories that look like a configuration, in order.

    Args:
        paths: files, directories, and patterns, which expand to their matches, as in a shell.
        excludes: returns whether a file of a directory or pattern is excluded; excluded files are not counted.
        skip_others: also skip named files that do not look like a configuration.

    Raises:
        InputError: directories have more than `MOST_FILES` files that are not excluded.
    """
    files: dict[str, None] = {}
    searched = 0
    skipped: set[str] = set()
    closed: list[OSError] = []
    linked: list[str] = []
    for path in paths:
        words = (os.fspath(path),) if exists(os.fspath(path)) else alternatives(os.fspath(path))
        for each in (each for word in words for each in _expanded(word, excludes)):
            folder = Path(each).is_dir()
            # A path that does not exist is kept: loading it reports that, or finds a preset of that name.
            doubtful = folder or (skip_others and Path(each).is_file())
            for file in (file for file in _walk(each, closed, linked) if not excludes(file)) if folder else (each,):
                searched += folder
                if searched > MOST_FILES:
                    raise InputError(
                        f"{each}: more than {MOST_FILES:,} files to search.",
                        "Name the directories that have your configs, or exclude others in memcalc.toml.",
                    )
                if doubtful and not is_config(file):
                    skipped.add(file)
                else:
                    files[file] = None
    folders = [str(error.filename) for error in closed]  # reported too, because their content was not checked
    files.update((folder, None) for folder in folders if not excludes(folder))
    return DiscoveredFiles(
        list(files), len(skipped - files.keys()), [folder for folder in linked if not excludes(folder)]
    )


def _expanded(path: str, excludes: Callable[[str], bool]) -> list[str]:
    """Return a path unchanged; for a pattern its matches, or the pattern if there are none, which is then an error."""
    if not is_pattern(path):
        return [path]
    import glob  # few runs use a pattern

    found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - "./*.yaml" finds "./a.yaml", and hidden files stay so
    return [each for each in found if not excludes(each)] if found else [path]


def _walk(folder: str, closed: list[OSError], linked: list[str]) -> Iterator[str]:
    """Yield the files of a directory and its subdirectories.

    Errors of unreadable directories are added to `closed`, symlinked directories to `linked`.
    """
    for parent, folders, names in os.walk(folder, onerror=closed.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # .git, .venv, ...
        linked += [path for name in folders if os.path.islink(path := os.path.join(parent, name))]  # noqa: PTH114, PTH118 - as below
        yield from (os.path.join(parent, name) for name in sorted(names))  # noqa: PTH118 - "./a.yaml" stays "./a.yaml"


def is_config(path: str) -> bool:
    """Return whether a file is a training config, memcalc's or another framework's, or a config.json.

    An unreadable file counts as one, and its estimate reports the error. A pipe does not, because reading it could
    block.
    """
    name = Path(path).name.lower()
    if not name.endswith((*_YAML, ".toml", *_SCRIPTS, *_TEXTS, ".json")) or not Path(path).is_file():
        return False
    try:
        if name.endswith(_YAML):
            text = _text(path)
            if _TORCHTUNE.search(text) is not None:
                return _TRAINS.search(text) is not None
            marked = _MARKS.search(text) is not None or any(_has(text, marks) for marks in _FOREIGN_YAML)
            return marked or _may_have_been_one(text)
        if name.endswith((".toml", *_SCRIPTS)):
            text = _text(path)
            marks = (_FOREIGN_TOML,) if name.endswith(".toml") else (_FOREIGN_SCRIPT, _TRAINER_SCRIPT)
            return any(_has(text, each) for each in marks)
        return _holds_arguments(path, name) or (name.endswith("config.json") and _is_model(_text(path)))
    except (InputError, OSError):  # unreadable, or too large for a config: its type is unknown
        return Path(path).exists()


def _text(path: str) -> str:
    """Return the text of a file; "" if it is too large for a config."""
    if Path(path).stat().st_size > MOST_CONFIG_BYTES:
        return ""
    return read_bytes(path).decode("utf-8-sig", errors="replace")


def _holds_arguments(path: str, name: str) -> bool:
    """Return whether a text or JSON file has another framework's arguments; a large file is data."""
    if Path(path).stat().st_size > MOST_CHARACTERS:
        return False
    return _has(_text(path), _ARGUMENTS if name.endswith(_TEXTS) else _FOREIGN_JSON)


def _may_have_been_one(text: str) -> bool:
    """Return whether a file is invalid YAML, so that it might be a config and must be reported; not a template."""
    return len(text) <= MOST_CHARACTERS and not is_template(text) and not is_yaml(text)


def _is_model(text: str) -> bool:
    """Return whether a config.json is that of a model; an invalid one with a model_type counts."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return '"model_type"' in text
    return isinstance(data, dict) and "model_type" in data


def _has(text: str, marks: Iterable[re.Pattern[str]]) -> bool:
    return all(mark.search(text) is not None for mark in marks)
