"""Texts for the page, which has fields where the command line has options."""

from __future__ import annotations

import re

_REPLACEMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"Add --gpu GPU or set hardware\.gpu; `memcalc gpus` lists the names\.", "Choose one."),
        (r"Add --gpu to check", "Choose a GPU to check"),
        (r"`memcalc fit` without --maximize lists", "A search without a largest value lists"),
        (r"; --why lists (them|it)", ""),
        (r": --why lists the excluded layouts", ""),
        (r"--gpu (?=\w)", "GPU "),
        (r"--set(?![\w-]):? ?", ""),  # "--set b=8": the field for other settings takes "b=8"
    )
)


def in_page_words(text: str) -> str:
    """Return a text, or a JSON document of texts, with the page's fields in place of options."""
    if "--" in text:
        for pattern, replacement in _REPLACEMENTS:
            text = pattern.sub(replacement, text)
    return text
