"""Engines that shard a step across ranks (DDP, FSDP2, DeepSpeed, Megatron-LM): their buffers besides the shards."""
