"""Local data for training scripts: configs, a tokenizer, texts and tokens that mean nothing but have the real sizes.

No weights: `dry-run --random-weights` makes them from the configs.
"""

from __future__ import annotations

import array
import base64
import itertools
import json
import math
import pickle
import random
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Published config.json files, as far as they decide sizes: huggingface.co/meta-llama/Llama-3.2-1B,
# Qwen/Qwen3-4B-Instruct-2507, google-bert/bert-base-cased and distilbert/distilbert-base-uncased.
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": 28996,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
QWEN3_4B = LLAMA_1B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
}
DISTILBERT = {
    "architectures": ["DistilBertForMaskedLM"],
    "model_type": "distilbert",
    "vocab_size": 30522,
    "dim": 768,
    "hidden_dim": 3072,
    "n_layers": 6,
    "n_heads": 12,
    "max_position_embeddings": 512,
}
# By the name of a folder: a program that names a model of the hub finds it here, as a local one.
MODELS = {
    "llama-1b": LLAMA_1B,
    "llama-8b": LLAMA_8B,
    "bert-base": BERT,
    "NousResearch/Llama-3.2-1B": LLAMA_1B,
    "Qwen/Qwen3-4B-Instruct-2507": QWEN3_4B,
    "distilbert/distilbert-base-uncased": DISTILBERT,
}

WORDS = 4096  # in a long text: more than any sequence here
ANSWER = 256  # words in an instruction and in its answer, where a program drops what is longer than its sequence
TEXTS = 64
PICTURE = 256  # pixels a side: no program here asks for more
CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def make(folder: Path) -> None:
    """Everything that the cases of dry_runs.yaml read."""
    random.seed(0)
    for name, config in MODELS.items():
        write_json(folder / name / "config.json", config)
        write_tokenizer(folder / name, int(str(config["vocab_size"])))
    write_weights(folder / "llama-1b", LLAMA_1B)  # for loaders other than transformers
    write_tiktoken(folder / "llama-1b" / "original" / "tokenizer.model", 128_000)
    text = [" ".join(random.choices(NAMES, k=WORDS)) for _ in range(TEXTS)]
    write_lines(folder / "texts" / "train.jsonl", [{"text": words} for words in text])
    write_lines(folder / "roneneldan" / "TinyStories" / "train.jsonl", [{"text": words} for words in text])
    pairs = [
        {"sentence1": words[:200], "sentence2": words[200:400], "label": i % 2, "idx": i}
        for i, words in enumerate(text * 5)
    ]
    for split in ("train", "validation"):
        write_lines(folder / "nyu-mll" / "glue" / f"{split}.jsonl", pairs)
    (folder / "nyu-mll" / "glue" / "README.md").write_text(GLUE)
    (folder / "plain").mkdir()
    for name in ("a", "b"):  # litgpt keeps one file for validation
        (folder / "plain" / f"{name}.txt").write_text("\n".join(text))
    short = [" ".join(words.split()[:ANSWER]) for words in text]
    for name, given in (("alpaca", text), ("teknium/GPT4-LLM-Cleaned", short)):
        instructions = [{"instruction": words, "input": "", "output": words} for words in given]
        write_lines(folder / name / "train.jsonl", instructions)
    preferences = [{"prompt": words[:200], "chosen": words, "rejected": words[:2000]} for words in text]
    write_lines(folder / "pairs" / "train.jsonl", preferences)
    prompts = [{"prompt": [{"role": "user", "content": words[:200]}]} for words in text]
    write_lines(folder / "prompts" / "train.jsonl", prompts)
    scored = [{"sentence1": w[:200], "sentence2": w[200:400], "score": i % 6 / 5} for i, w in enumerate(text * 5)]
    for split in ("train", "validation", "test"):
        write_lines(folder / "sentence-transformers" / "stsb" / f"{split}.jsonl", scored)
    for split, kind, number in itertools.product(("train", "validation"), ("cat", "dog"), range(TEXTS // 2)):
        write_picture(folder / "images" / split / kind / f"{number}.png")
    tokens = folder / "data" / "openwebtext"  # where nanoGPT looks
    tokens.mkdir(parents=True)
    for split in ("train", "val"):
        (tokens / f"{split}.bin").write_bytes(array.array("H", random.choices(range(50257), k=200_000)).tobytes())
    (tokens / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50304}))
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(text))


NAMES = [f"w{number}" for number in range(1000)]

GLUE = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.jsonl
  - split: validation
    path: validation.jsonl
---
"""


def write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of whole words, as large as the model's vocabulary."""
    special = ["<unk>", "<s>", "</s>", "<pad>", "<|end_of_text|>"]
    words = [*special, *NAMES, *(f"x{number}" for number in range(size - len(special) - len(NAMES)))]
    added = [
        {
            "id": i,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, word in enumerate(special)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    write_json(folder / "tokenizer.json", tokenizer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    write_json(folder / "tokenizer_config.json", names | settings)


def write_json(path: Path, document: Any) -> None:
    """A JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def write_lines(path: Path, documents: list[dict[str, Any]]) -> None:
    """JSON documents, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def write_tiktoken(path: Path, size: int) -> None:
    """A file of byte pairs as tiktoken reads it: single bytes, then pairs and triples of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sequences = [*itertools.product(range(256), repeat=1), *itertools.product(range(256), repeat=2)]
    sequences += itertools.islice(itertools.product(range(256), repeat=3), size - len(sequences))
    path.write_text("".join(f"{base64.b64encode(bytes(s)).decode()} {i}\n" for i, s in enumerate(sequences)))


def write_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """A checkpoint of a Llama with nothing in it but zeros: the file has holes, which take no place on the disk."""
    d, hidden = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], d], "model.norm.weight": [d]}
    for layer in range(config["num_hidden_layers"]):
        linear = {"self_attn.q_proj": [d, d], "self_attn.k_proj": [kv, d], "self_attn.v_proj": [kv, d]}
        linear |= {"self_attn.o_proj": [d, d], "mlp.gate_proj": [hidden, d], "mlp.up_proj": [hidden, d]}
        linear |= {"mlp.down_proj": [d, hidden], "input_layernorm": [d], "post_attention_layernorm": [d]}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in linear.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)  # bytes of bf16
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:  # the format's specification: length, header, data
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_picture(path: Path) -> None:
    """A black square as PNG (RFC 2083): a header, the compressed rows, an end."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">IIBBBBB", PICTURE, PICTURE, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    rows = bytes((1 + 3 * PICTURE) * PICTURE)  # before each row a byte, its filter: none
    ends = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + ends)
