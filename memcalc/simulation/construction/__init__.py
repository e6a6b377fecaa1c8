"""What a program allocates before its first step: the model as its modules are made and loaded, its copies, the batch.

`model` has the order, with `module_buffers` for buffers; `fsdp2_loading` and `megatron` are orders of engines,
`quantization` (bitsandbytes) and `nf4_tensors` (torchao) those of 4-bit weights. All yield `initial_tensors`.
"""
