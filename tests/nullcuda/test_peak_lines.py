"""Which line of a program is named for what was alive at its peak."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from memcalc.nullcuda.launcher import HOOK

PlaceOf = Callable[[list[dict[str, Any]]], str]


@pytest.fixture
def place_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlaceOf]:
    """The hook's modules are on the path of a dry run's processes alone."""
    monkeypatch.syspath_prepend(str(HOOK))
    yield import_module("memcalc_peak").place_of
    del sys.modules["memcalc_peak"]


def frames(*places: str) -> list[dict[str, Any]]:
    found = [place.split(":") for place in places]
    return [{"filename": name, "line": int(line), "name": function} for name, line, function in found]


TORCH = "/env/site-packages/torch/nn/functional.py:9:linear"
LIBRARY = "/env/site-packages/transformers/modeling.py:7:forward"
OTHER = "/env/site-packages/trainer/trainer.py:3:train"
SCRIPT = "/home/someone/train.py:12:main"


@pytest.mark.parametrize(
    ("alive", "where"),
    [
        ((TORCH, SCRIPT), "/home/someone/train.py:12 main"),
        ((TORCH, LIBRARY, OTHER, SCRIPT), "transformers/modeling.py:7 forward, from /home/someone/train.py:12 main"),
        ((TORCH, LIBRARY, OTHER), "transformers/modeling.py:7 forward"),
        ((f"{HOOK}/memcalc_compiler.py:5:step", OTHER, SCRIPT), "trainer/trainer.py:3 train, from /home/someone/train.py:12 main"),
        (("<string>:1:inner", TORCH, SCRIPT), "/home/someone/train.py:12 main"),
        ((TORCH,), "torch/nn/functional.py:9 linear"),
        (("libtorch.so:1:empty",), "backward"),
        ((f"{Path.cwd()}/train.py:12:main",), "train.py:12 main"),
    ],
)  # fmt: skip
def test_the_innermost_line_that_is_not_torchs(alive: tuple[str, ...], where: str, place_of: PlaceOf) -> None:
    assert place_of(frames(*alive)) == where
