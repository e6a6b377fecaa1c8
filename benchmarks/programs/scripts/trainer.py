"""Fine-tune a causal language model with transformers' Trainer: python train.py config.yaml"""

import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Optional

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    dataset_name: str = "data"
    torch_dtype: Optional[str] = None
    attn_implementation: Optional[str] = None
    block_size: Optional[int] = field(default=None, metadata={"help": "Texts are joined and cut into such blocks."})
    max_seq_length: Optional[int] = field(default=None, metadata={"help": "Texts are cut here, and padded in a batch."})
    load_in_4bit: bool = False
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: Optional[str] = None


def main():
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    script_args, training_args = parser.parse_yaml_file(sys.argv[1])

    loading = {}
    if script_args.torch_dtype is not None:
        loading["torch_dtype"] = (
            script_args.torch_dtype if script_args.torch_dtype == "auto" else getattr(torch, script_args.torch_dtype)
        )
    if script_args.attn_implementation is not None:
        loading["attn_implementation"] = script_args.attn_implementation
    if script_args.load_in_4bit:
        from transformers import BitsAndBytesConfig

        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(script_args.model_name_or_path, **loading)
    if script_args.use_peft:
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

        if script_args.load_in_4bit:
            model = prepare_model_for_kbit_training(
                model, use_gradient_checkpointing=training_args.gradient_checkpointing
            )
        elif training_args.gradient_checkpointing:
            model.enable_input_require_grads()
        model = get_peft_model(
            model,
            LoraConfig(
                r=script_args.lora_r,
                lora_alpha=script_args.lora_alpha,
                lora_dropout=script_args.lora_dropout,
                target_modules=script_args.lora_target_modules,
                task_type="CAUSAL_LM",
            ),
        )

    data = load_dataset("json", data_files={s: f"{script_args.dataset_name}/{s}.jsonl" for s in ("train", "test")})
    if script_args.block_size:
        size = script_args.block_size

        def group(examples):
            joined = list(chain(*examples["input_ids"]))
            blocks = [joined[i : i + size] for i in range(0, len(joined) // size * size, size)]
            return {"input_ids": blocks, "attention_mask": [[1] * size] * len(blocks), "labels": blocks}

        data = data.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")
        data = data.map(group, batched=True)
        collator = default_data_collator
    else:
        data = data.map(
            lambda rows: tokenizer(rows["text"], truncation=True, max_length=script_args.max_seq_length),
            batched=True,
            remove_columns="text",
        )
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["test"] if training_args.do_eval or training_args.eval_strategy != "no" else None,
        data_collator=collator,
    )
    trainer.train()


if __name__ == "__main__":
    main()
