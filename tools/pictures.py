"""Redraw the plots of README.md and docs/: `python tools/pictures.py` (`make pictures`). Needs torch and matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The plot's name in docs/pictures, and the command that draws it.
PICTURES = {
    "gpt2.png": "trace gpt2 --gpu a100-40gb --set b=2",
    "llama-3-8b-h100.png": "estimate llama-3-8b --gpu h100-80gb --set recipe=pure --set b=4",
}


def draw(name: str, folder: Path) -> Path:
    """Draw one plot into a directory; the same checkout draws the same pixels."""
    path = folder / name
    words = [sys.executable, "-m", "memcalc", *PICTURES[name].split(), "--plot", str(path)]
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return path


def main() -> None:
    """Redraw every plot."""
    for name in PICTURES:
        print(draw(name, ROOT / "docs" / "pictures"))


if __name__ == "__main__":
    main()
