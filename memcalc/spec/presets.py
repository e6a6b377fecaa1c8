"""Shipped configurations by name, in a clone, an editable install or a wheel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def presets_folder() -> Path:
    """Return the directory of presets: inside the package in a wheel, next to it in a clone."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return list(_names_in(presets_folder()))


@cache  # called once per configuration
def _names_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def preset_path(name: str) -> Path | None:
    """Return the file of the preset `name` (with or without ".yaml"), or None."""
    if "/" in name or "\\" in name or "\0" in name:
        return None
    path = presets_folder() / f"{name.removesuffix('.yaml')}.yaml"
    try:
        return path if path.is_file() else None
    except OSError:  # a name longer than the system allows
        return None
