"""Functions that tests of null_device call in child processes."""

from __future__ import annotations

from typing import Any


def hold(gib: int) -> str:
    import torch

    held = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    return f"{held.nbytes} on {torch.cuda.get_device_name()}"


def fail(**words: Any) -> None:
    raise ValueError(f"no {words['what']}")


def leave() -> None:
    import os

    os._exit(5)
