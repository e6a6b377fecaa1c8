"""Hugging Face's Trainer on random tokens: python trainer.py CONFIG.json ARGUMENTS.json, three updates.

Besides TrainingArguments' own fields the arguments may have TRL's of a model: `dtype` of the weights,
`attn_implementation`, `max_length` of the sequences, and `use_peft` with `lora_*`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

config = transformers.AutoConfig.from_pretrained(sys.argv[1])
arguments: dict[str, Any] = json.loads(Path(sys.argv[2]).read_text())
length = arguments.pop("max_length")
adapters = {key.removeprefix("lora_"): arguments.pop(key) for key in list(arguments) if key.startswith("lora_")}
named = {key: arguments.pop(key) for key in ("dtype", "attn_implementation") if key in arguments}
model = transformers.AutoModelForCausalLM.from_config(config, **named)
if arguments.pop("use_peft", False):
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapters))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As many samples as anyone wants."""

    def __len__(self) -> int:
        """Of the data set."""
        return 2**20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample."""
        tokens = torch.randint(0, config.vocab_size, (length,))
        return {"input_ids": tokens, "labels": tokens.clone()}


own = transformers.TrainingArguments("out", max_steps=3, report_to=[], save_strategy="no", **arguments)
transformers.Trainer(model=model, args=own, train_dataset=Tokens()).train()
