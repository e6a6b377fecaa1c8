"""Changes that axolotl makes to a loaded model (axolotl 0.19)."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft
from memcalc.frameworks.switches import is_on
from memcalc.frameworks.weights import placed_config

# Families with norms called ln_1, ln_2 and ln_f, and the subset with an untied wte.
_WITHOUT_NORM = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen")
_UNTIED_WTE = ("gptj", "codegen")
_PRESETS = {"gpt2": "gpt2", "gpt-neo-": "gpt_neo", "gpt-j-": "gptj", "codegen-": "codegen", "starcoder": "gpt_bigcode"}


def place_fp32_modules(draft: Draft) -> None:
    """Set embedding, LM head and norms in fp32 for full fine-tuning in bf16 or fp16.

    loaders/model.py, _configure_embedding_dtypes: not with FSDP, nor with flash attention, cut cross-entropy or
    adapters, which cast back. _convert_embedding_modules_dtype selects modules by name: lm_head, the family's embedding
    (embed_tokens), and all names with "norm".
    """
    casts = draft.values.get("training.attention_windows") == "kernel" or is_on(draft.facts.get("cut_cross_entropy"))
    if casts or _has_adapters(draft) or draft.given("parallelism.zero_stage"):
        return
    words = ("training.implementation", "training.recipe", "training.autocast")
    if [draft.given(path) for path in words] != ["huggingface", "pure", True]:
        return
    preset = str(draft.values.get("preset"))
    family = placed_config(draft).get("model_type") or next(
        (found for start, found in _PRESETS.items() if preset.startswith(start)), ""
    )
    modules = ["lm_head"] if family in _UNTIED_WTE else ["embed_tokens", "lm_head"]
    draft.default("training.fp32_modules", [*modules, *(() if family in _WITHOUT_NORM else ("norm",))])


def _has_adapters(draft: Draft) -> bool:
    """Return whether adapters train, from the file or from additional settings."""
    blocks = ("training.lora", "training.qlora")
    return draft.given("training.finetune") not in (None, "full") or any(
        path.startswith(blocks) for path in draft.overridden
    )


def note_kernels(draft: Draft) -> None:
    """Note the adapter kernels that axolotl enables by default, which save less than PEFT's modules.

    utils/schemas/config.py: for LoRA and QLoRA, unless the file sets each to false or has an 8-bit base; on several
    GPUs not under FSDP1.
    """
    kernels = [f"lora_{part}_kernel" for part in ("mlp", "qkv", "o")]
    asked = all(draft.given_fields.get(name, True) for name in kernels) and not is_on(
        draft.given_fields.get("load_in_8bit")
    )
    if asked and draft.values.get("training.finetune") in ("lora", "qlora"):
        draft.limit("fused kernels of adapters", "counted as PEFT's modules, which save more", holds_memory=False)
