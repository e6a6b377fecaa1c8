"""Random configs, from slightly wrong to hopeless: `mutate(rng)` gives the bytes of one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = [path.read_text() for path in sorted(CONFIGS.glob("*.yaml"))]

NUMBERS = (
    "0 -1 1 2 3 7 64 4096 1e3 1e400 -1e-400 .nan .inf -.inf 0x7fff 0o17 0b11 1_000 007 1:30 2**10 "
    "9223372036854775808 340282366920938463463374607431768211456 -170141183460469231731687303715884105729 "
    "1.5 -0.0 1e-9 0.999999999999 +5 \uff15 \u0663"  # the last two: digits of other scripts
).split()
WORDS = [
    *"true false yes no on off null ~ none bf16 fp32 fp16 mixed-20 mixed-16 zero megatron full selective every-2".split(),
    *"every-0 every-99999999999 flash eager fused fsdp2 deepspeed ddp rope alibi swiglu h100-80gb b200 no-such".split(),
    "[]",
    "{}",
    "[1, 2, 3]",
    "[-1]",
    "[[[[]]]]",
    "{a: {b: {c: 1}}}",
    '""',
    "''",
    "2024-01-01",
    "!!float 3",
    "!!binary aGVsbG8=",
    "!!python/object/apply:os.system ['true']",
    "!!python/name:os.system",
    "*missing",
    "&anchor 5",
    "<<: *x",
    "|",
    ">",
    "🦙",
    "\u202eabc",
    "日本語",
    '"\\u0000"',
    "x" * 10_000,
    "-" * 300,
    "9" * 5_000,
]
KEYS = [
    *"name model training parallelism hardware preset hf_config architecture num_layers hidden_size".split(),
    *"num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size max_position_embeddings".split(),
    *"position_embedding normalization norms_per_layer mlp moe mla tie_word_embeddings parallel_block qk_norm".split(),
    *"micro_batch_size sequence_length gradient_accumulation_steps global_batch_size dtype recipe implementation".split(),
    *"optimizer optimizer_implementation zero_grad recompute attention dropout loss finetune lora engine".split(),
    *"data_parallel tensor_parallel pipeline_parallel context_parallel expert_parallel sequence_parallel".split(),
    *"zero_stage gpu l d h V b s num_experts q_lora_rank first_dense_layers offload fsdp schedule".split(),
    *"hiden_size numlayers micro-batch-size Model __class__ model_config".split(),
]


def mutate(rng: random.Random) -> bytes:
    """One config: a preset with a few things done to it, or a text made from nothing."""
    if rng.random() < 0.15:
        return rng.choice(HOPELESS)(rng)
    lines = rng.choice([_preset, _preset, _run])(rng)
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3, 8])):
        lines = rng.choice(EDITS)(rng, lines)
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.randbytes(rng.randrange(1, 20)) + data[at:]
    return data


def _preset(rng: random.Random) -> list[str]:
    return rng.choice(PRESETS).splitlines()


def _run(rng: random.Random) -> list[str]:
    """A preset by name with training and parallelism, mostly plausible and often contradictory."""
    degree = lambda: rng.choice([1] * 20 + [2, 2, 4, 8, 3, 64, 1000003])  # noqa: E731 -- one line of dice
    lines = [f"preset: {rng.choice(sorted(CONFIGS.glob('*.yaml'))).stem}", "training:"]
    lines += [f"  micro_batch_size: {degree()}", f"  sequence_length: {rng.choice([1, 128, 512, 1024, 2048, 2**20])}"]
    lines += [f"  recipe: {rng.choice('fp32 amp pure mixed-16 mixed-18 mixed-20 zero mt-nlg'.split())}"]
    lines += [f"  recompute: {rng.choice(['none', 'full', 'selective', 'every-3', '[0, 1]', '[999]'])}"]
    lines += [f"  optimizer: {rng.choice('sgd momentum adam adamw lion adafactor adam-8bit'.split())}", "parallelism:"]
    kinds = "data tensor pipeline context expert".split()
    lines += [f"  {kind}_parallel: {degree()}" for kind in kinds if rng.random() < 0.5]
    lines += [
        f"  zero_stage: {rng.choice([0, 0, 1, 2, 3, 4])}",
        f"  sequence_parallel: {rng.choice(['true', 'false'])}",
    ]
    return [*lines, "hardware:", f"  gpu: {rng.choice(['h100-80gb', 'a100-40gb', 't4', 'abacus'])}"]


Edit = Callable[[random.Random, list[str]], list[str]]


def _at(rng: random.Random, lines: list[str]) -> int:
    return rng.randrange(max(1, len(lines)))


def _delete(rng: random.Random, lines: list[str]) -> list[str]:
    i = _at(rng, lines)
    return lines[:i] + lines[i + 1 :]


def _duplicate(rng: random.Random, lines: list[str]) -> list[str]:
    i = _at(rng, lines)
    return lines[: i + 1] + lines[i:]


def _shuffle(rng: random.Random, lines: list[str]) -> list[str]:
    return rng.sample(lines, len(lines))


def _replace_value(values: Callable[[random.Random], str]) -> Edit:
    def edit(rng: random.Random, lines: list[str]) -> list[str]:
        i = _at(rng, lines)
        key = lines[i].partition(":")[0] if lines else "model"
        return [*lines[:i], f"{key}: {values(rng)}", *lines[i + 1 :]]

    return edit


def _new_key(rng: random.Random, lines: list[str]) -> list[str]:
    i = _at(rng, lines)
    value = rng.choice([*NUMBERS, *WORDS])
    return [*lines[:i], f"{' ' * rng.choice([0, 2, 2, 4])}{rng.choice(KEYS)}: {value}", *lines[i:]]


def _indent(rng: random.Random, lines: list[str]) -> list[str]:
    i = _at(rng, lines)
    return [*lines[:i], rng.choice(["\t", " ", "  ", "- ", "? ", "# "]) + "".join(lines[i : i + 1]), *lines[i + 1 :]]


def _block(rng: random.Random, lines: list[str]) -> list[str]:
    """A block where it does not belong, or one of a wrong kind."""
    block = rng.choice("model training parallelism hardware moe mla lora offload fsdp".split())
    return [*lines, rng.choice([f"{block}: {rng.choice(WORDS)}", f"{block}:\n  - 1\n  - 2", f"{block}:"])]


def _split(rng: random.Random, lines: list[str]) -> list[str]:
    """A second document in the same file."""
    i = _at(rng, lines)
    return [*lines[:i], rng.choice(["---", "...", "--- !!map"]), *lines[i:]]


def _cut(rng: random.Random, lines: list[str]) -> list[str]:
    text = "\n".join(lines)
    return text[: rng.randrange(len(text) + 1)].splitlines()


EDITS: list[Edit] = [
    _delete,
    _duplicate,
    _shuffle,
    _replace_value(lambda rng: rng.choice(NUMBERS)),
    _replace_value(lambda rng: rng.choice(NUMBERS)),
    _replace_value(lambda rng: str(rng.randrange(1, 2 ** rng.randrange(1, 80)))),
    _replace_value(lambda rng: rng.choice(WORDS)),
    _new_key,
    _new_key,
    _indent,
    _block,
    _split,
    _cut,
]


def _bomb(rng: random.Random) -> bytes:
    """Aliases that double at each level: a few hundred bytes that would be gigabytes when expanded."""
    levels = rng.randrange(5, 60)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join([*lines, f"model: *a{levels - 1}"]).encode()


def _merge_bomb(rng: random.Random) -> bytes:
    levels = rng.randrange(5, 30)
    lines = ["a0: &a0 {hidden_size: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, levels)]
    return "\n".join([*lines, "model:", f"  <<: *a{levels - 1}"]).encode()


def _loop(rng: random.Random) -> bytes:
    return rng.choice(
        [b"&a [*a, *a]", b"model: &m {num_layers: *m}", b"&a {model: *a}", b"&a {*a : 1}", b"model: &m\n  <<: *m"]
    )


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice([50, 500, 5_000, 100_000])
    opener, closer = rng.choice([("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", "")])
    return b"model: " * rng.randrange(2) + (opener * depth + closer * depth).encode()


def _junk(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 2, 10, 1_000, 100_000]))


def _literal(rng: random.Random) -> bytes:
    return rng.choice(
        [
            b"",
            b"\n",
            b"null",
            b"42",
            b"hello",
            b"[]",
            b"{}",
            b"---\n---\n",
            b"\xef\xbb\xbfmodel:\n",
            "model: {}\n".encode("utf-16"),
            b"model:\n\tnum_layers: 1\n",
            b"model: {num_layers: 1, num_layers: 2}",
            b"preset: ../../../etc/passwd",
            b"preset: gpt3\nmodel: {preset: gpt3}",
            b"hf_config: /dev/null",
            b"hf_config: .",
            b"hf_config: /no/such/file.json",
            b"preset: [gpt3]",
            b"1: 2\ntrue: false\nnull: null",
            b"? [model]\n: 1",
            b"%YAML 9.9\n---\nmodel: 1",
            b"model: !!set {a, b}",
            b"model: !!omap [a: 1]",
            b"model: !unknown {a: 1}",
            b'name: "\\ud800"\npreset: gpt2',
        ]
    )


HOPELESS: list[Callable[[random.Random], bytes]] = [_bomb, _merge_bomb, _loop, _deep, _junk, _literal, _literal]
