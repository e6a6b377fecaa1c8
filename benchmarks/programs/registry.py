"""All families of programs."""

from __future__ import annotations

from benchmarks.programs import (
    accelerated,
    axolotl,
    compiled,
    contexts,
    deepspeeds,
    lightnings,
    litgpt,
    llama_factory,
    loop,
    megatron,
    ranks,
    torchtitan,
    torchtune,
    trainer,
    trl,
    trl_ranks,
    trl_zeros,
    zeros,
)
from benchmarks.programs.program import Family

_MODULES = (
    trainer,
    trl,
    trl_ranks,
    accelerated,
    axolotl,
    ranks,
    loop,
    deepspeeds,
    lightnings,
    litgpt,
    llama_factory,
    torchtune,
    torchtitan,
    megatron,
    compiled,
    contexts,
    zeros,
    trl_zeros,
)

FAMILIES: dict[str, Family] = {family.name: family for module in _MODULES for family in module.FAMILIES}
