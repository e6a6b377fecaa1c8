"""What commands print that is not drawn."""

from __future__ import annotations

import sys
from typing import Any


def print_json(document: Any) -> None:
    """A document as every command prints it; formulas keep their signs where the output can carry them."""
    import json  # a table needs none

    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    print_text(json.dumps(document, indent=2, ensure_ascii=ascii_only))


def print_text(text: str) -> None:
    """A text and a line break on standard output."""
    sys.stdout.write(text + "\n")
