"""Train a GPT with DeepSpeed's pipeline engine: deepspeed --num_gpus 4 train.py --stages 4 --deepspeed_config FILE"""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn


class EmbeddingPipe(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.positions = nn.Embedding(args.seq_length, args.hidden_size)
        self.dropout = nn.Dropout(args.dropout)

    @property
    def weight(self):
        return self.tokens.weight

    def forward(self, batch):
        ids, positions = batch
        return self.dropout(self.tokens(ids) + self.positions(positions))


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.rate, self.heads = args.dropout, args.num_heads
        self.input_norm = nn.LayerNorm(args.hidden_size)
        self.qkv = nn.Linear(args.hidden_size, 3 * args.hidden_size)
        self.out = nn.Linear(args.hidden_size, args.hidden_size)
        self.post_norm = nn.LayerNorm(args.hidden_size)
        self.up = nn.Linear(args.hidden_size, 4 * args.hidden_size)
        self.down = nn.Linear(4 * args.hidden_size, args.hidden_size)
        self.dropout = nn.Dropout(args.dropout)

    def attention(self, x):
        batch, length, size = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv(x).split(size, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate)
        return self.out(attended.transpose(1, 2).reshape(batch, length, size))

    def forward(self, x):
        x = x + self.dropout(self.attention(self.input_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.post_norm(x)))))


class GPTModelPipe(PipelineModule):
    pass


def lm_head(module, x):
    return F.linear(x, module.weight)


def to_fp32(logits):
    return logits.float()


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(args, size):
    positions = torch.arange(args.seq_length).expand(size, -1).contiguous()
    while True:
        ids = torch.randint(args.vocab_size, (size, args.seq_length))
        yield (ids, positions), ids


def main():
    parser = argparse.ArgumentParser()
    for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length", "stages"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--partition_method", default="type:transformer")
    parser.add_argument("--checkpoint_activations", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.cuda.set_device(args.local_rank)
    deepspeed.init_distributed("nccl")
    dtype = getattr(torch, args.dtype)
    torch.set_default_dtype(dtype)
    model = GPTModelPipe(
        layers=[
            TiedLayerSpec("embed", EmbeddingPipe, args, tied_weight_attr="weight"),
            *(LayerSpec(ParallelTransformerLayerPipe, args) for _ in range(args.num_layers)),
            LayerSpec(nn.LayerNorm, args.hidden_size),
            TiedLayerSpec("embed", EmbeddingPipe, args, forward_fn=lm_head, tied_weight_attr="weight"),
            to_fp32,
        ],
        loss_fn=loss_of,
        num_stages=args.stages,
        partition_method=args.partition_method,
        activation_checkpoint_interval=int(args.checkpoint_activations),
    )
    torch.set_default_dtype(torch.float32)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    size = engine.train_micro_batch_size_per_gpu()
    if engine.stage_id > 0:  # otherwise the first message from the stage before has this shape
        engine.pipe_recv_buf = torch.empty(size, args.seq_length, args.hidden_size, dtype=dtype, device=engine.device)
    data = batches(args, size)
    for step in range(args.steps):
        loss = engine.train_batch(data)
        if step % 10 == 0 and engine.global_rank == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
