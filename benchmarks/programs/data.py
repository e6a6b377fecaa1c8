"""Data sets, configs and tokenizers of the programs: they mean nothing, but have the real sizes. No network.

A folder of models has `ORG/NAME/config.json` and a tokenizer of each hub id, so that a program that runs beside it
finds them by that id. The configs are those of memcalc's catalogue.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.synthetic import write_json, write_lines
from memcalc.catalogue.shipped import find_shipped

ROWS = 256  # of each data set: more than any program reads in its steps
LONG = 9000  # tokens of a long text: more than any sequence here
PROMPT = 60  # tokens of a prompt
PAIRS = (512, 1024, 2048, 4096)  # tokens of a whole pair's longer sequence
SHORT = (40, 900)  # tokens of a short text

# dtype of the published checkpoint, where the catalogue's entry does not have it: the hub's config.json.
DTYPES = {"EleutherAI/pythia-160m": "float16", "EleutherAI/pythia-410m": "float16", "EleutherAI/pythia-1b": "float16"}

CHAT = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def make_model(folder: Path, hub_id: str) -> Path:
    """The model's folder, made where it is not there yet.

    Raises:
        LookupError: memcalc's catalogue does not have it.
    """
    place = folder / hub_id
    if (place / "config.json").exists():
        return place
    entry = find_shipped(hub_id)
    if entry is None:
        raise LookupError(hub_id)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    dtype = {"torch_dtype": DTYPES[hub_id]} if hub_id in DTYPES else {}
    longest = entry.config.get("max_position_embeddings", entry.config.get("n_positions", 1024))
    write_bytes_tokenizer(place, int(entry.config["vocab_size"]), longest)
    write_json(place / "config.json", {"architectures": [_class_of(entry.config)], **entry.config, **tokens, **dtype})
    return place


def _class_of(config: dict[str, Any]) -> str:
    """The class of a config that does not name it, in 4.x and 5.x alike."""
    names = {"gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
    return names.get(str(config["model_type"]), "")


def make_data(folder: Path) -> None:
    """All data sets, each a directory that `datasets.load_dataset` reads.

    texts: long documents; every sequence is as long as the program lets it be.
    mixed: half of them long, half short, in turn shuffled: most batches have one of each, and are padded.
    pairs, chats, prompts, ...: the same two lengths in the columns that preference training and others read.
    conversations, long-alpaca: the long texts, as conversations of which one is chosen, and as answers.
    """
    rng = random.Random(0)
    long = [_text(rng, LONG) for _ in range(ROWS // 4)] * 4
    short = [_text(rng, rng.randint(*SHORT)) for _ in range(ROWS // 2)]
    mixed = [text for pair in zip(long, short, strict=False) for text in pair]
    rng.shuffle(mixed)
    prompts = [_text(rng, PROMPT) for _ in range(ROWS)]
    _write(folder / "texts", ({"text": text} for text in long))
    _write(folder / "mixed", ({"text": text} for text in mixed))
    _write(folder / "alpaca", _instructions(prompts, mixed))
    write_json(folder / "alpaca" / "train.json", list(_instructions(prompts, mixed)))  # as LitGPT reads it
    write_json(folder / "alpaca" / "val.json", list(_instructions(prompts, mixed[:32])))
    _write(folder / "prompts", ({"prompt": p} for p in prompts))
    _write(folder / "pairs", _pairs(prompts, long, mixed))
    for length in PAIRS:  # whole pairs of at most this length: a reward trainer drops longer ones
        whole = [_text(rng, length - PROMPT - 2) for _ in range(ROWS // 4)] * 4  # a blank before, an end behind
        halves = [text[: len(text) // (1 + number % 2)] for number, text in enumerate(whole)]
        _write(folder / f"pairs-{length}", _pairs(prompts, whole, halves))
    _write(folder / "conversations", _conversations(prompts, long, mixed))
    _write(folder / "long-alpaca", _instructions(prompts, long))


def _pairs(prompts: list[str], chosen: list[str], rejected: list[str]) -> Iterable[dict[str, str]]:
    """Columns of preference data."""
    rows = zip(prompts, chosen, rejected, strict=False)
    return ({"prompt": p, "chosen": f" {one}", "rejected": f" {two}"} for p, one, two in rows)


def _conversations(prompts: list[str], chosen: list[str], rejected: list[str]) -> Iterable[dict[str, Any]]:
    """Columns of preference data, each a whole conversation."""

    def told(prompt: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    rows = zip(prompts, chosen, rejected, strict=False)
    return ({"chosen": told(p, one), "rejected": told(p, two)} for p, one, two in rows)


def _instructions(prompts: list[str], answers: list[str]) -> Iterable[dict[str, str]]:
    """Alpaca's columns."""
    return ({"instruction": p, "input": "", "output": text} for p, text in zip(prompts, answers, strict=False))


def _text(rng: random.Random, tokens: int) -> str:
    """Each character is a token: see `write_bytes_tokenizer`."""
    return "".join(rng.choices(string.ascii_lowercase, k=tokens))


def write_bytes_tokenizer(folder: Path, size: int, longest: int) -> None:
    """A tokenizer of single bytes, as large as the model's vocabulary: of byte pairs without a merge.

    transformers 5 takes a tokenizer class by the model's type, and those of Qwen2 and others know byte pairs alone.
    """
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]  # stand for themselves
    letters += [chr(256 + number) for number in range(256 - len(letters))]  # transformers' bytes_to_unicode
    words = [*special, *letters, *(f"<{number}>" for number in range(size - len(special) - len(letters)))]
    added = [
        {"id": i, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, word in enumerate(special)
    ]
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": bytes_of_text,
        "post_processor": None,
        "decoder": bytes_of_text,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": [], "unk_token": None},
    }
    write_json(folder / "tokenizer.json", tokenizer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT,
        "model_max_length": longest,
    }
    write_json(folder / "tokenizer_config.json", names | settings)


def _write(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = list(rows)
    write_lines(folder / "train.jsonl", lines)
    write_lines(folder / "test.jsonl", lines[: ROWS // 8])
