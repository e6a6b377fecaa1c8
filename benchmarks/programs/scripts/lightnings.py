"""Fine-tune a causal language model with Lightning: python train.py --model ORG/NAME --precision bf16-mixed"""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM


class Tokens(Dataset):
    def __init__(self, vocab_size, length):
        self.vocab_size, self.length = vocab_size, length

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        return torch.randint(self.vocab_size, (self.length,))


class Model(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.float32)
        self.model.config.use_cache = False
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-5, fused=self.args.fused or None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--gradient_clip_val", type=float, default=None)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--fused", action="store_true")
    args = parser.parse_args()
    model = Model(args)
    data = Tokens(model.model.config.vocab_size, args.length)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        max_epochs=1,
        accumulate_grad_batches=args.accumulate_grad_batches,
        gradient_clip_val=args.gradient_clip_val,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=args.batch_size))


if __name__ == "__main__":
    main()
