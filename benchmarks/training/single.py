"""Training steps on one GPU, with one thing at a time varied: python single.py KIND [VARIANT]."""

from __future__ import annotations

import sys
from collections.abc import Callable

import models
import torch

kind, variant = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "plain"
amp = variant.startswith("amp")
model = models.make(kind, torch.float32 if amp else torch.bfloat16)
ids = models.tokens(kind)
scaler = torch.amp.GradScaler(enabled=variant == "amp-fp16")
dtype = torch.float16 if variant == "amp-fp16" else torch.bfloat16
micro_batches = 4 if variant == "accumulate" else 1


def loss_of(ids: torch.Tensor) -> torch.Tensor:
    """Under autocast where that is requested."""
    with torch.autocast("cuda", dtype, enabled=amp):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


def optimizer_of() -> torch.optim.Optimizer:
    """AdamW, in one of its implementations."""
    if variant in {"lora", "qlora", "8-bit"}:
        import bitsandbytes

        parameters = [p for p in model.parameters() if p.requires_grad]
        return bitsandbytes.optim.AdamW8bit(parameters) if variant == "8-bit" else torch.optim.AdamW(parameters)
    named = {"fused": {"fused": True}, "for-loop": {"foreach": False}, "cuda-graph": {"capturable": True}}
    return torch.optim.AdamW(model.parameters(), **named.get(variant, {}))


if variant == "recompute":
    model.gradient_checkpointing_enable()
if variant in {"lora", "qlora"}:
    import peft
    import transformers

    if variant == "qlora":
        bits = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        name = {"llama": "llama-1b"}[kind]  # with --random-weights
        model = transformers.AutoModelForCausalLM.from_pretrained(name, quantization_config=bits, device_map="cuda")
        model = peft.prepare_model_for_kbit_training(model.train())
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
if (
    "max-autotune" in variant
):  # every candidate takes equal time here: one of Triton's stands for the twenty of a product
    import torch._inductor.config as inductor

    inductor.test_configs.max_mm_configs = 1
if variant.startswith("blocks"):
    for block in models.blocks(model):
        block.compile(mode=variant.removeprefix("blocks").removeprefix("-") or None)
compiled: Callable[[torch.Tensor], torch.Tensor] = loss_of
if variant.startswith("compile"):
    compiled = torch.compile(loss_of, mode=variant.removeprefix("compile").removeprefix("-") or None)
optimizer = optimizer_of()


def step() -> None:
    """One optimizer step."""
    for _ in range(micro_batches):
        scaler.scale(compiled(ids) / micro_batches).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


if variant == "cuda-graph":
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        graph.replay()
else:
    for _ in range(3):
        step()
torch.cuda.synchronize()
