"""Lookup of the settings file of `check`, without the cost of parsing if there is none."""

from __future__ import annotations

from pathlib import Path

from memcalc.checking.policy import NO_POLICY, Policy
from memcalc.errors import InputError
from memcalc.files import read_bytes

OWN = "memcalc.toml"
PROJECT = "pyproject.toml"


def policy_for(settings: str | Path | None = None) -> Policy:
    """Return the policy of the given settings file, else of the nearest one up to the repository's root.

    In one directory `memcalc.toml` takes precedence over `[tool.memcalc]` in `pyproject.toml`.

    Raises:
        InputError: the file cannot be read, or is invalid.
    """
    if settings is not None:
        policy = _read(Path(settings))
        if policy is None:
            raise InputError(
                "the file has no table [tool.memcalc].", "Add the table, or name another file.", str(settings)
            )
        return policy
    here = Path.cwd()
    for folder in (here, *here.parents):
        for path in (folder / OWN, folder / PROJECT):
            policy = _read(path) if _may_hold_settings(path) else None
            if policy is not None:
                return policy
        if (folder / ".git").exists():
            break
    return NO_POLICY


def _may_hold_settings(path: Path) -> bool:
    """Return whether a file can have settings: a pyproject.toml without "memcalc" cannot."""
    try:
        return path.is_file() and (path.name == OWN or b"memcalc" in read_bytes(path))
    except (InputError, OSError):
        return path.name == OWN  # reading the file reports the error


def _read(path: Path) -> Policy | None:
    from memcalc.checking.settings import read_policy

    return read_policy(path)
