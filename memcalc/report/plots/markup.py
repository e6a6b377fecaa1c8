"""Text from anywhere inside pictures: SVG, HTML, and what matplotlib draws."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from memcalc.text import harmless, shortened_in_the_middle

# What XML 1.0 cannot hold, not even escaped: lone surrogates and the two noncharacters of the first plane.
_FORBIDDEN = re.compile("[\ud800-\udfff\ufffe\uffff]")

# Inside <script> neither tags nor comments may begin; U+2028 and U+2029 end a line in older browsers.
_IN_SCRIPTS = re.compile("[<>&\u2028\u2029]")

_LONGEST_HEADING = 120  # characters that fit above a picture


def drawable(text: str) -> str:
    """Return the text as a picture can show it."""
    return _FORBIDDEN.sub("\ufffd", harmless(text))


def heading(text: str) -> str:
    """Return the text as the heading of a picture: so short that the picture keeps its place."""
    return shortened_in_the_middle(drawable(text), _LONGEST_HEADING)


def markup(text: str) -> str:
    """Return the text for an element or a quoted attribute of SVG and HTML, escaped."""
    return escape(drawable(text))


def script_data(value: Any) -> str:
    """Return JSON for a <script> element."""
    text = json.dumps(value, separators=(",", ":"))
    return _IN_SCRIPTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
