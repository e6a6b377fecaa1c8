"""Fine-tune a causal language model with DeepSpeed: deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json"""

import argparse

import deepspeed
import torch
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=getattr(torch, args.dtype))
    model.config.use_cache = False
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    engine.train()
    for step in range(args.steps * engine.gradient_accumulation_steps()):
        shape = (engine.train_micro_batch_size_per_gpu(), args.seq_length)
        ids = torch.randint(model.config.vocab_size, shape, device=engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and engine.global_rank == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
