"""A script's commands: simple ones, lists, conditionals, loops, functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memcalc.importers.shell.tokens import REDIRECTIONS, ShellError, Token, tokens

_NAME = re.compile(r"[\w.-]+")
_DEEPEST = 60  # depth of nested commands


@dataclass(frozen=True)
class SimpleCommand:
    """One command: its words, unexpanded, and the here-documents that it reads."""

    words: tuple[str, ...]
    bodies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two commands, the second on the first's success (`&&`), on its failure (`||`), or on its output (`|`)."""

    left: Node
    joint: str
    right: Node


@dataclass(frozen=True)
class NegatedCommand:
    """`! command`."""

    node: Node


@dataclass(frozen=True)
class CommandList:
    """Commands in their order; `apart`: in a subshell."""

    nodes: tuple[Node, ...]
    apart: bool = False


@dataclass(frozen=True)
class IfStatement:
    """Conditions with the commands of each branch, and those of `else`."""

    branches: tuple[tuple[CommandList, CommandList], ...]
    otherwise: CommandList


@dataclass(frozen=True)
class CaseStatement:
    """A word, and patterns with their commands."""

    word: str
    branches: tuple[tuple[tuple[str, ...], CommandList], ...]


@dataclass(frozen=True)
class LoopStatement:
    """`for` over words, or `while` and `until` with a condition."""

    name: str
    condition: CommandList
    body: CommandList


@dataclass(frozen=True)
class FunctionDefinition:
    """A function's body under its name."""

    name: str
    body: Node


Node = (
    SimpleCommand
    | Pair
    | NegatedCommand
    | CommandList
    | IfStatement
    | CaseStatement
    | LoopStatement
    | FunctionDefinition
)


def parse(text: str) -> CommandList:
    """Return the commands of a text.

    Raises:
        ShellError: the text is not a shell script that memcalc can parse.
    """
    return _Parser(tokens(text)).block(())


class _Parser:
    def __init__(self, found: list[Token]) -> None:
        self.tokens = found
        self.at = 0
        self.depth = 0

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> Token:
        if self.at >= len(self.tokens):
            raise ShellError("ends early")
        self.at += 1
        return self.tokens[self.at - 1]

    def sees(self, *texts: str) -> bool:
        token = self.peek()
        return token is not None and token.text in texts

    def expect(self, text: str) -> None:
        self.pass_newlines()
        if self.take().text != text:
            raise ShellError(f"no {text}")

    def pass_newlines(self) -> None:
        while self.sees("\n"):
            self.at += 1

    def block(self, ends: tuple[str, ...]) -> CommandList:
        """Return the commands up to one of these words, or to the end of the text."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ShellError("too deep")
        found: list[Node] = []
        while (token := self.peek()) is not None and token.text not in ends:
            if token.operator and token.text in ("\n", ";", "&"):
                self.at += 1
            else:
                found.append(self.pairs())
        self.depth -= 1
        return CommandList(tuple(found))

    def pairs(self) -> Node:
        left = self.pipes()
        while self.sees("&&", "||"):
            joint = self.take().text
            self.pass_newlines()
            left = Pair(left, joint, self.pipes())
        return left

    def pipes(self) -> Node:
        if self.sees("!"):
            self.at += 1
            return NegatedCommand(self.pipes())
        left = self.command()
        while self.sees("|", "|&"):
            self.at += 1
            self.pass_newlines()
            left = Pair(left, "|", self.command())
        return left

    def command(self) -> Node:
        token = self.peek()
        if token is None:
            raise ShellError("ends early")
        compound = {
            "if": self.conditional,
            "case": self.case,
            "for": self.loop,
            "select": self.loop,
            "while": self.loop,
            "until": self.loop,
            "function": self.function,
            "{": self.group,
            "(": self.group,
        }.get(token.text)
        if compound is None:
            return self.simple()
        node = compound()
        self.redirections()
        return node

    def conditional(self) -> Node:
        branches = []
        while self.take().text in ("if", "elif"):
            condition = self.block(("then",))
            self.expect("then")
            branches.append((condition, self.block(("elif", "else", "fi"))))
            if self.sees("else", "fi"):
                break
        otherwise = CommandList(())
        if self.sees("else"):
            self.at += 1
            otherwise = self.block(("fi",))
        self.expect("fi")
        return IfStatement(tuple(branches), otherwise)

    def case(self) -> Node:
        self.take()
        word = self.take().text
        self.expect("in")
        branches = []
        self.pass_newlines()
        while not self.sees("esac"):
            if self.sees("("):
                self.at += 1
            patterns = []
            while not self.sees(")"):
                token = self.take()
                if not token.operator:
                    patterns.append(token.text)
            self.take()
            branches.append((tuple(patterns), self.block((";;", ";&", ";;&", "esac"))))
            if self.sees(";;", ";&", ";;&"):
                self.at += 1
            self.pass_newlines()
        self.take()
        return CaseStatement(word, tuple(branches))

    def loop(self) -> Node:
        name = ""
        if self.take().text in ("for", "select"):
            name = self.take().text
            while not self.sees("do"):  # the words are not iterated
                self.take()
        condition = self.block(("do",))
        self.expect("do")
        body = self.block(("done",))
        self.expect("done")
        return LoopStatement(name, condition, body)

    def function(self) -> Node:
        self.take()
        name = self.take().text
        if self.sees("("):
            self.take()
            self.expect(")")
        self.pass_newlines()
        return FunctionDefinition(name, self.command())

    def group(self) -> Node:
        opened = self.take().text
        end = "}" if opened == "{" else ")"
        block = self.block((end,))
        self.expect(end)
        return CommandList(block.nodes, apart=opened == "(")

    def simple(self) -> Node:
        words: list[str] = []
        bodies: list[str] = []
        while (token := self.peek()) is not None:
            if (words and words[0] == "[[" and words[-1] != "]]") or not token.operator:
                words.append(self.take().text)
            elif token.text in REDIRECTIONS:
                if words and words[-1].isdigit():  # 2>&1
                    words.pop()
                bodies += self.redirections()
            elif token.text == "(" and len(words) == 1 and _NAME.fullmatch(words[0]):
                self.take()
                self.expect(")")
                self.pass_newlines()
                return FunctionDefinition(words[0], self.command())
            else:
                break
        if not words and not bodies:
            raise ShellError("no command")
        return SimpleCommand(tuple(words), tuple(bodies))

    def redirections(self) -> list[str]:
        bodies = []
        while (token := self.peek()) is not None and token.operator and token.text in REDIRECTIONS:
            self.at += 1
            name = self.take().text
            if token.text in ("<<", "<<-"):
                bodies.append(token.body if name[:1] not in "'\"\\" else token.body.replace("$", "\\$"))
            elif token.text == "<<<":
                bodies.append(name)
        return bodies
