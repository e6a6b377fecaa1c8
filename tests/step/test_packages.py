"""Packages that the training step imports run no code from the hub."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest

from memcalc.step.packages import import_package

# As bitsandbytes/backends/cpu/ops.py of version 0.50 does.
LIBRARY = """\
import logging
try:
    from kernels import get_kernel
    kernel = get_kernel("someone/kernel")
except Exception as error:
    kernel = None
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("no kernel: %s", error)
"""
KERNELS = "def get_kernel(name):\n    return name\n"


def test_a_package_gets_no_kernel_from_the_hub_and_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[logging.LogRecord] = []
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(logger, "handle", logged.append)
    (tmp_path / "kernels.py").write_text(KERNELS)
    for name in ("ours", "theirs"):
        (tmp_path / f"library_of_{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("kernels", "library_of_ours", "library_of_theirs"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    assert import_package("library_of_ours").kernel is None
    assert logged == []
    assert importlib.import_module("library_of_theirs").kernel == "someone/kernel"  # whoever else imports it
    import_package("library_of_theirs")
    assert sys.modules["kernels"] is not None  # as it was
