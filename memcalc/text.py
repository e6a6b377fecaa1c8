"""Text from files, keys and other programs, made safe to print.

Whatever a user's file holds may end up in a message, a table or a CI log. Control characters move a terminal's cursor,
change its title or hide text; line breaks forge lines of a log; and GitHub Actions runs every line that begins with
`::` or holds `##[` as a command. Functions here write such characters out, so that they can be seen and do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# C0 and C1 control characters and DEL, and Unicode's own: direction marks and overrides (U+061C, U+200E, U+200F, U+202A
# to U+202E, U+2066 to U+2069, "Trojan Source", CVE-2021-42574) with the older ones that follow them (U+206A to U+206F),
# line and paragraph separators (U+2028, U+2029). With them lone surrogates (U+D800 to U+DFFF), which stand for bytes of
# file names that are not UTF-8 and which JSON can hold: no encoding has them.
_CONTROL = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff"
CONTROLS = re.compile(f"[{_CONTROL}]")
_CONTROLS_BUT_LINE_BREAKS = re.compile(f"(?!\n)[{_CONTROL}]")

# Source: actions/runner, src/Runner.Common/ActionCommand.cs: a command of version 2 is a line that begins with "::"
# after blanks; one of version 1 stands anywhere in a line after "##[".
_WORKFLOW_COMMANDS = re.compile(r"^([^\S\n]*):(?=:)|#(?=#\[)", re.MULTILINE)
_SUSPECT = re.compile(f"(?!\n)[{_CONTROL}]|##\\[|::")

LONGEST_PART = 1_000  # characters of a message's problem or remedy; lists of known names come near it
LONGEST_TEXT = 8_000  # characters of a message in several lines


def harmless(text: str) -> str:
    r"""Return the text as one line without control characters: "a\nb" becomes "a\\x0ab"."""
    return text if text.isprintable() else CONTROLS.sub(_written_out, text)


def harmless_lines(text: str) -> str:
    """Return the text without control characters other than line breaks."""
    return _CONTROLS_BUT_LINE_BREAKS.sub(_written_out, text)


def without_commands(text: str) -> str:
    """Return lines of text in which no line is a command of GitHub Actions, and without other control characters."""
    if _SUSPECT.search(text) is None:
        return text
    return _WORKFLOW_COMMANDS.sub(_first_sign_written_out, harmless_lines(text))


def json_safe(text: str) -> str:
    """Return JSON text with the control characters and command marks inside its strings as JSON's own escapes.

    Args:
        text: JSON as `json.dumps` writes it; outside strings it has no control characters but line breaks.
    """
    if _SUSPECT.search(text) is None:
        return text
    escaped = _CONTROLS_BUT_LINE_BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return escaped.replace("##[", "\\u0023#[")


def shortened_in_the_middle(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters: a message names what is wrong at its ends, with values between."""
    if len(text) <= limit:
        return text
    mark = f" ...({len(text) - limit:,} more characters)... "
    head = (limit - len(mark)) * 2 // 3
    tail = limit - len(mark) - head
    return f"{text[:head]}{mark}{text[-tail:]}"


def message_part(text: str, limit: int = LONGEST_PART) -> str:
    """Return a part of a one-line message: harmless, and of a length that a log can take."""
    return harmless(shortened_in_the_middle(text, limit))


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _first_sign_written_out(found: re.Match[str]) -> str:
    return f"{found[1]}\\x3a" if found[1] is not None else "\\x23"


# Words of a command that are secrets by how they look: tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack and AWS,
# JSON Web Tokens, and 40 hexadecimal digits, as W&B's keys are. Git's commits look like those, and are masked too.
_TOKENS = re.compile(
    r"\b(?:hf_|api_org_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|eyJ)[\w.-]{12,}"
    r"|\b[0-9a-f]{40}\b"
)
# An option, variable or field whose name says that its value is one: `--hf-token X`, `WANDB_API_KEY=X`, `password: X`.
_NAMED = re.compile(
    r"(?i)(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|auth)$"
)
_USER = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)")  # of a URL
MASK = "***"


def masked(words: Sequence[str]) -> list[str]:
    """Return the words of a command with everything that looks like a secret replaced by three asterisks."""
    found: list[str] = []
    follows = False
    for word in words:
        name, equals, value = word.partition("=")
        if follows and not word.startswith("-"):
            found.append(MASK)
        elif equals and value and _NAMED.search(name):
            found.append(f"{name}={MASK}")
        else:
            found.append(_TOKENS.sub(MASK, _USER.sub(MASK, word)))
        follows = word.startswith("-") and not equals and _NAMED.search(word) is not None
    return found
