"""The program of a training step, and its package versions: fields of the `training:` block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from memcalc.spec.model import ConfigBlock

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


class FrameworkProgram(NamedTuple):
    """A framework's program, as in a headline: "TRL 1.16.0 SFT"."""

    before: str  # text before the version
    after: str = ""  # text after the version
    package: str = ""  # the package of the version, as a field of `VersionsSpec`; "": none of these


PROGRAMS: dict[str, FrameworkProgram] = {
    "loop": FrameworkProgram("a PyTorch loop"),
    "trainer": FrameworkProgram("transformers", "Trainer", "transformers"),
    **{
        name: FrameworkProgram("TRL", title, "trl")
        for name, title in (
            *(("sft", "SFT"), ("dpo", "DPO"), ("kto", "KTO"), ("orpo", "ORPO")),
            *(("reward", "reward training"), ("grpo", "GRPO"), ("ppo", "PPO")),
        )
    },
    "accelerate": FrameworkProgram("Accelerate", "", "accelerate"),
    "lightning": FrameworkProgram("Lightning"),
    "litgpt": FrameworkProgram("LitGPT"),
    "torchtune": FrameworkProgram("torchtune"),
    "torchtitan": FrameworkProgram("torchtitan"),
    "axolotl": FrameworkProgram("axolotl"),
    "llama-factory": FrameworkProgram("LLaMA-Factory"),
    "deepspeed": FrameworkProgram("DeepSpeed", "", "deepspeed"),
    "megatron": FrameworkProgram("Megatron-LM"),
    "nemo": FrameworkProgram("NeMo"),
    "gpt-neox": FrameworkProgram("GPT-NeoX"),
}


def program_name(framework: str, versions: Mapping[str, str]) -> str:
    """Return a framework's program with its package version, if known: "TRL 1.16.0 SFT"; "": unknown framework."""
    program = PROGRAMS.get(framework)
    if program is None:
        return ""
    return " ".join(part for part in (program.before, versions.get(program.package), program.after) if part)


def _written(release: object) -> object:
    """Return a version as a string; YAML reads 4.50 as the number 4.5, a different version."""
    if isinstance(release, float):
        raise ValueError(f"write it with quotes or as v{release}: YAML reads it as a number")  # noqa: TRY004 - as Pydantic requires
    return release.removeprefix("v") if isinstance(release, str) else release


_RELEASE = r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$"
Release = Annotated[str, BeforeValidator(_written), Field(pattern=_RELEASE)]


def is_release(text: str) -> bool:
    """Return whether a text is a version, such as "4.57.6" or "v4.57.6"."""
    return re.fullmatch(_RELEASE, text.removeprefix("v")) is not None


# Programs of TRL, and all programs that load 4-bit weights with transformers.
TRL = tuple(name for name, program in PROGRAMS.items() if program.package == "trl")
OF_TRANSFORMERS = ("trainer", *TRL, "accelerate", "axolotl", "llama-factory")
GROUPED_HEADS = "4.54"  # of transformers: passes grouped heads on, repeated before (integrations/sdpa_attention.py)


class VersionsSpec(ConfigBlock):
    """Versions of the packages that affect memory."""

    transformers: Release | None = Field(None, description="version of transformers, such as 4.57.6")
    accelerate: Release | None = Field(None, description="version of Accelerate")
    trl: Release | None = Field(None, description="version of TRL, such as 1.16.0")
    peft: Release | None = Field(None, description="version of PEFT")
    bitsandbytes: Release | None = Field(None, description="version of bitsandbytes")
    deepspeed: Release | None = Field(None, description="version of DeepSpeed")
    transformer_engine: Release | None = Field(None, description="version of Transformer Engine")


def number(release: str) -> tuple[int, ...]:
    """Return a version as comparable numbers: "4.57.6" -> (4, 57, 6)."""
    return tuple(int(part) for part in release.removeprefix("v").split("."))


def is_before(versions: VersionsSpec | None, package: str, release: str) -> bool:
    """Return whether a run has an older release of a package; if it names none, it has the newest."""
    found: str | None = None if versions is None else getattr(versions, package)
    return found is not None and number(found) < number(release)
