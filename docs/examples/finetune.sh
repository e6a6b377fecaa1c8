#!/bin/bash
# A launch script: Llama 3.1 8B in transformers' Trainer on 8 GPUs, sharded by the Accelerate config.
# memcalc estimate docs/examples/finetune.sh --gpu h100-80gb
MODEL=${1:-meta-llama/Llama-3.1-8B}
accelerate launch --config_file accelerate/zero3.yaml train.py \
    --model_name_or_path $MODEL --output_dir out --num_train_epochs 1 \
    --per_device_train_batch_size 4 --model_max_length 2048 \
    --bf16 --gradient_checkpointing True
