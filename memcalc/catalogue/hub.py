"""Downloads of config.json files from the Hugging Face hub, with huggingface_hub (extra `hub`); no hub code is run."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from memcalc.errors import InputError, Unavailable

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
