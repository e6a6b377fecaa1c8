"""config.json files in the local hub cache, read without huggingface_hub.

A cache has one directory per model (huggingface_hub 2.4, file_download.py, repo_folder_name):
`models--ORG--NAME/refs/main` holds the commit, `models--ORG--NAME/snapshots/COMMIT/config.json` the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from memcalc.files import is_file, read_text

_COMMIT = 40  # hexadecimal digits


def cache_folder() -> Path:
    """Return huggingface_hub's cache: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def cached_config(hub_id: str) -> Path | None:
    """Return the config.json of a model's main branch in the local hub cache; None: it is not cached."""
    folder = cache_folder() / f"models--{hub_id.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if not is_file(reference):
        return None
    commit = read_text(reference).strip()
    if len(commit) != _COMMIT or not all(digit in "0123456789abcdef" for digit in commit):
        return None
    config = folder / "snapshots" / commit / "config.json"
    return config if is_file(config) else None
