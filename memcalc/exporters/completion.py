"""Settings that complete another program's file, found by reading it back: both are the run, field by field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.directories import temporary_directory
from memcalc.errors import InputError, MemcalcError
from memcalc.exporters.programs import PROGRAMS, ExportTarget
from memcalc.files import write_text
from memcalc.importers.loading import load
from memcalc.spec.presets import preset_names
from memcalc.spec.reading import names_hub_id
from memcalc.spec.spec import Spec

Place = tuple[str, ...]

# Fields that a program may leave to its command line, and without which its file cannot be read.
_FIRST: tuple[Place, ...] = tuple(("parallelism", name) for name in ("data_parallel", "zero_stage", "engine"))
# What follows from fields that are compared, and fields that were derived from defaults.
_NO_MEMORY = (("training", "global_batch_size"), ("training", "framework"))
_ROUNDS = 6  # a setting may change what other fields default to

_PLAIN = re.compile(r"[A-Za-z][\w./-]*")  # what YAML reads as the text that it is, but for its own words
_YAMLS_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


class Export(NamedTuple):
    """A run in another program's file."""

    program: ExportTarget  # the program of the file
    text: str  # the file
    settings: tuple[str, ...]  # what completes it, as `--set` takes them
    gpu: str | None  # the run's GPU, which is no part of the file; None: it names none
    spec: Spec  # the run that file and settings describe: the same fields, in the file's program

    def command(self, file: str | Path) -> list[str]:
        """Return the arguments of the command that estimates the run from the file and the settings."""
        gpu = ["--gpu", self.gpu] if self.gpu else []
        return ["memcalc", "estimate", str(file), *gpu, *(word for each in self.settings for word in ("--set", each))]


def export(spec: Spec, program: str, file: str | Path, model: str | None = None) -> Export:
    """Return a run as another program's file, with the settings that complete it.

    Args:
        spec: the run.
        program: one of `PROGRAMS`.
        file: what the file will be called; its suffix is one that the program's files have.
        model: the preset or hub id that names the run's model, where it is known.

    Raises:
        InputError: as `named_program`; or the program cannot run it, or the file cannot describe it.
    """
    chosen = named_program(program, file)
    refused = chosen.refusal(spec)
    if refused:
        able = [name for name, each in PROGRAMS.items() if not each.refusal(spec)]
        raise InputError(refused, f"Use --as {_listed(able)}." if able else "", "--as")
    path = Path(file)
    name = _model_name(spec, model)
    text = chosen.text(spec, name)
    with temporary_directory("memcalc-export-") as folder:
        written = folder / path.name
        write_text(written, text)
        settings = _completing(spec, written, name)
        return Export(chosen, text, settings, spec.hardware.gpu, load(written, settings, gpu=spec.hardware.gpu))


def named_program(program: str, file: str | Path) -> ExportTarget:
    """Return the program of this name to write a file for.

    Raises:
        InputError: the program is unknown, or the suffix is not one of its files'.
    """
    chosen = PROGRAMS.get(program)
    if chosen is None:
        raise InputError(
            f"{program!r} is not a program that memcalc writes files for.", f"Use {_listed(PROGRAMS)}.", "--as"
        )
    path = Path(file)
    if path.suffix.lower() not in chosen.suffixes:
        raise InputError(
            f"a file of {chosen.label} ends in {_listed(chosen.suffixes)}.",
            f"Write {path.stem or 'run'}{chosen.suffixes[0]}.",
            str(file),
        )
    return chosen


def _model_name(spec: Spec, named: str | None) -> str | None:
    """Return a preset or hub id of the run's model; None: its fields are set separately."""
    presets = preset_names()
    given = [name for name in (named, spec.name) if name and (name in presets or names_hub_id(name))]
    for name in dict.fromkeys((*given, *presets)):
        try:
            if load({"preset": name}).model == spec.model:
                return name
        except MemcalcError:
            continue
    return None


def _completing(spec: Spec, written: Path, name: str | None) -> tuple[str, ...]:
    wanted = dict(_leaves(spec))
    settings: dict[Place, Any] = {("preset",): name} if name else {}
    if not name:
        settings |= {place: value for place, value in wanted.items() if place[0] == "model" and value is not None}
    for place in _FIRST:
        settings[place] = wanted[place]
    for _ in range(_ROUNDS):
        found = dict(_leaves(load(written, _words(settings), gpu=spec.hardware.gpu, check=_no_rules)))
        if found == wanted:
            break
        other = {place: value for place, value in wanted.items() if found.get(place, ...) != value}
        settings |= other
    else:
        fields = _listed(".".join(place) for place in other)
        raise InputError(f"this file cannot describe the run: --set cannot add {fields}.", "", written.name)
    # What a file says itself, or what follows from it, needs no setting.
    for place in list(settings):
        fewer = {key: value for key, value in settings.items() if key != place}
        try:
            if dict(_leaves(load(written, _words(fewer), gpu=spec.hardware.gpu))) == wanted:
                settings = fewer
        except MemcalcError:
            continue
    return tuple(_words(settings))


def _leaves(spec: Spec) -> Iterator[tuple[Place, Any]]:
    """Every field of a run that memory follows from, but its GPU, by its path; an absent block is one."""
    document = spec.model_dump(mode="json")
    for block in ("model", "training", "parallelism"):
        yield from (leaf for leaf in _fields((block,), document[block]) if leaf[0] not in _NO_MEMORY)


def _no_rules(*_: object) -> None:
    """Between two settings a file may contradict itself."""


def _fields(place: Place, block: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    for name, value in block.items():
        if isinstance(value, dict):
            yield from _fields((*place, name), value)
        else:
            yield (*place, name), value


def _words(settings: dict[Place, Any]) -> list[str]:
    return [f"{_short(place)}={_written(value)}" for place, value in settings.items()]


def _short(place: Place) -> str:
    """Return the field without its block."""
    return ".".join(place[1:]) if len(place) > 1 else place[0]


def _written(value: Any) -> str:
    return (
        value
        if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _YAMLS_WORDS
        else json.dumps(value)
    )


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
