"""Configurations as files, read and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load
from memcalc.spec.spec import Spec

SIZES = "{l: 4, d: 64, h: 4, V: 100}"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
}


def read(folder: Path, text: str | bytes, *overrides: str, name: str = "run.yaml") -> Spec:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(file, overrides)


def refusal(folder: Path, text: str | bytes, *overrides: str, name: str = "run.yaml") -> str:
    """The whole message, which always has a remedy; paths are relative to `folder`.

    The message names the file by the path that was given.
    """
    with pytest.raises(InputError) as caught:
        read(folder, text, *overrides, name=name)
    assert caught.value.remedy
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert message.startswith((f"{folder / name}:", "--"))
    return message.replace(f"{folder}/", "")
