"""A hook of MkDocs (mkdocs.yml): links that leave docs/ lead to the repository.

Pages are read on GitHub too, where such links are relative: `../../configs/gpt2.yaml`.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<=\]\()(\.\./[^)\s]+)(?=\))")


def outside(target: str, page: str) -> str | None:
    """The path in the repository of a link that leaves docs/; None for a link between pages.

    Args:
        target: the link, relative to the page.
        page: the page, relative to docs/.
    """
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    inside = path.startswith("docs/") and not path.startswith("docs/examples")
    return None if inside else path


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for each page before it is rendered."""

    def absolute(match: re.Match[str]) -> str:
        path = outside(match[1], page.file.src_uri)
        return match[1] if path is None else f"{config.repo_url}/blob/main/{path}"

    return LINK.sub(absolute, markdown)
