"""memcalc: peak memory of each GPU in LLM training, and whether the run fits.

Functions and their results are imported on first use, so `import memcalc` costs almost nothing:

    import memcalc

    result = memcalc.estimate("gpt3", "b=4", gpu="h100-80gb")
    result.fits, result.ledger.peak_phase, result.ledger.peak_bytes
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers treat it as typing.TYPE_CHECKING; importing typing costs 2 ms
if TYPE_CHECKING:
    from typing import Any

    from memcalc.api import check as check
    from memcalc.api import diff as diff
    from memcalc.api import dry_run as dry_run
    from memcalc.api import estimate as estimate
    from memcalc.api import fit as fit
    from memcalc.api import load as load
    from memcalc.api import measure as measure
    from memcalc.api import oom as oom
    from memcalc.api import recompute as recompute
    from memcalc.api import replay as replay
    from memcalc.api import sweep as sweep
    from memcalc.api import trace as trace
    from memcalc.errors import InputError as InputError
    from memcalc.errors import MemcalcError as MemcalcError
    from memcalc.ledger.result import Result as Result
    from memcalc.nullcuda.context import null_device as null_device
    from memcalc.spec.spec import Spec as Spec

__version__ = "0.1.0"

_HOMES = {
    "InputError": "memcalc.errors",
    "MemcalcError": "memcalc.errors",
    "Result": "memcalc.ledger.result",
    "Spec": "memcalc.spec.spec",
    "check": "memcalc.api",
    "diff": "memcalc.api",
    "dry_run": "memcalc.api",
    "estimate": "memcalc.api",
    "fit": "memcalc.api",
    "load": "memcalc.api",
    "measure": "memcalc.api",
    "null_device": "memcalc.nullcuda.context",
    "oom": "memcalc.api",
    "recompute": "memcalc.api",
    "replay": "memcalc.api",
    "sweep": "memcalc.api",
    "trace": "memcalc.api",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memcalc' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
