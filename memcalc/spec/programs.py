"""Whose program runs a training step, and at which releases: fields of the `training:` block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from memcalc.spec.model import Block

Framework = Literal[
    "loop",
    "trainer",
    "sft",
    "dpo",
    "kto",
    "orpo",
    "reward",
    "grpo",
    "ppo",
    "accelerate",
    "lightning",
    "litgpt",
    "torchtune",
    "torchtitan",
    "axolotl",
    "llama-factory",
    "deepspeed",
    "megatron",
    "nemo",
    "gpt-neox",
]


class Program(NamedTuple):
    """A framework's program, as a headline names it: "TRL 1.16.0 SFT".

    Args:
        before: what stands before the release.
        after: what stands behind it.
        package: whose release it is, as a field of `VersionsSpec`; "": none of these.
    """

    before: str
    after: str = ""
    package: str = ""


PROGRAMS: dict[str, Program] = {
    "loop": Program("a PyTorch loop"),
    "trainer": Program("transformers", "Trainer", "transformers"),
    **{
        name: Program("TRL", title, "trl")
        for name, title in (
            *(("sft", "SFT"), ("dpo", "DPO"), ("kto", "KTO"), ("orpo", "ORPO")),
            *(("reward", "reward training"), ("grpo", "GRPO"), ("ppo", "PPO")),
        )
    },
    "accelerate": Program("Accelerate", "", "accelerate"),
    "lightning": Program("Lightning"),
    "litgpt": Program("LitGPT"),
    "torchtune": Program("torchtune"),
    "torchtitan": Program("torchtitan"),
    "axolotl": Program("axolotl"),
    "llama-factory": Program("LLaMA-Factory"),
    "deepspeed": Program("DeepSpeed", "", "deepspeed"),
    "megatron": Program("Megatron-LM"),
    "nemo": Program("NeMo"),
    "gpt-neox": Program("GPT-NeoX"),
}


def program_name(framework: str, versions: Mapping[str, str]) -> str:
    """A framework's program with the release of its package, where that is known: "TRL 1.16.0 SFT"; "": no such one."""
    program = PROGRAMS.get(framework)
    if program is None:
        return ""
    return " ".join(part for part in (program.before, versions.get(program.package), program.after) if part)


def _written(release: object) -> object:
    """A release as text; YAML reads 4.50 as the number 4.5, which is another one."""
    if isinstance(release, float):
        raise ValueError(f"write it with quotes or as v{release}: YAML reads it as a number")  # noqa: TRY004 - Pydantic's
    return release.removeprefix("v") if isinstance(release, str) else release


_RELEASE = r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$"
Release = Annotated[str, BeforeValidator(_written), Field(pattern=_RELEASE)]


def is_release(text: str) -> bool:
    """Whether a text is a release, such as "4.57.6" or "v4.57.6"."""
    return re.fullmatch(_RELEASE, text.removeprefix("v")) is not None


GROUPED_HEADS = "4.54"  # of transformers, integrations/sdpa_attention.py: handed on as they are, repeated before


class VersionsSpec(Block):
    """The releases of the packages that decide memory."""

    transformers: Release | None = Field(None, description="release of transformers, such as 4.57.6")
    accelerate: Release | None = Field(None, description="release of Accelerate")
    trl: Release | None = Field(None, description="release of TRL, such as 1.16.0")
    peft: Release | None = Field(None, description="release of PEFT")
    bitsandbytes: Release | None = Field(None, description="release of bitsandbytes")
    deepspeed: Release | None = Field(None, description="release of DeepSpeed")
    transformer_engine: Release | None = Field(None, description="release of Transformer Engine")


def number(release: str) -> tuple[int, ...]:
    """A release as numbers, which compare: "4.57.6" -> (4, 57, 6)."""
    return tuple(int(part) for part in release.removeprefix("v").split("."))
