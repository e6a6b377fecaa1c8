"""Say in the page's words what texts say in those of the command line: the page has fields in place of options."""

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
        (r"--set:? ?", ""),  # "--set b=8": the field for other settings takes "b=8"
    )
)


def in_page_words(text: str) -> str:
    """Return a text, or a JSON document of texts, in the page's words."""
    if "--" in text:
        for pattern, replacement in _REPLACEMENTS:
            text = pattern.sub(replacement, text)
    return text
