"""Train a GPT from scratch, in the manner of nanoGPT: python train.py --n_layer=12 --batch_size=12 --dtype=bfloat16"""

import argparse
import contextlib
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.n_head, self.dropout = c.n_head, c.dropout
        self.resid_dropout = nn.Dropout(c.dropout)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.n_embd, bias=c.bias), Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.n_embd, bias=c.bias), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.drop, self.checkpointing = nn.Dropout(c.dropout), c.checkpointing
        self.h = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.ln_f = nn.LayerNorm(c.n_embd, bias=c.bias)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"batch_size": 12, "gradient_accumulation_steps": 5, "max_iters": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    for name in ("bias", "pure", "fused", "checkpointing"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()

    ddp = int(os.environ.get("RANK", -1)) != -1
    local = 0
    if ddp:
        init_process_group(backend="nccl")
        local = int(os.environ["LOCAL_RANK"])
        args.gradient_accumulation_steps = max(1, args.gradient_accumulation_steps // int(os.environ["WORLD_SIZE"]))
    device = f"cuda:{local}"
    torch.cuda.set_device(device)
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    ptdtype = getattr(torch, args.dtype)

    model = GPT(args).to(device)
    if args.pure:
        model = model.to(ptdtype)
    ctx = contextlib.nullcontext() if args.pure else torch.amp.autocast(device_type="cuda", dtype=ptdtype)
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), **({"fused": True} if args.fused else {}))
    if ddp:
        model = DistributedDataParallel(model, device_ids=[local])

    def get_batch():
        x = torch.randint(args.vocab_size, (args.batch_size, args.block_size + 1))
        x, y = x[:, :-1].contiguous(), x[:, 1:].contiguous()
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)

    X, Y = get_batch()
    for iter_num in range(args.max_iters):
        lr = 6e-5 + 0.5 * (1 + math.cos(math.pi * iter_num / args.max_iters)) * 5.4e-4
        for group in optimizer.param_groups:
            group["lr"] = lr
        for micro_step in range(args.gradient_accumulation_steps):
            if ddp:
                model.require_backward_grad_sync = micro_step == args.gradient_accumulation_steps - 1
            with ctx:
                logits, loss = model(X, Y)
                loss = loss / args.gradient_accumulation_steps
            X, Y = get_batch()
            scaler.scale(loss).backward()
        if args.grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % 10 == 0 and local == 0:
            print(f"iter {iter_num}: loss {loss.item() * args.gradient_accumulation_steps:.4f}")
    if ddp:
        destroy_process_group()


if __name__ == "__main__":
    main()
