"""Families of transformers with formulas, and the tapes of their parts."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from memcalc.architectures.huggingface.family import Family
from memcalc.architectures.structure import BlockStructure
from memcalc.errors import InputError
from memcalc.extras import installation
from memcalc.ledger.component import Component
from memcalc.programs.tape import Tape, Tensor
from memcalc.spec.finetuning import MLP_TARGETS

# The module in this package, and the class in it, for each family: only the run's is imported.
FAMILIES: dict[str, tuple[str, str]] = {
    "apertus": ("apertus", "Apertus"),
    "arcee": ("llama", "Llama"),
    "bloom": ("gpt_like.bloom", "Bloom"),
    "codegen": ("gpt_like.codegen", "CodeGen"),
    "cohere": ("cohere", "Cohere"),
    "cohere2": ("cohere", "Cohere2"),
    "deepseek_v2": ("deepseek", "DeepseekV2"),
    "deepseek_v3": ("deepseek", "DeepseekV3"),
    "ernie4_5": ("llama_variants", "Ernie4"),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4Moe"),
    "exaone4": ("olmo", "Exaone4"),
    "falcon": ("gpt_like.falcon", "Falcon"),
    "flex_olmo": ("olmo", "FlexOlmo"),
    "gemma": ("gemma", "Gemma"),
    "gemma2": ("gemma", "Gemma2"),
    "gemma3_text": ("gemma", "Gemma3"),
    "gemma4_text": ("gemma", "Gemma4"),
    "glm": ("glm", "Glm"),
    "glm4": ("glm", "Glm4"),
    "glm4_moe": ("sigmoid_router", "Glm4Moe"),
    "gpt2": ("gpt_like.gpt2", "Gpt2"),
    "gpt_bigcode": ("gpt_like.gpt_bigcode", "GptBigcode"),
    "gpt_neo": ("gpt_like.gpt_neo", "GptNeo"),
    "gpt_neox": ("gpt_like.gpt_neox", "GptNeox"),
    "gpt_oss": ("gpt_oss", "GptOss"),
    "gptj": ("gpt_like.gptj", "Gptj"),
    "granite": ("llama_variants", "Granite"),
    "granitemoe": ("mixtral", "GraniteMoe"),
    "hunyuan_v1_dense": ("llama", "NormedAfterPositions"),
    "llama": ("llama", "Llama"),
    "llama4_text": ("llama4", "Llama4"),
    "minimax_m2": ("sigmoid_router", "MiniMaxM2"),
    "mistral": ("llama", "Llama"),
    "mixtral": ("mixtral", "Mixtral"),
    "mpt": ("gpt_like.mpt", "Mpt"),
    "nanochat": ("nanochat", "NanoChat"),
    "nemotron": ("nemotron", "Nemotron"),
    "nemotron_h": ("nemotron", "NemotronH"),
    "olmo": ("olmo", "Olmo"),
    "olmo2": ("olmo", "Olmo2"),
    "olmo3": ("olmo", "Olmo3"),
    "olmoe": ("olmo", "Olmoe"),
    "opt": ("gpt_like.opt", "Opt"),
    "phi": ("phi", "Phi"),
    "phi3": ("phi3", "Phi3"),
    "phimoe": ("phimoe", "PhiMoe"),
    "qwen2": ("llama", "Llama"),
    "qwen2_moe": ("mixtral", "Qwen2Moe"),
    "qwen3": ("llama", "Llama"),
    "qwen3_moe": ("mixtral", "Qwen3Moe"),
    "qwen3_5_moe_text": ("qwen_next", "Qwen35Moe"),
    "qwen3_5_text": ("qwen_next", "Qwen35"),
    "qwen3_next": ("qwen_next", "Qwen3Next"),
    "seed_oss": ("llama_variants", "SeedOss"),
    "smollm3": ("llama", "Llama"),
    "stablelm": ("stablelm", "StableLm"),
    "starcoder2": ("llama_variants", "Starcoder2"),
}

# families without a KV cache on their tapes; generation uses the plain block for them, or rejects them
WITHOUT_CACHE = frozenset({"apertus", "gemma4_text", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
WITH_CACHE = frozenset(FAMILIES) - WITHOUT_CACHE
TRACED = f"On one GPU and under FSDP2 `memcalc estimate` and `memcalc trace` run it: {installation('hf')}."
# families where PEFT moves adapters of dense MLPs to the stacked experts (PEFT 0.21
# utils/transformers_weight_conversion.py)
ADAPTERS_MOVE = frozenset(
    {"deepseek_v2", "deepseek_v3", "ernie4_5_moe", "flex_olmo", "glm4_moe", "olmoe", "qwen3_moe", "qwen3_next"}
)


@cache
def family_class(family: str) -> type[Family]:
    """Return the class that writes the tapes of a family of `FAMILIES`."""
    module, name = FAMILIES[family]
    found: type[Family] = getattr(import_module(f"{__package__}.{module}"), name)
    return found


def is_written(c: BlockStructure) -> bool:
    """Return whether the modules of a run have formulas."""
    return (
        c.family is not None
        and c.family in FAMILIES
        and not _moves_adapters(c)
        and not family_class(c.family).lacks_kernel(c)
    )


def _moves_adapters(c: BlockStructure) -> bool:
    targets = () if c.linears.adapters is None else c.linears.adapters.targets
    return c.family in ADAPTERS_MOVE and not set(MLP_TARGETS).isdisjoint(targets)


def write(c: BlockStructure, part: str) -> tuple[Tape, Tensor | None]:
    """Return the tape of one part of a family's model, and its output.

    Raises:
        InputError: the family's modules have no formulas.
    """
    tape = Tape(saved_component=Component.LOGITS_AND_LOSS) if part == "head" else Tape()
    family = _family_of(c)(c, tape, experts=part == "expert layer")
    if part == "embedding":
        return tape, family.embedding()
    if part == "head":
        family.head()
        return tape, None
    output = family.layer()
    assert tape.entry is not None
    # The model's loop over layers references a layer's input until it returns, and the layer what attention returns.
    tape.still_referenced(tape.entry, *family.weights)
    if family.names_returned:
        tape.live.handed.update(weights.storage for weights in family.weights)
    return tape, output


def write_shared_tables(c: BlockStructure) -> Tape:
    """Return the tape of only the tensors that all layers share.

    Raises:
        InputError: the family's modules have no formulas.
    """
    tape = Tape()
    _family_of(c)(c, tape).shared_tables()
    return tape


def _family_of(c: BlockStructure) -> type[Family]:
    if c.family is not None and c.family in FAMILIES and (why := family_class(c.family).lacks_kernel(c)):
        raise InputError(
            f"PyTorch's attention = {c.attention.kernel} has no kernel for {c.family}, {why}.",
            "Set training.attention: eager or, where it fits, memory-efficient, or implementation: plain.",
            "training.attention",
        )
    if _moves_adapters(c):
        raise InputError(
            f"Adapters on the MLPs of {c.family} are not modelled: PEFT puts them on the stacked experts.",
            f"Set training.lora.target_modules: attention, or set implementation: plain. {TRACED}",
            "training.lora.target_modules",
        )
    if c.family is None or c.family not in FAMILIES:
        raise InputError(
            f"implementation = huggingface is not modelled for architecture = {c.family or 'none'}.",
            f"Modelled are {', '.join(sorted(FAMILIES))}; or set implementation: plain. {TRACED}",
            "training.implementation",
        )
    return family_class(c.family)
