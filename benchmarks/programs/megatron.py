"""Megatron-LM: a shell script that starts pretrain_gpt.py, with Megatron-Core's own modules, on 1 to 4 GPUs.

Transformer Engine and Apex need a compiler for CUDA to be built, so programs here have `--transformer-impl local`.
"""

from __future__ import annotations

from benchmarks.programs.environments import MEGATRON
from benchmarks.programs.huggingface import CARDS
from benchmarks.programs.program import Draw, Family, Program, Sized

FILE = "train.sh"
SIZES = ((12, 768, 12), (24, 1024, 16), (16, 2048, 16), (24, 2048, 16))  # l, d, h
LAYOUTS = ((1, 1, 1), (2, 2, 1), (2, 1, 1), (4, 2, 1), (2, 1, 2), (2, 2, 1))  # GPUs, tensor, pipeline parallel
LLAMA = "--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm"
STYLES = (
    "--position-embedding-type learned_absolute",
    f"{LLAMA} --untie-embeddings-and-output-weights",
    f"{LLAMA} --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4",
)
RECOMPUTE = (
    "",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective",
    "",
)


def draw_program(draw: Draw) -> Program:
    """A program of 1 to 4 ranks."""
    layers, hidden, heads = draw.of("size", SIZES)
    gpus, tensor, pipeline = draw.of("layout", LAYOUTS)
    replicas = gpus // tensor // pipeline
    size = draw.of("batch", (1, 2, 4))
    length = draw.of("length", (2048, 1024, 4096))
    batches = draw.of("micro-batches", (1, 4, 2)) * pipeline
    model = [
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}",
        f"--seq-length {length} --max-position-embeddings {length}",
        draw.of("style", STYLES),
        "--attention-dropout 0.0 --hidden-dropout 0.0" if draw.of("dropout", (False, True)) else "",
        "--transformer-impl local --attention-backend unfused --no-persist-layer-norm",
        "--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-rope-fusion",
    ]
    training = [
        f"--micro-batch-size {size} --global-batch-size {size * replicas * batches} --train-iters 100",
        "--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 --clip-grad 1.0",
        draw.of("precision", ("--bf16", "--bf16", "--fp16", "")),
        draw.of("recompute", RECOMPUTE),
    ]
    parallel = [
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}",
        "--sequence-parallel" if tensor > 1 and draw.of("sequence parallel", (True, False)) else "",
        "--use-distributed-optimizer" if replicas > 1 or draw.of("distributed optimizer", (True, False)) else "",
    ]
    data = ["--mock-data --tokenizer-type NullTokenizer", f"--vocab-size {draw.of('vocabulary', (50303, 31999))}"]
    rest = ["--eval-iters 0 --eval-interval 1000 --log-interval 1 --no-create-attention-mask-in-dataloader"]
    arrays = {"MODEL": model, "TRAINING": training, "PARALLEL": parallel, "DATA": data, "REST": rest}
    lines = ["#!/bin/bash", "export CUDA_DEVICE_MAX_CONNECTIONS=1", f"GPUS_PER_NODE={gpus}", ""]
    for name, words in arrays.items():
        lines += [f"{name}_ARGS=(", *(f"    {word}" for word in words if word), ")", ""]
    lines += ["torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1 Megatron-LM/pretrain_gpt.py \\"]
    lines += [f"    ${{{name}_ARGS[@]}} \\" for name in arrays]
    lines[-1] = lines[-1].removesuffix(" \\")
    return Program(
        files={FILE: "\n".join(lines) + "\n"},
        command=f"bash {FILE}",
        card=draw.of("card", CARDS),
        gpus=gpus,
        sized=Sized(FILE, framework="megatron"),
        models=(),
        data="",
        checkout="Megatron-LM",
        options={"steps": 3},
    )


FAMILIES = (Family("megatron", MEGATRON, draw_program),)
