"""Words and operators of a shell script. Words keep their quotes, which expansion reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# As in a shell, only these end a word, not other Unicode blanks; a carriage return ends a line of a DOS file.
_BLANKS = " \t\r"
_PLAIN = re.compile(r"[^ \t\r\n;&|<>()'\"\\$`]+")
_OPERATOR = re.compile(r"\n|;;&?|;&|;|&&|&>>|&>|&|\|\||\|&|\||<<<|<<-|<<|<&|<|>>|>&|>\||>|\(|\)")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_BEFORE_SUMS = ("if", "elif", "while", "until", "for", "!")
_DEEPEST = 50  # depth of nested quotes and substitutions
REDIRECTIONS = ("<", ">", ">>", "<<", "<<-", "<<<", "&>", "&>>", ">&", "<&", ">|")


class ShellError(ValueError):
    """The text is not a shell script that memcalc can parse."""


class Token(NamedTuple):
    """A word or an operator; `body` is the text of a here-document."""

    text: str
    operator: bool = False
    body: str = ""


def tokens(text: str) -> list[Token]:
    """Return the tokens of a script.

    Raises:
        ShellError: a quotation mark or bracket is open at the end.
    """
    found: list[Token] = []
    waiting: list[int] = []  # here-documents that begin after this line
    at = 0
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at):
            at += 2
        elif char in _BLANKS:
            at += 1
        elif char == "#":
            at = _end_of_line(text, at)
        elif text.startswith("((", at) and (not found or found[-1].operator or found[-1].text in _BEFORE_SUMS):
            end = skip(text, at)
            found.append(Token(text[at:end]))
            at = end
        elif text.startswith((">(", "<("), at):  # process substitution
            end = skip(text, at + 1)
            found.append(Token(text[at:end]))
            at = end
        elif operator := _OPERATOR.match(text, at):
            at = operator.end()
            if operator[0] in ("<<", "<<-"):
                waiting.append(len(found))
            found.append(Token(operator[0], operator=True))
            if operator[0] == "\n" and waiting:
                for place in waiting:
                    at = _here(text, at, found, place)
                waiting.clear()
        else:
            end = word_end(text, at)
            found.append(Token(text[at:end]))
            at = end
    return found


def word_end(text: str, at: int) -> int:
    """Return the end of the word that begins here."""
    start = at
    while at < len(text):
        plain = _PLAIN.match(text, at)
        if plain:
            at = plain.end()
        elif text[at] in "'\"$`\\" or (text[at] == "(" and _ARRAY.match(text[start:at])):
            at = skip(text, at)
        else:
            break
    return at


def skip(text: str, at: int, depth: int = 0) -> int:
    """Return the position after a quotation, substitution, bracket, escaped character, or single character.

    Raises:
        ShellError: the end is missing.
    """
    if depth > _DEEPEST:
        raise ShellError("too deep")
    char = text[at]
    if char == "\\":
        return min(at + 2, len(text))
    if char == "'":
        return _found(text, "'", at + 1)
    if char == "`":
        return _found(text, "`", at + 1)
    if char == '"':
        return _until(text, at + 1, '"', "\\$`", depth)
    if text.startswith("${", at):
        return _until(text, at + 2, "}", "\\'\"$`", depth)
    if text.startswith("$(", at):
        return _until(text, at + 2, ")", "\\'\"$`(#", depth)
    if char == "(":
        return _until(text, at + 1, ")", "\\'\"$`(#", depth)
    return at + 1


def _until(text: str, at: int, end: str, special: str, depth: int) -> int:
    while at < len(text):
        if text[at] == end:
            return at + 1
        if text[at] == "#" and "#" in special:
            at = _end_of_line(text, at) if text[at - 1].isspace() else at + 1
        elif text[at] in special:
            at = skip(text, at, depth + 1)
        else:
            at += 1
    raise ShellError(f"no {end}")


def _found(text: str, end: str, at: int) -> int:
    place = text.find(end, at)
    if place < 0:
        raise ShellError(f"no {end}")
    return place + 1


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _here(text: str, at: int, found: list[Token], place: int) -> int:
    """Store a here-document's text in its operator; return the position of the line after it."""
    if place + 1 >= len(found):
        raise ShellError("no name of a here-document")
    name = found[place + 1].text
    bare = name.strip("'\"\\")
    body: list[str] = []
    while at < len(text):
        end = _end_of_line(text, at)
        line, at = text[at:end], min(end + 1, len(text))
        if (line.lstrip("\t") if found[place].text == "<<-" else line).rstrip("\r") == bare:
            break
        body.append(line)
    found[place] = Token(found[place].text, True, "\n".join(body))
    return at


def words_within(text: str) -> Iterator[str]:
    """Yield the words between an array's brackets."""
    return (token.text for token in tokens(text) if not token.operator)
