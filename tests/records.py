"""Errors of recorded runs as they were once, so that screens do not change with every new record."""

from typing import Any

import pytest

from memcalc.verdict import recorded_errors

RECORDS: dict[str, dict[str, dict[str, Any]]] = {
    "replayed": {
        "one GPU": {"runs": 600, "median": 0.0, "worst": 0.1, "low": -0.007, "high": 0.015},
        "one GPU, plain modules": {"runs": 300, "median": 0.0, "worst": 0.1, "low": -0.001, "high": 0.002},
    },
    "reserved over allocated": {
        "": {"runs": 700, "median": 1.09, "spread": 0.05, "least": 1.0, "most": 2.0},
        "one GPU": {"runs": 600, "median": 1.08, "spread": 0.04, "least": 1.0, "most": 1.5},
        "one GPU, plain modules": {"runs": 300, "median": 1.09, "spread": 0.04, "least": 1.0, "most": 1.4},
        "several GPUs": {"runs": 70, "median": 1.25, "spread": 0.1, "least": 1.05, "most": 1.9},
        "DDP": {"runs": 10, "median": 1.1, "spread": 0.02, "least": 1.05, "most": 1.2},
    },
}


def pin_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have verdicts rest on RECORDS."""
    monkeypatch.setattr(recorded_errors, "_table", lambda: RECORDS)
