"""Modules that a program holds in fp32 beside others in 16 bits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Fp32Module = Literal["embed_tokens", "lm_head", "norm"]
Fp32Modules = Annotated[tuple[Fp32Module, ...], Field(strict=False)]


def in_fp32(module: str, modules: tuple[str, ...]) -> bool:
    """Whether a module is one of these: `norm` is every norm, `embed_tokens` the head too where both are one."""
    name = module.rpartition(".")[2]
    return name in modules or ("norm" in modules and name.endswith("norm"))
