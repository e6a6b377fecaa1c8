"""Changes that axolotl makes to a loaded model (axolotl 0.19)."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft, is_on
from memcalc.frameworks.weights import placed_config
from memcalc.spec.finetuning import FUSED_FAMILIES

# Families with norms called ln_1, ln_2 and ln_f, and the subset with an untied wte.
_WITHOUT_NORM = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen")
_UNTIED_WTE = ("gptj", "codegen")
# Families of `FUSED_FAMILIES` with one scale of attention, and with a sliding window only if their config asks for it.
_WITHOUT_WINDOW = ("gemma", "hunyuan_v1_dense", "llama", "qwen2", "qwen3", "smollm3")
_PRESETS = {
    "gpt2": "gpt2",
    "gpt-neo-": "gpt_neo",
    "gpt-neox-": "gpt_neox",
    "pythia-": "gpt_neox",
    "gpt-j-": "gptj",
    "codegen-": "codegen",
    "starcoder": "gpt_bigcode",
}


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
    family = _family(draft)
    modules = ["lm_head"] if family in _UNTIED_WTE else _embedding_and_head(draft, family)
    draft.default("training.fp32_modules", [*modules, *(() if family in _WITHOUT_NORM else ("norm",))])


def _embedding_and_head(draft: Draft, family: str) -> list[str]:
    """Return the embedding and the LM head, as far as axolotl finds them by name.

    loaders/utils.py, get_linear_embedding_layers: the LM head of gpt_neox is embed_out, as transformers named it before
    5.14.
    """
    renamed = family == "gpt_neox" and draft.has("transformers", "5.14")
    return ["embed_tokens"] if renamed else ["embed_tokens", "lm_head"]


def _family(draft: Draft) -> str:
    """Return the model's family, of a config or of a preset; "" for one with the usual names of modules."""
    preset = str(draft.values.get("preset"))
    named = next((found for start, found in _PRESETS.items() if preset.startswith(start)), "")
    return str(placed_config(draft).get("model_type") or named)


def _has_adapters(draft: Draft) -> bool:
    """Return whether adapters train, from the file or from additional settings."""
    blocks = ("training.lora", "training.qlora")
    return draft.given("training.finetune") not in (None, "full") or any(
        path.startswith(blocks) for path in draft.overridden
    )


def place_loading_of_adapters(draft: Draft) -> None:
    """Set what axolotl does with a model before its adapters train.

    The embedding's output requires a gradient (loaders/adapter.py, load_adapter). Embedding, LM head and norms are
    cast to fp32 and back (loaders/model.py, _configure_embedding_dtypes): with a 4-bit base on the GPU, otherwise
    before the model is moved there; not under FSDP. With `embeddings_skip_upcast` norms only.
    """
    finetune = draft.values.get("training.finetune")
    if finetune not in ("lora", "qlora"):
        return
    draft.default("training.lora.input_require_grads", True)
    if finetune == "qlora" and not draft.given("parallelism.zero_stage"):
        skips = is_on(draft.given_fields.get("embeddings_skip_upcast"))
        modules = [] if skips else _embedding_and_head(draft, _family(draft))
        draft.default("training.lora.fp32_on_load", [*modules, "norm"])


def place_packed_samples(draft: Draft) -> None:
    """Set what torch's sdpa gets for rows of several samples, which it keeps apart.

    loaders/patch_manager.py, _apply_sdpa_varlen_patch: flash attention of sequences in a row, with keys and values for
    every query head, for models without a sliding window and with torch from 2.10 on (monkeypatch/attention/
    sdpa_varlen.py). Others get a mask: `place_padding`.
    """
    fields = draft.given_fields
    config = placed_config(draft)
    if (
        is_on(fields.get("sample_packing"))
        and draft.given("training.attention") == "sdpa"
        and draft.given("training.implementation") == "huggingface"
        and is_on(fields.get("sdpa_varlen", True))
        and config.get("model_type") in _WITHOUT_WINDOW
        and not is_on(config.get("use_sliding_window"))
    ):
        draft.default("training.repeat_kv", True)
        draft.default("training.padding_mask", "none")


def place_fused_adapters(draft: Draft) -> None:
    """Set the parts of a layer that axolotl's own autograd functions run, where they are modelled; else note them.

    utils/schemas/config.py, check_auto_enable_lora_kernels: all by default, with LoRA or QLoRA, unless the file sets
    one of them, has an 8-bit base, remote code or reinforcement learning. monkeypatch/lora_kernels.py replaces the
    source of attention and the forward of MLPs. FSDP2's hooks do not see their weights.
    """
    fields, parts = draft.given_fields, ("qkv", "o", "mlp")
    adapted = draft.values.get("training.finetune") in ("lora", "qlora")
    if not adapted or is_on(fields.get("load_in_8bit")) or draft.given("training.implementation") != "huggingface":
        return
    by_file = [name for name in fields if name.startswith("lora_") and name.endswith("_kernel")]
    default = not (by_file or fields.get("rl") or is_on(fields.get("trust_remote_code")))
    asked = [part for part in parts if is_on(fields.get(f"lora_{part}_kernel", default))]
    if not asked:
        return
    if placed_config(draft).get("model_type") in FUSED_FAMILIES and not draft.given("parallelism.zero_stage"):
        draft.default("training.lora.fused", asked)
    else:
        draft.limit(
            "fused kernels of adapters",
            "counted as PEFT's modules, which save more",
            holds_memory=False,
            overcounts="activations",
        )
