"""What the form asks for: a run in the words of the command line, and the same run as a command and as YAML."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from memcalc.api.sources import load
from memcalc.errors import InputError
from memcalc.files import write_text
from memcalc.spec.overrides import parse_overrides
from memcalc.spec.spec import Spec

CONFIG_JSON, CONFIG_YAML = "config.json", "config.yaml"  # what pasted text is called, by its first letter


class Run(NamedTuple):
    """A run of the form.

    Args:
        source: a name, or the path of the file that pasted text was written to.
        overrides: as --set takes them.
        gpu: the GPU; None: none.
        text: the pasted configuration; empty for a name.
    """

    source: str
    overrides: tuple[str, ...]
    gpu: str | None
    text: str = ""

    @property
    def spec(self) -> Spec:
        """The run with every default filled in.

        Raises:
            InputError: the configuration is wrong.
        """
        return load(self.source, *self.overrides, gpu=self.gpu)

    @property
    def shown(self) -> str:
        """The source as a command names it."""
        return Path(self.source).name if self.text else self.source

    def command(self, verb: str, *more: str) -> str:
        """The command line that gives the same result."""
        words = ["memcalc", verb, self.shown, *(("--gpu", self.gpu) if self.gpu else ()), *more]
        return shlex.join([*words, *(word for override in self.overrides for word in ("--set", override))])

    def as_yaml(self) -> str:
        """The run as a YAML file that `memcalc estimate` reads.

        Raises:
            InputError: the pasted text is another framework's configuration, which has no place in a YAML of memcalc.
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
        """Write out where a hub id on the command line has other defaults than one in a YAML."""
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


def run_of(asked: Mapping[str, Any]) -> Run:
    """The run that the form asks for.

    Args:
        asked: `model` (a name) or `text` (a pasted configuration), `gpu`, `gpus`, `fields` by their path, and `more`,
            which has one "field=value" on each line.

    Raises:
        InputError: nothing is named.
    """
    text, name = str(asked.get("text") or ""), str(asked.get("model") or "").strip()
    if not text.strip() and not name:
        raise InputError("no model is named.", "Choose one, or paste a config.json or a YAML.", "model")
    fields = {path: str(value).strip() for path, value in (asked.get("fields") or {}).items()}
    overrides = [
        f"{path.rpartition('.')[2] if path.count('.') == 1 else path.partition('.')[2]}={value}"
        for path, value in fields.items()
        if value
    ]
    overrides += [line.strip() for line in str(asked.get("more") or "").splitlines() if line.strip()]
    gpus = str(asked.get("gpus") or "").strip()
    if gpus:
        overrides.append(f"parallelism.gpus={gpus}")
    source = _written(text) if text.strip() else name
    return Run(source, tuple(overrides), str(asked.get("gpu") or "") or None, text)


@cache
def _folder() -> Path:
    """Of the browser's own file system, which goes with the page."""
    folder = Path(tempfile.gettempdir()) / f"memcalc-page-{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _written(text: str) -> str:
    """The path of a file with this text, which is JSON if it begins with a brace."""
    path = _folder() / (CONFIG_JSON if text.lstrip().startswith("{") else CONFIG_YAML)
    write_text(path, text)
    return str(path)


def parsed(request: str) -> dict[str, Any]:
    """The request as the page sends it."""
    found: dict[str, Any] = json.loads(request)
    return found
