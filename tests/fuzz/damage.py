"""Files of any format damaged at random: `damaged(rng, content)` gives the bytes of one."""

from __future__ import annotations

import random
import re

# What takes the place of a number, of a word, or stands between any two bytes.
NUMBERS = (
    b"0 -1 1 2 7 65536 4294967296 9223372036854775807 18446744073709551616 1e308 1e400 -1e-9 0.5 NaN Infinity".split()
    + [b"9" * 5_000, b"[]", b"{}", b'""', b"null", b"true", b"1_000", b"0x10"]
)
WORDS = [
    *b"null true [] {} [[]] cuda:0 alloc free phase gpt2 none name model 70GiB 5% --gpu ../../etc/passwd".split(),
    b'"' + b"x" * 5_000 + b'"',
    b'"\\u001b[31m\\u0000\\ud800"',
    b"\x1b]0;owned\x07",
    "\u202eevil\u2028\u2029".encode(),
    b"\n::error file=a::b\n",
    b"##[set-env name=a]b",
    b"<script>alert(1)</script>",
    b"'; --",
    b"$(touch /tmp/owned)",
    b"\xff\xfe\x00",
    b"\x00",
    b"\n" * 300,
    b"[" * 300,
    b"{'a':" * 100,
    b"- " * 300,
]
_NUMBER = re.compile(rb"\d+(?:\.\d+)?")
_WORD = re.compile(rb"[A-Za-z_][\w.-]*|\"[^\"\n]*\"")


def damaged(rng: random.Random, content: bytes) -> bytes:
    """The content with one to four things done to it; what is as long as a log stays as long."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        content = rng.choice(_DAMAGES)(rng, content)
    return content


def _place(rng: random.Random, content: bytes) -> int:
    return rng.randrange(len(content) + 1)


def _replaced(rng: random.Random, content: bytes, pattern: re.Pattern[bytes], values: list[bytes]) -> bytes:
    start = _place(rng, content)
    found = pattern.search(content, start) or pattern.search(content)
    return content if found is None else content[: found.start()] + rng.choice(values) + content[found.end() :]


def _number(rng: random.Random, content: bytes) -> bytes:
    return _replaced(rng, content, _NUMBER, NUMBERS)


def _word(rng: random.Random, content: bytes) -> bytes:
    return _replaced(rng, content, _WORD, WORDS + NUMBERS)


def _swapped(rng: random.Random, content: bytes) -> bytes:
    """A word in the place of another one of the same file: values under others' keys."""
    words = _WORD.findall(content)
    return _replaced(rng, content, _WORD, words) if words else content


def _inserted(rng: random.Random, content: bytes) -> bytes:
    at = _place(rng, content)
    return content[:at] + rng.choice(WORDS) + content[at:]


def _flipped(rng: random.Random, content: bytes) -> bytes:
    if not content:
        return b"\x00"
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def _cut(rng: random.Random, content: bytes) -> bytes:
    return content[: _place(rng, content)]


def _line_gone(rng: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    if lines:
        del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _line_twice(rng: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    if lines:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return b"".join(lines)


def _stretch_gone(rng: random.Random, content: bytes) -> bytes:
    start, stop = sorted((_place(rng, content), _place(rng, content)))
    return content[:start] + content[min(stop, start + 200) :]


_DAMAGES = (_number, _number, _word, _word, _swapped, _inserted, _flipped, _cut, _line_gone, _line_twice, _stretch_gone)
