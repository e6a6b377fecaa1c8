"""Text from files, keys and other programs, made safe to print.

Any content of a user's file may appear in a message, a table or a CI log. Control characters move a terminal's
cursor, change its title or hide text; line breaks forge log lines; and GitHub Actions runs every line that begins
with `::` or contains `##[` as a command. The functions here escape such characters, so that they are visible and
have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# C0 and C1 control characters and DEL, and Unicode's own: direction marks and overrides (U+061C, U+200E, U+200F, U+202A
# to U+202E, U+2066 to U+2069, "Trojan Source", CVE-2021-42574), the deprecated ones after them (U+206A to U+206F), and
# line and paragraph separators (U+2028, U+2029). Lone surrogates (U+D800 to U+DFFF) are included: JSON can contain
# them, they represent bytes of file names that are not UTF-8, and no encoding can write them.
_CONTROL = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff"
CONTROLS = re.compile(f"[{_CONTROL}]")
_CONTROLS_BUT_LINE_BREAKS = re.compile(f"(?!\n)[{_CONTROL}]")

# Source: actions/runner, src/Runner.Common/ActionCommand.cs: a command of version 2 is a line that begins with "::"
# after blanks; one of version 1 can be anywhere in a line after "##[".
_WORKFLOW_COMMANDS = re.compile(r"^([^\S\n]*):(?=:)|#(?=#\[)", re.MULTILINE)
_SUSPECT = re.compile(f"(?!\n)[{_CONTROL}]|##\\[|::")

LONGEST_PART = 1_000  # characters of a message's problem or remedy; lists of known names are nearly as long
LONGEST_TEXT = 8_000  # characters of a message of several lines


def harmless(text: str) -> str:
    r"""Return the text as one line with control characters escaped: "a\nb" becomes "a\\x0ab"."""
    return text if text.isprintable() else CONTROLS.sub(_written_out, text)


def harmless_lines(text: str) -> str:
    """Return the text with control characters other than line breaks escaped."""
    return _CONTROLS_BUT_LINE_BREAKS.sub(_written_out, text)


def without_commands(text: str) -> str:
    """Return text without GitHub Actions commands, with control characters other than line breaks escaped."""
    if _SUSPECT.search(text) is None:
        return text
    return _WORKFLOW_COMMANDS.sub(_first_sign_written_out, harmless_lines(text))


def json_safe(text: str) -> str:
    """Return JSON text with control characters and command marks inside its strings written as JSON escapes.

    Args:
        text: JSON as `json.dumps` writes it; outside strings the only control characters are line breaks.
    """
    if _SUSPECT.search(text) is None:
        return text
    escaped = _CONTROLS_BUT_LINE_BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return escaped.replace("##[", "\\u0023#[")


def shortened_in_the_middle(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, cut in the middle: a message names the problem at its ends."""
    if len(text) <= limit:
        return text
    mark = f" ...({len(text) - limit:,} more characters)... "
    head = (limit - len(mark)) * 2 // 3
    tail = limit - len(mark) - head
    return f"{text[:head]}{mark}{text[-tail:]}"


def message_part(text: str, limit: int = LONGEST_PART) -> str:
    """Return a part of a one-line message: escaped, and at most `limit` characters long."""
    return harmless(shortened_in_the_middle(text, limit))


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _first_sign_written_out(found: re.Match[str]) -> str:
    return f"{found[1]}\\x3a" if found[1] is not None else "\\x23"


# Words of a command that look like secrets: tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack and AWS, JSON Web
# Tokens, and 40 hexadecimal digits, as in W&B keys. Git commits look like the last, and are masked too.
_TOKENS = re.compile(
    r"\b(?:hf_|api_org_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|eyJ)[\w.-]{12,}"
    r"|\b[0-9a-f]{40}\b"
)
# An option, variable or field named like a secret: `--hf-token X`, `WANDB_API_KEY=X`, `password: X`.
_NAMED = re.compile(
    r"(?i)(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|auth)$"
)
_USER = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)")  # user and password in a URL
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
