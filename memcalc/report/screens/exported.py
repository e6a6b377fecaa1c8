"""Messages on a layout that was written as another program's file."""

from __future__ import annotations

import shlex
from pathlib import Path

from memcalc.exporters.completion import Export

_WIDTH = 78  # of a command's lines, which end in a backslash


def written_text(written: Export, file: Path) -> str:
    """Return where the file is, and the command that reads it with the settings that complete it."""
    words = iter(written.command(file))
    lines = [""]
    for word in words:
        part = shlex.quote(word)
        if word in ("--set", "--gpu"):
            part += f" {shlex.quote(next(words))}"
        if lines[-1] and len(lines[-1]) + len(part) > _WIDTH:
            lines.append(f"  {part}")
        else:
            lines[-1] += f"{' ' if lines[-1] else ''}{part}"
    return f"Wrote {file} for {written.program.label}. Add these settings, which it cannot contain:\n" + " \\\n".join(
        f"  {line}" for line in lines
    )
