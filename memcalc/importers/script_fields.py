"""Fields that published programs around Hugging Face's Trainer add to TrainingArguments, and their defaults.

Sources, at the commits of benchmarks/recordings/published-configs.json: lm-sys/FastChat fastchat/train/train_lora.py,
haotian-liu/LLaVA llava/train/train.py, artidoro/qlora qlora.py, QwenLM/Qwen finetune.py, OptimalScale/LMFlow
src/lmflow/args.py, shibing624/MedicalGPT training, ymcui/Chinese-LLaMA-Alpaca scripts/training.
"""

from __future__ import annotations

from typing import Any

from memcalc.frameworks.draft import FRAMEWORK, Draft, is_on
from memcalc.importers.attention import FLASH, attention
from memcalc.importers.file_format import Meaning, fact, lacking, nothing, overcounted, part, to

_FINETUNE = "training.finetune"


def _bits(draft: Draft, value: Any) -> None:
    """Set a 4-bit base; other bits are 16 and 32, and 8, which is counted in the run's dtype."""
    if value == 4:
        draft.facts["four_bits"] = True
    elif value == 8:
        draft.limit("an 8-bit base", "it is counted in the run's dtype", holds_memory=False, overcounts="precision")


def _quantized_lora(draft: Draft, value: Any) -> None:
    if is_on(value):
        draft.facts["four_bits"] = draft.facts["peft"] = True


def _modules_to_save(draft: Draft, value: Any) -> None:
    names = value if isinstance(value, list) else str(value).split(",")
    draft.values["training.lora.modules_to_save"] = [str(name).strip() for name in names]


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FIELDS: dict[str, Meaning] = {
    **fact("peft", _FINETUNE).at("lora_enable use_lora"),
    **Meaning("mapped", _FINETUNE, _quantized_lora).at("q_lora qlora use_qlora"),
    **Meaning("mapped", _FINETUNE, _bits).at("bits quant_bit load_in_kbits"),
    "full_finetune": part(_FINETUNE),
    "double_quant": to("training.qlora.double_quantization"),
    "bnb_4bit_compute_dtype": to(
        "training.qlora.compute_dtype",
        {name: dtype for long, dtype in _DTYPES.items() for name in (long, f"torch.{long}", dtype)} | {"": None},
    ),
    "quant_type": to("training.qlora.quantization", {"nf4": "nf4", "fp4": "fp4"}),
    "lora_rank": to("training.lora.rank"),
    **fact("targets", "training.lora.target_modules").at("target_modules trainable lora_modules"),
    "modules_to_save": Meaning("mapped", "training.lora.modules_to_save", _modules_to_save),
    "lora_bias": lacking("trained biases", known=("none",)),
    **nothing("loading is not estimated").at("lora_weight_path lora_model_path peft_path cache_dir low_cpu_mem_usage"),
    "grad_checkpoint": to("training.recompute", {True: "full", False: "none"}),  # of InternVL
    "reference_model_name_or_path": nothing("part of preference training"),
    "reward_model_name_or_path": lacking("a reward model"),
    **part("training.sequence_length").at("source_max_len target_max_len max_source_length max_target_length"),
    **attention({True: FLASH, False: None}).at("flash_attn use_flash_attn use_flash_attention"),
    **lacking("the vision tower and its projector").at("vision_tower vision_path mm_vision_tower custom_vision_model"),
    **overcounted("states", "frozen layers").at("tune_mm_mlp_adapter freeze_backbone freeze_llm use_llm_lora"),
    "use_lisa": overcounted("states", "LISA, which trains some layers at a time"),
    "adam8bit": overcounted("states", "an 8-bit optimizer"),
    "use_customized_optim": lacking("a customized optimizer"),
    **nothing("part of the optimizer").at("customized_optim* optim_*"),
    **nothing("part of LISA").at("lisa_*"),
    **nothing("part of the vision tower").at(
        "mm_* pretrain_mm_* freeze_mm_* mlp_path freeze_mlp unfreeze_vit_layers vision_select_layer",
        "down_sample_ratio drop_path_rate max_dynamic_patch use_thumbnail dynamic_image_size ps_version image_*",
        "use_backbone_lora pad2square tune_vision llm_type",
    ),
    **nothing("data").at(
        "lazy_preprocess version train_file* train_data_path validation_* test_file",
        "preprocessing_num_workers *_samples",
        "overwrite_cache tool_format conversation_template conv_style group_by_modality_length is_multimodal",
        "disable_group_texts text_column use_auth* add_* streaming* template_name use_data_* meta_path",
    ),
    **nothing("the sizes are the same").at("tokenizer* use_fast_tokenizer use_slow_tokenizer config_name"),
    **nothing("evaluation is not part of a step").at("mmlu_* max_new_tokens predict_with_generate"),
}
_LENGTHS = (("source_max_len", "target_max_len"), ("max_source_length", "max_target_length"))
_RANKS = ("lora_r", "lora_rank")


def place_program(draft: Draft) -> None:
    """Set the defaults of the program to which a field belongs, and whether a script with a rank trains adapters."""
    fields, facts = draft.given_fields, draft.facts
    _place_lengths(draft)
    if "target_max_len" in fields:
        _place_qlora(draft)
    elif {"vision_tower", "mm_vision_select_layer"} <= fields.keys():  # LLaVA: weights in bf16, every linear layer
        _place_lora(draft, rank=64, dropout=0.05, targets="all")
        if is_on(facts.get("bf16")):
            facts.setdefault("weights", "bfloat16")
    elif "use_lora" in fields and "lazy_preprocess" in fields:  # Qwen: c_attn, c_proj, w1 and w2 are all linear layers
        _place_lora(draft, rank=64, dropout=0.05, targets="all")
        if is_on(fields.get("q_lora")):
            draft.limit("a base quantized by GPTQ", "NF4 is counted", holds_memory=True)
        elif is_on(fields["use_lora"]) and "chat" not in str(fields.get("model_name_or_path")).lower():
            draft.default("training.lora.modules_to_save", ["embed_tokens", "lm_head"])
    elif "q_lora" in fields and "use_lora" not in fields:  # FastChat's train_lora.py has adapters always
        facts["peft"] = True
        _place_lora(draft, rank=8, dropout=0.05, targets=["q_proj", "v_proj"])
        if is_on(facts.get("four_bits")):
            draft.default("training.qlora.double_quantization", True)
    elif "use_qlora" in fields or "disable_group_texts" in fields:  # LMFlow
        draft.default(FRAMEWORK, "trainer")
    elif _runs_other_script(draft) and "peft" not in facts and any(name in fields for name in _RANKS):
        adapts = draft.choose(_FINETUNE, "whether the script trains adapters", ("full", "lora"))
        facts["peft"] = adapts != "full"


def _runs_other_script(draft: Draft) -> bool:
    """Return whether a script's command starts a program that is not TRL's own, which has use_peft."""
    program = draft.facts.get("program")
    return program is not None and not str(program).startswith("trl ")


def _place_lengths(draft: Draft) -> None:
    """Set the length of a sequence that is a prompt and an answer."""
    for names in _LENGTHS:
        lengths = [draft.given_fields.get(name) for name in names]
        if all(type(length) is int for length in lengths):
            draft.default("training.sequence_length", sum(lengths))


def _place_lora(draft: Draft, *, rank: int, dropout: float, targets: object) -> None:
    draft.default(FRAMEWORK, "trainer")
    facts = draft.facts
    facts.setdefault("targets", targets)
    half = next((name for name in ("bf16", "fp16") if is_on(facts.get(name))), "fp32")
    draft.default("training.qlora.compute_dtype", half)  # bnb_4bit_compute_dtype is that of the step
    for name, value in (("rank", rank), ("alpha", 16), ("dropout", dropout)):
        draft.default(f"training.lora.{name}", value)


def _place_qlora(draft: Draft) -> None:
    """Set the defaults of qlora.py: 4-bit weights, adapters in bf16 on every linear layer, and checkpoints."""
    facts, fields = draft.facts, draft.given_fields
    if not is_on(fields.get("full_finetune")):
        facts["peft"] = True
        facts.setdefault("four_bits", fields.get("bits", 4) == 4)
    _place_lora(draft, rank=64, dropout=0.0, targets="all")
    if is_on(facts.get("four_bits")):
        draft.default("training.qlora.double_quantization", True)
    facts.setdefault("optimizer", "paged_adamw_32bit")
    facts.setdefault("clipping", 0.3)
    draft.default("training.micro_batch_size", 1)
    draft.default("training.gradient_accumulation_steps", 16)
    draft.default("training.recompute", "full")
    facts.setdefault("weights", "bfloat16" if is_on(facts.get("bf16")) else "float32")
    if is_on(facts.get("bf16")):  # get_accelerate_model: adapters and the weights that are not in 4 bits
        draft.default("training.lora.base_dtype", "compute")
        draft.default("training.lora.adapter_dtype", "compute")
