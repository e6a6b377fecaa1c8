"""Options of a command: `--name value ...` and `--name=value`, also where branches decide them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from memcalc.importers.shell.marks import MarkTable, is_open

_OPTION = re.compile(r"--([A-Za-z][\w.-]{0,80})(?:=(.*))?", re.DOTALL)
_MORE = re.compile(r"\$[@*]|.*(?:args?|opts?|options?|params?|flags?|extra)(?:\[@\])?\}?", re.IGNORECASE | re.DOTALL)
_NOT_PLAIN = re.compile(r"\s")

Options = dict[str, tuple[str, ...]]


def _apart(words: Sequence[str]) -> Iterator[str]:
    """Yield words; a word with several options is split: `bash entry.sh pretrain_gpt.py "--bf16 --lr 1"`."""
    for word in words:
        if word.lstrip().startswith("--") and _OPTION.match(word.split()[0]) and _NOT_PLAIN.search(word):
            yield from word.split()
        else:
            yield word


class OptionReader:
    """Parser of options in words, and in the known choices of unresolved words."""

    def __init__(self, marks: MarkTable) -> None:
        self.marks = marks
        self.known: dict[str, Options] = {}

    def options(self, words: Sequence[str], *, whole: bool = True) -> Options:
        """Return the words of each option.

        Args:
            words: words of a command or a variable.
            whole: whether they are of a command, where unresolved words that may contain options are reported.
        """
        found: Options = {}
        name = None
        for word in _apart(words):
            option = _OPTION.fullmatch(word)
            if option:
                name = option[1].replace("_", "-")
                found[name] = () if option[2] is None else (option[2],)
            elif word == "--" or self._holds_options(word):
                found |= self._choices(word)
                open_word = self.marks.single_mark(word)
                if whole and open_word and not open_word.choices:
                    found[open_word.text] = (word,)
                name = None
            elif name is not None:
                found[name] = (*found[name], word)
        return found

    def _holds_options(self, word: str) -> bool:
        """Return whether an unresolved word means options, not the value of one."""
        open_word = self.marks.single_mark(word)
        if open_word is None:
            return False
        if not open_word.choices:
            return _MORE.fullmatch(open_word.text) is not None
        firsts = [each.split() if isinstance(each, str) else list(each) for each in open_word.choices]
        first_words = [words[0] for words in firsts if words]
        marked = [word for word in first_words if is_open(word)]
        plain = [word for word in first_words if not is_open(word)]
        return all(word.startswith("--") for word in plain) if plain else all(map(self._holds_options, marked))

    def _choices(self, word: str) -> Options:
        if word not in self.known:
            self.known[word] = {}
            open_word = self.marks.single_mark(word)
            choices = open_word.choices if open_word else ()
            ways = [self.options(each.split() if isinstance(each, str) else each, whole=False) for each in choices]
            self.known[word] = self.joined(ways, open_word.text if open_word else "")
        return self.known[word]

    def joined(self, ways: Sequence[Options], named: str) -> Options:
        """Merge the options of several branches with an unknown condition: differences are unresolved."""
        found: Options = {}
        for name in dict.fromkeys(name for way in ways for name in way):
            values = [way.get(name) for way in ways]
            same = values[0] is not None and all(value == values[0] for value in values)
            found[name] = values[0] if same and values[0] is not None else (self.marks.mark(named),)
        return found
