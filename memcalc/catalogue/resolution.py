"""Resolution of a hub id: from the shipped catalogue, else the local hub cache, else the hub itself."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.catalogue.shipped import CatalogueEntry, find_shipped, search_shipped, shipped_ids
from memcalc.errors import InputError, Unavailable
from memcalc.extras import installation
from memcalc.files import is_file, read_text

# huggingface_hub 2.4, utils/_validators.py: letters, digits, ., - and _, at most 96 characters in each part.
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_FILE = re.compile(
    r"\.(?:ya?ml|json|jsonl|toml|txt|sh|bash|slurm|sbatch|args|py|log|csv|md|bin|pt|pickle|gz)$", re.IGNORECASE
)
_FEWEST_LETTERS = 4  # shortest name for which similar ids are searched
_MOST_ALIKE = 3  # ids that a message names
_COPIES = ("unsloth/", "NousResearch/")  # organizations that mostly republish models under their original names
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_MODEL_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#\s]+/[^/?#\s]+)")


class PublishedModel(NamedTuple):
    """The model of a hub id."""

    hub_id: str  # the id, as spelled where it was found
    config: dict[str, Any]  # its config.json, or the keys of it that decide memory
    origin: str  # where the config was found, as a phrase: "memcalc's catalogue", "the local hub cache", "the hub"
    entry: CatalogueEntry | None = None  # the model's entry in the catalogue; None: found elsewhere


def is_hub_id(name: str) -> bool:
    """Return whether a name can be a hub id: ORG/NAME, and not the path of a file."""
    return _HUB_ID.fullmatch(name) is not None and _FILE.search(name) is None


@cache
def resolve_offline(hub_id: str) -> PublishedModel | None:
    """Return the model of a hub id from the catalogue, else from the local hub cache; None: it is in neither.

    Raises:
        InputError: its config.json in the local hub cache cannot be read.
    """
    if not is_hub_id(hub_id):
        return None
    entry = find_shipped(hub_id)
    if entry is not None:
        return PublishedModel(entry.hub_id, entry.config, "memcalc's catalogue", entry)
    path = cached_config(hub_id)
    return None if path is None else PublishedModel(hub_id, _parsed(read_text(path), hub_id), "the local hub cache")


@cache
def resolve(hub_id: str) -> PublishedModel:
    """Return the model of a hub id from the catalogue, the local hub cache or the hub.

    Raises:
        InputError: there is no such model; the message names similar ids.
        Unavailable: the model is gated, or the hub cannot be reached.
    """
    found = resolve_offline(hub_id)
    if found is not None:
        return found
    missing = "not in memcalc's catalogue or in the local hub cache"
    if is_offline():
        remedy = "Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to look on the hub, or name its config.json."
        raise InputError(f"{missing}, and the hub is off.", _suggested(hub_id, remedy), hub_id)
    if not can_download():
        remedy = f"To look on the hub: {installation('hub')}. Or name its config.json."
        raise InputError(f"{missing}.", _suggested(hub_id, remedy), hub_id)
    try:
        path = download_config(hub_id)
    except InputError as error:
        raise InputError(error.problem, _suggested(hub_id, error.remedy), hub_id) from None
    except HubUnreachable as error:
        raise HubUnreachable(f"{error} {_suggested(hub_id, '')}".rstrip()) from None
    return PublishedModel(hub_id, _parsed(read_text(path), hub_id), "the hub")


def similar_ids(name: str) -> list[str]:
    """Return hub ids of the catalogue that resemble `name`: with all its words, or else spelled similarly."""
    bare = name[:80].rpartition("/")[2]
    if sum(map(str.isalnum, bare)) < _FEWEST_LETTERS:
        return []
    wanted = _words(bare)
    found = [entry.hub_id for entry in search_shipped(bare) if wanted <= _words(entry.hub_id)]
    found.sort(key=lambda hub_id: hub_id.startswith(_COPIES))
    if not found:
        ids = {(hub_id if "/" in name else hub_id.rpartition("/")[2]).lower(): hub_id for hub_id in shipped_ids()}
        found = [ids[key] for key in difflib.get_close_matches(name[:80].lower(), ids, n=_MOST_ALIKE, cutoff=0.75)]
    return found[:_MOST_ALIKE]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", name.lower()))


def refuse_url(name: str) -> None:
    """Reject a URL, and suggest what to write instead.

    Raises:
        InputError: `name` is a URL.
    """
    if _URL.match(name) is None:
        return
    page = _MODEL_PAGE.match(name)
    if page is not None:
        remedy = f"Write the model's hub id: {page[1]}."
    else:
        remedy = "Download the file and name it, or write a hub id such as meta-llama/Llama-3.1-8B."
    raise InputError("a URL is neither a file nor a hub id.", remedy, name[:200])


def _suggested(hub_id: str, remedy: str) -> str:
    close = similar_ids(hub_id)
    return f"Did you mean {' or '.join(close)}? {remedy}" if close else remedy


def _parsed(text: str, hub_id: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise InputError("its config.json is not a JSON object.", "Download it again.", hub_id)
    return config


# config.json files in the local hub cache, read without huggingface_hub.
# A cache has one directory per model (huggingface_hub 2.4, file_download.py, repo_folder_name): `models--ORG--
# NAME/refs/main` holds the commit, `models--ORG--NAME/snapshots/COMMIT/config.json` the file.

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


_ON = ("1", "on", "yes", "true")  # huggingface_hub 2.4, constants.py, ENV_VARS_TRUE_VALUES
_PATIENCE_SECONDS = 10  # as huggingface_hub's HF_HUB_ETAG_TIMEOUT
_MOST_BYTES = 4_000_000  # of a config.json; real ones have a few thousand
_unreachable: list[str] = []  # why the hub could not be reached; tested once per process


class HubUnreachable(Unavailable):
    """The hub does not respond."""


def is_offline() -> bool:
    """Return whether the user forbids connections to the hub: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is on."""
    return any(os.environ.get(name, "").lower() in _ON for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def can_download() -> bool:
    """Return whether huggingface_hub is installed."""
    return importlib.util.find_spec("huggingface_hub") is not None


def download_config(hub_id: str) -> Path:
    """Download the config.json of a model into the local hub cache and return its path.

    huggingface_hub takes the hub's address from HF_ENDPOINT and the token from HF_TOKEN or `hf auth login`.

    Raises:
        InputError: the hub has no such model, or the model has no config.json, or one that is too large.
        Unavailable: the model is gated.
        HubUnreachable: the hub cannot be reached.
    """
    if not _unreachable and (reason := _why_unreachable()):
        _unreachable.append(reason)
    if _unreachable:
        raise _not_reached(hub_id, _unreachable[0])
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars, logging  # type: ignore[attr-defined]

    disable_progress_bars()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        size = get_hf_file_metadata(hf_hub_url(hub_id, "config.json"), timeout=_PATIENCE_SECONDS).size
        if size is not None and size > _MOST_BYTES:
            problem = f"its config.json has {size:,} bytes on the hub, and the limit is {_MOST_BYTES:,}."
            raise InputError(problem, "Name its base model, or a config.json.", hub_id)
        return Path(hf_hub_download(hub_id, "config.json"))
    except GatedRepoError:
        raise Unavailable(
            f"{hub_id} is gated: the hub gives its config.json only to accounts with access. Request access on "
            "its page and run `hf auth login` (or set HF_TOKEN), or name a config.json that you have."
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            "the hub has no public model of this id.",
            "Check its spelling; for a private model run `hf auth login` (or set HF_TOKEN).",
            hub_id,
        ) from None
    except RemoteEntryNotFoundError:
        raise InputError(
            "this model has no config.json on the hub.",
            "Name its base model, or a config.json.",
            hub_id,
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        _unreachable.append(_reason(error))
        raise _not_reached(hub_id, _unreachable[0]) from None
    except ValueError as error:  # HFValidationError: an id that the hub does not allow
        raise InputError(f"this is not a hub id: {error}.", "Write ORG/NAME.", hub_id) from None


def _why_unreachable() -> str:
    """Return why the hub does not respond; "" if it does.

    huggingface_hub would retry five times, for 24 seconds. It checks the certificates, because it may know more of
    them.
    """
    import ssl
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from huggingface_hub.constants import ENDPOINT

    if not ENDPOINT.startswith(("https://", "http://")):
        return f"HF_ENDPOINT = {ENDPOINT!r} is not a web address"
    try:
        with urlopen(Request(ENDPOINT, method="HEAD"), timeout=_PATIENCE_SECONDS):  # noqa: S310 -- checked above
            return ""
    except HTTPError:  # the hub responded
        return ""
    except URLError as error:
        return "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (OSError, ValueError) as error:
        return _reason(error)


def _reason(error: BaseException) -> str:
    """Return the first line of an error's innermost cause; huggingface_hub's own message repeats the address."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _not_reached(hub_id: str, reason: str) -> HubUnreachable:
    return HubUnreachable(
        f"{hub_id} is not in memcalc's catalogue or in the local hub cache, and the hub cannot be reached: {reason}. "
        "Check the connection (HF_ENDPOINT names another hub), or name the model's config.json."
    )
