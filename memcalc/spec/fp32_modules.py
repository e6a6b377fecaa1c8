"""Modules in fp32 in a program with other modules in bf16 or fp16."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Fp32Module = Literal["embed_tokens", "lm_head", "norm"]
Fp32Modules = Annotated[tuple[Fp32Module, ...], Field(strict=False)]


def in_fp32(module: str, modules: tuple[str, ...]) -> bool:
    """Return whether a module is listed: `norm` is every norm, `embed_tokens` includes a tied LM head."""
    name = module.rpartition(".")[2]
    return name in modules or ("norm" in modules and name.endswith("norm"))
