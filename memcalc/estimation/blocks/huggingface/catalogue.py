"""The families of transformers whose modules are written down, and the tapes of their parts."""

from __future__ import annotations

from memcalc.errors import InputError
from memcalc.estimation.blocks.huggingface.bloom import Bloom
from memcalc.estimation.blocks.huggingface.codegen import CodeGen
from memcalc.estimation.blocks.huggingface.cohere import Cohere, Cohere2
from memcalc.estimation.blocks.huggingface.ernie import Ernie4Moe
from memcalc.estimation.blocks.huggingface.falcon import Falcon
from memcalc.estimation.blocks.huggingface.family import Family
from memcalc.estimation.blocks.huggingface.gemma import Gemma, Gemma2, Gemma3
from memcalc.estimation.blocks.huggingface.glm import Glm, Glm4
from memcalc.estimation.blocks.huggingface.gpt2 import Gpt2
from memcalc.estimation.blocks.huggingface.gpt_bigcode import GptBigcode
from memcalc.estimation.blocks.huggingface.gpt_neo import GptNeo
from memcalc.estimation.blocks.huggingface.gpt_neox import GptNeox
from memcalc.estimation.blocks.huggingface.gpt_oss import GptOss
from memcalc.estimation.blocks.huggingface.gptj import Gptj
from memcalc.estimation.blocks.huggingface.latent import DeepseekV2, DeepseekV3
from memcalc.estimation.blocks.huggingface.llama import Llama
from memcalc.estimation.blocks.huggingface.llama4 import Llama4
from memcalc.estimation.blocks.huggingface.mixtral import GraniteMoe, Mixtral, Qwen2Moe, Qwen3Moe
from memcalc.estimation.blocks.huggingface.mpt import Mpt
from memcalc.estimation.blocks.huggingface.multiplied import Ernie4, Granite, SeedOss, Starcoder2
from memcalc.estimation.blocks.huggingface.nanochat import NanoChat
from memcalc.estimation.blocks.huggingface.olmo import Exaone4, Olmo, Olmo2, Olmo3, Olmoe
from memcalc.estimation.blocks.huggingface.opt import Opt
from memcalc.estimation.blocks.huggingface.phi import Phi
from memcalc.estimation.blocks.huggingface.phi3 import Phi3
from memcalc.estimation.blocks.huggingface.phimoe import PhiMoe
from memcalc.estimation.blocks.huggingface.sigmoid import Glm4Moe, MiniMaxM2
from memcalc.estimation.blocks.huggingface.stablelm import StableLm
from memcalc.estimation.blocks.structure import Structure
from memcalc.estimation.tape import Tape, Tensor
from memcalc.ledger.component import Component
from memcalc.spec.finetuning import MLP_TARGETS

FAMILIES: dict[str, type[Family]] = {
    "arcee": Llama,
    "bloom": Bloom,
    "codegen": CodeGen,
    "cohere": Cohere,
    "cohere2": Cohere2,
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
    "ernie4_5": Ernie4,
    "ernie4_5_moe": Ernie4Moe,
    "exaone4": Exaone4,
    "falcon": Falcon,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "glm": Glm,
    "glm4": Glm4,
    "glm4_moe": Glm4Moe,
    "gpt2": Gpt2,
    "gpt_bigcode": GptBigcode,
    "gpt_neo": GptNeo,
    "gpt_neox": GptNeox,
    "gpt_oss": GptOss,
    "gptj": Gptj,
    "granite": Granite,
    "granitemoe": GraniteMoe,
    "llama": Llama,
    "llama4_text": Llama4,
    "minimax_m2": MiniMaxM2,
    "mistral": Llama,
    "mixtral": Mixtral,
    "mpt": Mpt,
    "nanochat": NanoChat,
    "olmo": Olmo,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "olmoe": Olmoe,
    "opt": Opt,
    "phi": Phi,
    "phi3": Phi3,
    "phimoe": PhiMoe,
    "qwen2": Llama,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Llama,
    "qwen3_moe": Qwen3Moe,
    "seed_oss": SeedOss,
    "smollm3": Llama,
    "stablelm": StableLm,
    "starcoder2": Starcoder2,
}

# Those whose tapes know a cache of keys and values; of others the plain block stands for what generates.
WITH_CACHE = frozenset({"gpt2", "llama", "mistral", "qwen2", "qwen3"})
TRACED = "On one GPU and under FSDP2 `memcalc estimate` and `memcalc trace` run it: pip install 'llm-memcalc[hf]'."
# Of which PEFT moves adapters of dense MLPs to the stacked experts (PEFT 0.21 utils/transformers_weight_conversion.py).
ADAPTERS_MOVE = frozenset({"deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "olmoe", "qwen3_moe"})


def is_written(c: Structure) -> bool:
    """Whether the modules of a run are written down."""
    return c.family in FAMILIES and not _moves_adapters(c) and not FAMILIES[c.family].lacks_kernel(c)


def _moves_adapters(c: Structure) -> bool:
    targets = () if c.adapters is None else c.adapters.targets
    return c.family in ADAPTERS_MOVE and not set(MLP_TARGETS).isdisjoint(targets)


def write(c: Structure, part: str) -> tuple[Tape, Tensor | None]:
    """The tape of one part of a family's model, and its output.

    Raises:
        InputError: the family's modules are not written down.
    """
    tape = Tape(kind=Component.LOGITS_AND_LOSS) if part == "head" else Tape()
    family = _family_of(c)(c, tape, experts=part == "expert layer")
    if part == "embedding":
        return tape, family.embedding()
    if part == "head":
        family.head()
        return tape, None
    output = family.layer()
    assert tape.entry is not None
    # The model's loop over layers holds a layer's input until it returns, and the layer what attention returns.
    tape.still_named(tape.entry, *family.weights)
    if family.names_returned:
        tape.handed.update(weights.storage for weights in family.weights)
    return tape, output


def write_shared_tables(c: Structure) -> Tape:
    """The tape of what all layers share alone.

    Raises:
        InputError: the family's modules are not written down.
    """
    tape = Tape()
    _family_of(c)(c, tape).shared_tables()
    return tape


def _family_of(c: Structure) -> type[Family]:
    if c.family in FAMILIES and (why := FAMILIES[c.family].lacks_kernel(c)):
        raise InputError(
            f"PyTorch's attention = {c.attention} has no kernel for {c.family}, {why}.",
            "Set training.attention: eager or, where it fits, memory-efficient, or implementation: plain.",
            "training.attention",
        )
    if _moves_adapters(c):
        raise InputError(
            f"Adapters beside the MLPs of {c.family} are not modelled: PEFT puts them beside its stacked experts.",
            f"Set training.lora.target_modules: attention, or set implementation: plain. {TRACED}",
            "training.lora.target_modules",
        )
    if c.family not in FAMILIES:
        raise InputError(
            f"implementation = huggingface is not modelled for architecture = {c.family or 'none'}.",
            f"Modelled are {', '.join(sorted(FAMILIES))}; or set implementation: plain. {TRACED}",
            "training.implementation",
        )
    family = FAMILIES[c.family]
    if family.eager_only and c.attention != "eager":
        raise InputError(
            f"transformers' {c.family} has eager attention only, but attention = {c.attention}.",
            "Set training.attention: eager.",
            "training.attention",
        )
    return family
