"""All supported frameworks, and the detection of a configuration's framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memcalc.importers.accelerate import ACCELERATE
from memcalc.importers.axolotl import AXOLOTL
from memcalc.importers.deepspeed import DEEPSPEED
from memcalc.importers.file_format import FileFormat
from memcalc.importers.gpt_neox import GPT_NEOX
from memcalc.importers.huggingface import TRAINING_ARGUMENTS
from memcalc.importers.litgpt import LITGPT
from memcalc.importers.llama_factory import LLAMA_FACTORY
from memcalc.importers.megatron.table import MEGATRON
from memcalc.importers.nemo.megatron_models import NEMO
from memcalc.importers.nemo.recipe import NEMO_RECIPE
from memcalc.importers.torchtitan import TORCHTITAN
from memcalc.importers.torchtune import TORCHTUNE

# The most specific first: LLaMA-Factory's files extend TrainingArguments, GPT-NeoX's contain DeepSpeed's fields.
FRAMEWORKS: tuple[FileFormat, ...] = (
    AXOLOTL,
    LLAMA_FACTORY,
    TRAINING_ARGUMENTS,
    ACCELERATE,
    LITGPT,
    TORCHTITAN,
    TORCHTUNE,
    NEMO_RECIPE,
    NEMO,
    GPT_NEOX,
    DEEPSPEED,
    MEGATRON,
)


def recognized(data: Mapping[str, Any]) -> FileFormat | None:
    """Return the framework of a mapping."""
    return next((framework for framework in FRAMEWORKS if framework.recognized(data)), None)
