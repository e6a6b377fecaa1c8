"""Expansion of words: variables, substitutions and quotes."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

from memcalc.importers.shell.arithmetic import computed
from memcalc.importers.shell.marks import MarkTable, Value, is_open
from memcalc.importers.shell.tokens import ShellError, skip, words_within

_NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])")
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_LONGEST = 400_000  # characters of one value
_DEEPEST = 20  # depth of nested values


class Expander:
    """Expander of words.

    Args:
        variables: the script's variables so far; `${X:=y}` assigns to them.
        marks: marks of unknown values.
    """

    def __init__(self, variables: MutableMapping[str, Value], marks: MarkTable) -> None:
        self.variables = variables
        self.marks = marks
        self._depth = 0

    def words(self, raw: str) -> list[str]:
        """Return the words that a word expands to: unquoted values are split."""
        fields: list[str] = []
        current: list[str] = []
        quoted = False
        for text, splits, ends in self._parts(raw):
            if not splits:
                current.append(text)
                quoted = True
                if ends:  # an element of "${ARRAY[@]}"
                    fields.append("".join(current))
                    current, quoted = [], False
                continue
            if text[:1].isspace() and (current or quoted):
                fields.append("".join(current))
                current, quoted = [], False
            pieces = text.split()
            for place, piece in enumerate(pieces):
                current.append(piece)
                if place < len(pieces) - 1 or text[-1:].isspace():
                    fields.append("".join(current))
                    current, quoted = [], False
        if quoted or "".join(current):
            fields.append("".join(current))
        return fields

    def text(self, raw: str) -> str:
        """Return the single string that a word expands to, in an assignment, in `[[ ]]` or in a here-document."""
        found = "".join(text + (" " if ends else "") for text, _, ends in self._parts(raw))
        if len(found) > _LONGEST:
            raise ShellError("too long")
        return found

    def array(self, raw: str) -> tuple[str, ...]:
        """Return the words between an array's brackets."""
        found = tuple(word for each in words_within(raw) for word in self.words(each))
        if sum(map(len, found)) > _LONGEST:
            raise ShellError("too long")
        return found

    def here(self, body: str) -> str:
        """Return the text of a here-document, in which quotation marks are ordinary characters."""
        return self.text('"' + re.sub(r'(?<!\\)"', '\\"', body) + '"')

    def _parts(self, raw: str, *, within: bool = False) -> list[tuple[str, bool, bool]]:
        """Yield parts of a word, each with whether it is split into words, and whether a word ends after it."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ShellError("too deep")
        found: list[tuple[str, bool, bool]] = []
        at = 0
        while at < len(raw):
            char = raw[at]
            if char in ("$", "`"):
                name = _NAME.match(raw, at)
                end = name.end() if name else skip(raw, at)
                found += self._value(raw[at:end], within)
            elif char == "\\":
                end = min(at + 2, len(raw))
                kept = raw[at:end] if within and raw[at + 1 : end] not in '$`"\\\n' else raw[at + 1 : end]
                found.append((kept.replace("\n", ""), False, False))
            elif char == "'" and not within:
                end = skip(raw, at)
                found.append((raw[at + 1 : end - 1], False, False))
            elif char == '"' and not within:
                end = skip(raw, at)
                inner = self._parts(raw[at + 1 : end - 1], within=True)
                if not inner and raw[at + 1 : end - 1] == "":
                    found.append(("", False, False))
                found += inner
            else:
                plain = re.compile(r"[^$`\\]+" if within else r"[^$`\\'\"]+").match(raw, at)
                end = plain.end() if plain else at + 1
                found.append((raw[at:end], False, False))
            at = end
        self._depth -= 1
        return found

    def _value(self, raw: str, within: bool) -> list[tuple[str, bool, bool]]:
        """Return the expansion of `$X`, `${X:-y}`, `$(( ))`, `$( )` or a command in backquotes."""
        value: Value
        each = False
        if raw.startswith("$((") and raw.endswith("))"):
            value = self._sum(raw[3:-2])
        elif raw.startswith("`") and raw[1:].lstrip().startswith("#") and "\n" not in raw:
            value = ""  # a comment between the options of a command
        elif raw.startswith(("$(", "`")):
            value = self.marks.mark(" ".join(raw.split()))
        elif raw.startswith("${"):
            match = _BRACED.fullmatch(raw[2:-1])
            if match is None:
                return [(self.marks.mark(raw), not within, False)]
            value, each = self._braced(match, raw), match[2] == "[@]"
        elif raw == "$":
            value = raw
        else:
            value = self.read(raw[1:])
            if not isinstance(value, str):
                value = value[0] if value else ""
        if isinstance(value, tuple):
            if within and not each:
                return [(" ".join(value), False, False)]
            last = len(value) - 1
            if within:
                return [(word, False, place < last) for place, word in enumerate(value)]
            value = " ".join(value)
        return [(value, not within, False)]

    def _sum(self, expression: str) -> str:
        filled = self.text(expression)
        filled = re.sub(r"[A-Za-z_]\w*", lambda match: _first(self.read(match[0])), filled)
        found = computed(filled) if not is_open(filled) else None
        return self.marks.mark(f"$(({' '.join(expression.split())}))") if found is None else str(found)

    def _braced(self, match: re.Match[str], raw: str) -> Value:
        name, how, other = match[1], match[3] or "", match[4] or ""
        value = self.variables.get(name)
        if how:
            kind = how[-1]
            unset = value is None or (how[0] == ":" and (value in ("", ()) or self._left_open(value)))
            if kind == "+":
                return "" if unset else self.text(other)
            if unset and kind in "-=":
                value = self.text(other)
                if kind == "=":
                    self.variables[name] = value
        if value is None or (how and how[-1] == "?" and value in ("", ())):
            return self.marks.mark(f"${name}" if name.isdigit() is False else raw if len(name) > 1 else f"${name}")
        if isinstance(value, tuple) and match[2] is None:
            return value[0] if value else ""
        return value

    def _left_open(self, value: Value) -> bool:
        """Return whether a variable is one that the caller may leave out: `TP=$1`, then `${TP:-4}`."""
        found = self.marks.single_mark(value) if isinstance(value, str) else None
        return found is not None and not found.choices and re.fullmatch(r"\$\w+|\$\{\d+\}", found.text) is not None

    def read(self, name: str) -> Value:
        """Return a variable's value, or the mark of an unknown one."""
        value = self.variables.get(name)
        return self.marks.mark(f"${name}") if value is None else value


def _first(value: Value) -> str:
    return value if isinstance(value, str) else value[0] if value else ""
