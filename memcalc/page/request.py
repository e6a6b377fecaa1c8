"""Read a request of the form: its run with overrides as in `--set`, as a command, and as YAML."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from memcalc.api.sources import load
from memcalc.catalogue.resolution import is_hub_id, resolve_offline, similar_ids
from memcalc.errors import InputError
from memcalc.files import MOST_CONFIG_BYTES, plain_json, write_text
from memcalc.spec.fields import describe
from memcalc.spec.overrides import parse_overrides
from memcalc.spec.spec import Spec
from memcalc.text import harmless

CONFIG_JSON, CONFIG_YAML = "config.json", "config.yaml"  # file names of pasted text
# A configuration of the largest size, half of its characters escaped, and the form's fields.
_MOST_CHARACTERS = 3 * MOST_CONFIG_BYTES
_RULES = {
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "string_type": "is not text",
    "dict_type": "is not a block",
    "model_type": "is not a block",
    "literal_error": "is not known",
}


class NotInCatalogue(InputError):
    """A hub id is missing in the catalogue. The page offers to fetch its config.json."""

    def __init__(self, hub_id: str) -> None:
        close = similar_ids(hub_id)
        remedy = "Fetch its config.json from the hub (the button below the name), or paste it."
        remedy = f"Did you mean {' or '.join(close)}? {remedy}" if close else remedy
        super().__init__("not in memcalc's catalogue.", remedy, hub_id)
        self.hub_id = hub_id


class FormRun(BaseModel):
    """A run as the form sends it: the text of each field, empty for the default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str = ""  # a name; unused where `text` is given
    text: str = ""  # a pasted configuration
    gpu: str = ""  # the GPU
    gpus: str = ""  # the number of GPUs
    fields: dict[str, str] = {}  # values by the path of their field in the configuration
    more: str = ""  # "field=value", one per line

    @property
    def gpu_count(self) -> int | None:
        """The number of GPUs; None: the configuration's.

        Raises:
            InputError: the text is not a whole number.
        """
        text = self.gpus.strip()
        if not text:
            return None
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise InputError(f"gpus = {describe(text)} is not a positive whole number.", "Write digits, such as 8.")
        return int(text)


class Request(BaseModel):
    """A request of the page."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["estimate", "fit", "diff"]  # the command
    run: FormRun  # the form's run
    other: FormRun = FormRun()  # run A of a diff; `run` is B
    maximize: str = ""  # the quantity that a fit maximizes; empty: each
    minimize: str = ""  # the quantity that a fit minimizes; empty: none


class RequestedRun(NamedTuple):
    """A run of the form."""

    source: str  # a name, or the path of a file with the pasted text
    overrides: tuple[str, ...]  # as for `--set`
    gpu: str | None  # the GPU; None: none
    text: str = ""  # the pasted configuration; empty for a name

    @property
    def spec(self) -> Spec:
        """The run with every default filled in.

        Raises:
            InputError: the configuration is wrong.
        """
        return load(self.source, *self.overrides, gpu=self.gpu)

    @property
    def shown(self) -> str:
        """The source in a command."""
        return Path(self.source).name if self.text else self.source

    def command(self, verb: str, *more: str) -> str:
        """Return the command with the same result."""
        words = ["memcalc", verb, self.shown, *(("--gpu", self.gpu) if self.gpu else ()), *more]
        return harmless(shlex.join([*words, *(word for override in self.overrides for word in ("--set", override))]))

    def as_yaml(self) -> str:
        """Return the run as a YAML file for `memcalc estimate`.

        Raises:
            InputError: the pasted text is another framework's configuration, which a memcalc YAML cannot contain.
        """
        found = self._source_keys()
        for place, value in parse_overrides(self.overrides).items():
            block = found
            for key in place[:-1]:
                block = block.setdefault(str(key), {})
            block[str(place[-1])] = value
        if self.gpu:
            found.setdefault("hardware", {})["gpu"] = self.gpu
        if not self.text:
            self._add_other_defaults(found)
        return yaml.safe_dump(found, sort_keys=False, allow_unicode=True)

    def _add_other_defaults(self, found: dict[str, Any]) -> None:
        """Add values with different defaults for a hub id on the command line and for one in a YAML."""
        here, there = (spec.model_dump(mode="json") for spec in (self.spec, load(found)))
        for block in ("training", "parallelism"):
            other = {name: value for name, value in here[block].items() if there[block][name] != value}
            if other:
                found.setdefault(block, {}).update(other)

    def _source_keys(self) -> dict[str, Any]:
        if not self.text:
            return {"preset": self.source.removesuffix(".yaml")}
        if self.shown == CONFIG_JSON:
            return {"hf_config": CONFIG_JSON}
        found = yaml.safe_load(self.text)
        if not isinstance(found, dict) or not {"model", "preset", "hf_config"} & set(found):
            raise InputError("this is another framework's configuration.", "Copy the command instead.", "YAML")
        return found


def run_of(form: FormRun) -> RequestedRun:
    """Return the run of the form.

    Raises:
        InputError: the model is missing, or is standard input.
        NotInCatalogue: the model is a hub id that the catalogue lacks.
    """
    name = form.model.strip()
    if not form.text.strip() and name in ("", "-"):
        problem = "'-' means standard input, which a page does not have." if name else "no model is given."
        raise InputError(problem, "Enter a preset or a hub id, or paste a config.json or YAML.", "model")
    if not form.text.strip() and is_hub_id(name) and resolve_offline(name) is None:
        raise NotInCatalogue(name)
    fields = {path: value.strip() for path, value in form.fields.items()}
    overrides = [
        f"{path.rpartition('.')[2] if path.count('.') == 1 else path.partition('.')[2]}={value}"
        for path, value in fields.items()
        if value
    ]
    overrides += [line.strip() for line in form.more.splitlines() if line.strip()]
    gpus = form.gpus.strip()
    if gpus:
        overrides.append(f"parallelism.gpus={gpus}")
    source = _written(form.text) if form.text.strip() else name
    return RequestedRun(source, tuple(overrides), form.gpu or None, form.text)


@cache
def _folder() -> Path:
    """Return the directory for pasted text; in a browser, a file system in memory."""
    folder = Path(tempfile.gettempdir()) / f"memcalc-page-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _written(text: str) -> str:
    """Write pasted text to a file and return its path; text that begins with a brace is JSON."""
    path = _folder() / (CONFIG_JSON if text.lstrip().startswith("{") else CONFIG_YAML)
    write_text(path, text)
    return str(path)


def parsed(request: str) -> Request:
    """Return the request that the page sends as JSON.

    Raises:
        InputError: the request is invalid.
    """
    remedy = "Reload the page."
    if len(request) > _MOST_CHARACTERS:
        raise InputError(
            f"the request has {len(request):,} characters, and the limit is {_MOST_CHARACTERS:,}.",
            "Paste a smaller configuration.",
        )
    try:
        return Request.model_validate(plain_json(request, "the request", remedy))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        rule = _RULES.get(first["type"], f"is not allowed there ({first['msg'].lower()})")
        value = "" if first["type"] == "missing" else f" = {describe(first['input'])}"
        raise InputError(f"{'.'.join(map(str, first['loc'])) or 'the request'}{value} {rule}.", remedy) from None
