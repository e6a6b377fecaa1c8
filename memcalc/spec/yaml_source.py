"""Strict YAML: one document of plain mappings, lists and scalars, with the line of every key.

Rejected with a message, without a traceback or a hang: duplicate keys, language-specific tags, non-finite numbers,
dates, keys that are not strings, files or nestings larger than any configuration, and excessive alias expansion.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from memcalc.errors import InputError

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser is about ten times faster

# Limits far above any real configuration; they bound the time and memory of a malicious file.
MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 20_000

# YAML 1.1 also reads 010 as 8, 0x10 as 16 and 1:30 as 90, which users do not intend, and 1e-2 as a string, which JSON
# and YAML 1.2 read as a number.
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)?(\.[0-9_]*)?([eE][-+]?[0-9]+)?")
_SCIENTIFIC = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")

_CHECK = "Check indentation, quotes and colons there."
_MERGE = "tag:yaml.org,2002:merge"
_SURROGATE = re.compile("[\ud800-\udfff]")
_TEMPLATE = re.compile(r"\{\{|\{%|<%")

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlSource:
    """A parsed file: its data, its name in messages, the line of each key, and errors of its keys."""

    data: Any
    label: str
    lines: dict[Path, int] = field(default_factory=dict)
    overridden: dict[Path, str] = field(default_factory=dict)  # keys given outside the file, and how
    faults: list[InputError] = field(default_factory=list)  # found while keys were read; the loader raises them

    def states(self, path: Path) -> bool:
        """Return whether the user has given this key: in the file, or outside it."""
        return path in self.lines or path in self.overridden

    def where(self, path: Path) -> str:
        """Return the place of a key as precisely as it is known, such as "gpt3.yaml:12: model.num_layers"."""
        key = ".".join(str(part) for part in path)
        given = next(
            (self.overridden[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.overridden), ""
        )
        if given:
            return f"{given}: {key}"
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        place = f"{self.label}:{self.lines[known]}" if known in self.lines else self.label
        return f"{place}: {key}" if key else place


def parse_yaml(text: str, label: str) -> YamlSource:
    """Return the plain data of `text`, with the lines of its keys.

    Raises:
        InputError: see the module's docstring; the message has line, value, rule and remedy.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"the file has {len(text):,} characters; a configuration has at most {MAX_CHARACTERS:,}.",
            "Name the configuration file itself.",
            label,
        )
    if _SURROGATE.search(text) is not None:  # in an argument; files are decoded earlier
        raise InputError("some bytes are not UTF-8 text.", "Write it in UTF-8.", label)
    try:
        _check_events(text, label)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _syntax_error(error, label, text) from None
    source = YamlSource(None, label)
    if node is None:
        return source
    budget = [MAX_NODES]
    return YamlSource(_construct(node, (), source, budget), label, source.lines)


def is_yaml(text: str) -> bool:
    """Return whether the text is syntactically valid YAML."""
    try:
        for _ in yaml.parse(text, Loader=_Loader):
            pass
    except yaml.YAMLError:
        return False
    return True


def is_template(text: str) -> bool:
    """Return whether the text has template marks: {{ and {% of Go and Jinja, <% of ERB."""
    return _TEMPLATE.search(text) is not None


def _check_events(text: str, label: str) -> None:
    """Check depth and number of nodes before any recursion over the text."""
    depth = 0
    documents = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        if depth > MAX_DEPTH or count > 4 * MAX_NODES or documents > 1:
            line = event.start_mark.line + 1 if event.start_mark is not None else 1
            rule = (
                "the file holds more than one document (a line of ---)"
                if documents > 1
                else f"the file nests or repeats beyond {MAX_DEPTH} levels or {MAX_NODES:,} values"
            )
            raise InputError(
                f"{rule}.",
                "Keep one document per file."
                if documents > 1
                else "Remove the parts that a configuration does not need.",
                f"{label}:{line}",
            )


def _construct(node: yaml.Node, path: Path, source: YamlSource, budget: list[int]) -> Any:
    budget[0] -= 1
    line = node.start_mark.line + 1
    if budget[0] < 0:
        raise InputError(
            f"the aliases in this file expand to more than {MAX_NODES:,} values.",
            "Write the values out instead of nesting aliases.",
            f"{source.label}:{line}",
        )
    if len(path) > MAX_DEPTH:
        raise InputError(
            f"an alias refers to itself, or aliases nest beyond {MAX_DEPTH} levels.",
            "Write the value out.",
            f"{source.label}:{line}",
        )
    source.lines.setdefault(path, line)
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _mapping(node, path, source, budget)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_construct(child, (*path, index), source, budget) for index, child in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, source)
    raise _tag_error(node, path, source)


def _mapping(node: yaml.MappingNode, path: Path, source: YamlSource, budget: list[int]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    merged = _merged(node, path, source, budget)
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        place = ": ".join(filter(None, (f"{source.label}:{line}", _dotted(path))))
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError("a key must be a word.", _template_remedy(key_node) or "Write `name: value` lines.", place)
        if key_node.tag == _MERGE:
            continue
        key = key_node.value
        child = (*path, key)
        if key in result:
            raise InputError(
                f"the key {key!r} is repeated, first on line {source.lines[child]}.",
                "Keep one of the two.",
                f"{source.label}:{line}: {_dotted(child)}",
            )
        source.lines[child] = line
        result[key] = _construct(value_node, child, source, budget)
    return merged | result if merged else result


def _merged(node: yaml.MappingNode, path: Path, source: YamlSource, budget: list[int]) -> dict[str, Any]:
    """Return the values of merge keys (`<<: *base`); the mapping's own keys override them, earlier mappings win.

    Raises:
        InputError: a merged value is not a mapping, or merges itself.
    """
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag != _MERGE:
            continue
        place = (*path, key_node.value)
        several = isinstance(value_node, yaml.SequenceNode)
        for each in value_node.value if several else [value_node]:
            found = _construct(each, place, source, budget)
            if not isinstance(found, dict):
                where = ": ".join(filter(None, (f"{source.label}:{key_node.start_mark.line + 1}", _dotted(path))))
                raise InputError("a merge key (<<) takes mappings.", "Name the anchor of one.", where)
            for key in found.keys() - result.keys():
                source.lines[*path, key] = source.lines[*place, key]
            result = found | result
    return result


def _scalar(node: yaml.ScalarNode, path: Path, source: YamlSource) -> Any:
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in ("null", "bool", "int", "float", "str"):
        raise _tag_error(node, path, source)
    number = kind in ("int", "float") and not node.value.lower().endswith((".nan", ".inf"))
    if number and not _DECIMAL.fullmatch(node.value):
        raise InputError(
            f"{_shorten(node.value)} is not decimal: YAML reads it in another base.",
            "Write a plain number.",
            source.where(path),
        )
    try:
        scientific = kind == "str" and not node.style and _SCIENTIFIC.fullmatch(node.value)
        value = float(node.value) if scientific else yaml.constructor.SafeConstructor().construct_object(node)
    except (LookupError, ValueError, yaml.YAMLError):
        raise InputError(
            f"{_shorten(node.value)} cannot be read as {kind}.",
            "Write a plain value without a tag.",
            source.where(path),
        ) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{node.value} is not a finite number.", "Write a plain number.", source.where(path))
    return value


def _tag_error(node: yaml.Node, path: Path, source: YamlSource) -> InputError:
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    return InputError(
        f"{_shorten(tag)!r} is not a type of value that a configuration has.",
        "Use plain mappings, lists, numbers, words, true and false.",
        source.where(path),
    )


def _syntax_error(error: yaml.YAMLError, label: str, text: str) -> InputError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "the text cannot be parsed"
    place = f"{label}:{mark.line + 1}" if mark is not None else label
    language = "JSON" if label.endswith(".json") else "YAML"
    remedy = "Check commas, quotes and brackets there." if language == "JSON" else _CHECK
    if is_template(text):
        remedy = "Render the template first, and name the result."
    return InputError(f"this is not {language}: {problem}.", remedy, place)


def _template_remedy(key: yaml.Node) -> str:
    """Return the remedy for "{{ name }}", which YAML reads as a mapping with a mapping as its key; "": no template."""
    bare = isinstance(key, yaml.MappingNode) and all(getattr(value, "value", None) == "" for _, value in key.value)
    return "Render the template first, and name the result." if bare else ""


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
