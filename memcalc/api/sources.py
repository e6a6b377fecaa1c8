"""What each verb is given: a source of a run, and the run that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memcalc.spec.spec import Spec

Source = Spec | str | Path | Mapping[str, Any]


def load(source: Source, *overrides: str, gpu: str | None = None) -> Spec:
    """The run that `source` describes, with every default filled in and every rule checked.

    Args:
        source: a path, a preset's name, "-" for standard input, a mapping, or a Spec.
        overrides: "field=value", applied in this order. On a Spec, whose derived sizes are already filled in, they
            change only the fields they name; on every other source sizes that follow from others follow.
        gpu: the card to judge by, in place of `hardware.gpu`.
    """
    from memcalc.importers.loading import load as load_spec

    return load_spec(source, overrides, gpu=gpu)
