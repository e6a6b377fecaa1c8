"""Traverse a script's commands, and record those that it would run.

If the text determines a condition, only one branch is traversed. Otherwise every branch is, and a variable to which
they assign different values becomes a mark with these choices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from memcalc.importers.shell.conditions import all_of, any_of, decided
from memcalc.importers.shell.expansion import Expander
from memcalc.importers.shell.marks import MarkTable, Value, is_open, without_marks
from memcalc.importers.shell.syntax import (
    CaseStatement,
    CommandList,
    IfStatement,
    LoopStatement,
    NegatedCommand,
    Node,
    Pair,
    SimpleCommand,
    parse,
)
from memcalc.importers.shell.tokens import ShellError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[\w+\])?(\+?)=(.*)", re.DOTALL)
_DECLARING = ("export", "readonly", "declare", "local", "typeset")
_SILENT = ("echo", "printf", "cat", "tee", "mkdir", "cd", "set", "shift", "read", "trap", "source", ".", "logger")
_OPTIONS_OF_ITS_OWN = re.compile(r"\$[#@*1]|\bgetopts?\b")
_SHELLS = ("bash", "sh", "zsh")
_COMMAND = re.compile(r"-[a-z]*c")
_NODES = re.compile(r"^#SBATCH\s+(?:--nodes[= ]|-N\s*)(\d+)", re.MULTILINE)
_SLURMS = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_MOST_COMMANDS = 5_000
_DEEPEST = 100  # depth of nested commands


class _Exit(Exception):
    """`exit`."""


class _Return(_Exit):
    """`return` from a function."""


@dataclass
class Script:
    """The commands that a text would run.

    Args:
        marks: marks of unknown values in the words.
        commands: the words of each command, except commands that only print or set options.
        variables: the values at the end, in the order of first assignment.
        documents: the here-documents of commands that only print, such as `cat > FILE`.
        environments: for each command the variables that were asked for, as they are when it starts.
    """

    marks: MarkTable = field(default_factory=MarkTable)
    commands: list[tuple[str, ...]] = field(default_factory=list)
    variables: dict[str, Value] = field(default_factory=dict)
    documents: list[str] = field(default_factory=list)
    environments: list[dict[str, Value]] = field(default_factory=list)

    def json_documents(self) -> list[dict[str, Any]]:
        """Return the here-documents that are JSON objects. Unknown values in them are null."""
        found = []
        for document in self.documents:
            with suppress(ValueError, RecursionError):
                found.append(json.loads(self.marks.replaced(document, "null")))
        return [each for each in found if isinstance(each, dict)]


def read_script(text: str, runs: Callable[[str], bool], environment: Sequence[str] = ()) -> Script:
    """Return the commands that a script would run. The directives of a Slurm script set its number of nodes.

    Args:
        text: the script.
        runs: function that returns whether a word is a command line (`bash -c "..."`, `eval`) to be parsed as well.
        environment: names of variables to record for each command.

    Raises:
        ShellError: the text is not a shell script that memcalc can parse.
    """
    walk = _Interpreter(runs, environment)
    nodes = _NODES.search(text)
    if nodes:
        walk.script.variables = dict.fromkeys(_SLURMS, nodes[1])
    with suppress(_Exit):
        walk.block(parse(without_marks(text).replace("\r\n", "\n")))
    return walk.script


class _Interpreter:
    def __init__(self, runs: Callable[[str], bool], environment: Sequence[str]) -> None:
        self.script = Script()
        self.runs = runs
        self.environment = environment
        self.functions: dict[str, Node] = {}
        self.steps = 0
        self.depth = 0

    @property
    def expander(self) -> Expander:
        return Expander(self.script.variables, self.script.marks)

    def block(self, block: CommandList) -> bool | None:
        before = dict(self.script.variables)
        status: bool | None = True
        for node in block.nodes:
            status = self.node(node)
        if block.apart:
            self.script.variables = before
        return status

    def node(self, node: Node) -> bool | None:
        """Traverse a command; return whether it succeeds, None if unknown."""
        self.steps += 1
        self.depth += 1
        if self.steps > _MOST_COMMANDS or self.depth > _DEEPEST:
            raise ShellError("too long")
        try:
            return self._node(node)
        finally:
            self.depth -= 1

    def _node(self, node: Node) -> bool | None:
        if isinstance(node, SimpleCommand):
            return self.simple(node)
        if isinstance(node, Pair):
            return self.pair(node)
        if isinstance(node, NegatedCommand):
            status = self.node(node.node)
            return None if status is None else not status
        if isinstance(node, CommandList):
            return self.block(node)
        if isinstance(node, IfStatement):
            return self.conditional(list(node.branches), node.otherwise)
        if isinstance(node, CaseStatement):
            return self.case(node)
        if isinstance(node, LoopStatement):
            return self.loop(node)
        self.functions[node.name] = node.body
        return True

    def pair(self, node: Pair) -> bool | None:
        left = self.node(node.left)
        if node.joint == "|":
            return self.node(node.right)
        if left is None and not _is_test(node.left):
            left = True  # a program is assumed to succeed
        if left is None:
            return self.either([lambda: self.node(node.right), lambda: None])
        if left is (node.joint == "&&"):
            right = self.node(node.right)
            return all_of(left, right) if node.joint == "&&" else any_of(left, right)
        return left

    def conditional(self, branches: list[tuple[CommandList, CommandList]], otherwise: CommandList) -> bool | None:
        if not branches:
            return self.block(otherwise)
        condition, body = branches[0]
        holds = self.block(condition)
        if holds is True:
            return self.block(body)
        if holds is False:
            return self.conditional(branches[1:], otherwise)
        return self.either([lambda: self.block(body), lambda: self.conditional(branches[1:], otherwise)])

    def case(self, node: CaseStatement) -> bool | None:
        subject = self.expander.text(node.word)
        possible: list[CommandList] = []
        for patterns, body in node.branches:
            found = [decided([subject, "==", self.expander.text(each)], patterns=True) for each in patterns]
            if any(each is None for each in found) or any(found):
                possible.append(body)
            if any(found) or "*" in patterns:
                break
        else:
            possible.append(CommandList(()))
        return self.either([lambda body=body: self.block(body) for body in possible])  # type: ignore[misc]

    def loop(self, node: LoopStatement) -> bool | None:
        """Run the body of a loop once; a loop over the script's own options is assumed to find none."""
        if node.name:
            self.script.variables[node.name] = self.script.marks.mark(f"${node.name}")
            return self.block(node.body)
        if _OPTIONS_OF_ITS_OWN.search(_words_of(node.condition)):
            return True
        holds = self.block(node.condition)
        if holds is False:
            return True
        return self.either([lambda: self.block(node.body), lambda: None])

    def either(self, ways: Sequence[Callable[[], bool | None]]) -> bool | None:
        """Run several alternatives from the current state; values that differ between them become unknown."""
        if len(ways) == 1:
            return ways[0]()
        before = self.script.variables
        ends: list[dict[str, Value]] = []
        for way in ways:
            self.script.variables = dict(before)
            try:
                way()
            except _Exit:
                continue
            ends.append(self.script.variables)
        if not ends:
            self.script.variables = before
            raise _Exit
        names = dict.fromkeys(name for each in ends for name in each)
        self.script.variables = {
            name: self._joined(name, [each[name] if name in each else self._unset(name) for each in ends])
            for name in names
        }
        return None

    def _unset(self, name: str) -> Value:
        return self.script.marks.mark(f"${name}")

    def _joined(self, name: str, values: list[Value]) -> Value:
        if all(value == values[0] for value in values):
            return values[0]
        arrays = [value for value in values if isinstance(value, tuple)]
        if len(arrays) != len(values):
            return self.script.marks.mark(f"${name}", values)
        same = 0
        while all(len(each) > same and each[same] == arrays[0][same] for each in arrays):
            same += 1
        rest = self.script.marks.mark(f"${{{name}[@]}}", [each[same:] for each in arrays])
        return (*arrays[0][:same], rest)

    def simple(self, node: SimpleCommand) -> bool | None:
        words = list(node.words)
        if words[:1] == ["[["]:
            return decided([self.expander.text(word) for word in words[1:-1]], patterns=True)
        if words and words[0].startswith("(("):
            value = self.expander.text(f"${words[0]}")
            return None if is_open(value) else value != "0"
        while words and (match := _ASSIGNED.match(words[0])):
            self.assign(match)
            words.pop(0)
        if not words and not node.bodies:
            return True
        if words and words[0] in _DECLARING:
            for word in words[1:]:
                match = _ASSIGNED.match(word)
                if match:
                    self.assign(match)
            return True
        found = [part for word in words for part in self.expander.words(word)]
        return self.command(found, [self.expander.here(body) for body in node.bodies])

    def assign(self, match: re.Match[str]) -> None:
        name, more, raw = match.groups()
        before = self.script.variables.get(name)
        value: Value
        if raw.startswith("(") and raw.endswith(")"):
            value = self.expander.array(raw[1:-1])
            if more and before is not None:
                value = (*((before,) if isinstance(before, str) else before), *value)
        else:
            value = self.expander.text(raw)
            if more and isinstance(before, str):
                value = before + value
        self.script.variables[name] = value

    def command(self, words: list[str], bodies: list[str]) -> bool | None:
        name = words[0] if words else ""
        if name in ("[", "test"):
            return decided(words[1:-1] if name == "[" else words[1:], patterns=False)
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("exit", "return"):
            raise _Exit if name == "exit" else _Return
        if name == "unset":
            for each in words[1:]:
                self.script.variables[each] = ""
            return True
        if name == "let":
            return None
        if name in self.functions:
            return self.call(self.functions[name], words[1:])
        if name in _SILENT:
            self.script.documents += bodies
            return None
        lines = [" ".join(words[1:])] if name == "eval" else [*self.lines_of(words), *bodies]
        if lines:
            for line in lines:
                self.line(line)
        else:
            variables = self.script.variables
            self.script.commands.append(tuple(words))
            self.script.environments.append({name: variables[name] for name in self.environment if name in variables})
        return None

    def lines_of(self, words: list[str]) -> list[str]:
        """Return the words that are command lines: a shell's argument, or words with a program and its arguments."""
        shell = next((place for place, word in enumerate(words) if word.rpartition("/")[2] in _SHELLS), None)
        if shell is not None:
            for place in range(shell + 1, len(words) - 1):
                if _COMMAND.fullmatch(words[place]):
                    return [words[place + 1]]
        return [word for word in words if self.runs(word)]

    def line(self, text: str) -> None:
        """Run a command line that is within a word."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ShellError("too deep")
        try:
            self.block(parse(text))
        except _Exit:
            pass
        finally:
            self.depth -= 1

    def call(self, body: Node, words: list[str]) -> bool | None:
        outer = {name: self.script.variables.get(name) for name in map(str, range(1, 10))}
        for number in range(1, 10):
            self.script.variables[str(number)] = words[number - 1] if number <= len(words) else ""
        try:
            return self.node(body)
        except _Return:
            return None
        finally:
            for name, value in outer.items():
                if value is None:
                    self.script.variables.pop(name, None)
                else:
                    self.script.variables[name] = value


def _is_test(node: Node) -> bool:
    """Return whether a command only tests a condition."""
    if isinstance(node, Pair):
        return _is_test(node.left)
    if isinstance(node, NegatedCommand):
        return _is_test(node.node)
    first = node.words[0] if isinstance(node, SimpleCommand) and node.words else ""
    return first in ("[", "[[", "test") or first.startswith("((")


def _words_of(node: Node) -> str:
    if isinstance(node, SimpleCommand):
        return " ".join(node.words)
    if isinstance(node, Pair):
        return f"{_words_of(node.left)} {_words_of(node.right)}"
    return " ".join(map(_words_of, node.nodes)) if isinstance(node, CommandList) else ""
