"""The attention kernel of a file, and whether it supports a sliding window or gets a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memcalc.frameworks.draft import Draft
from memcalc.importers.file_format import Meaning


class Kernel(NamedTuple):
    """The values of `training.attention` and, if not the default, of `training.attention_windows`.

    `attention` is "sdpa" for the kernel that PyTorch picks for the model and the dtype.
    """

    attention: str
    windows: str | None = None


FLASH = Kernel("flash", "kernel")  # of packages that receive the window's length
SDPA = Kernel("sdpa")  # PyTorch picks the kernel: flash where the model and the dtype allow it
EAGER = Kernel("eager")

# The values of transformers' attn_implementation (modeling_utils.py) and of axolotl. None: the default.
WORDS: dict[Any, Kernel | None] = {
    "flash_attention_2": FLASH,
    "flash_attention_3": FLASH,
    "flash": FLASH,
    "fa2": FLASH,
    "fa3": FLASH,
    "kernels-community/flash-attn2": FLASH,
    "kernels-community/flash-attn3": FLASH,
    "kernels-community/vllm-flash-attn3": FLASH,
    "sdpa": SDPA,
    "flex_attention": FLASH,  # compiled; saves the output and a sum per row, and builds its mask per block
    "eager": EAGER,
    "xformers": Kernel("memory-efficient", "kernel"),
    "auto": None,
    "disabled": EAGER,
}


def attention(words: Mapping[Any, Kernel | None] = WORDS) -> Meaning:
    """Return the meaning of a field that names an attention kernel, or switches one on."""

    def apply(draft: Draft, value: Any) -> None:
        ours = {word: kernel and kernel.attention for word, kernel in words.items()}
        draft.translate("training.attention", value, ours)
        key = value.lower() if isinstance(value, str) else value
        kernel = words.get(key) if isinstance(key, str | bool) else None
        if kernel is not None and kernel.windows is not None:
            draft.default("training.attention_windows", kernel.windows)

    return Meaning("mapped", "training.attention", apply)
