"""Notes on sequences longer than a sliding window."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.layers import fills_windows
from memcalc.spec.spec import Spec


def window_notes(spec: Spec) -> Iterator[str]:
    """Yield a note that transformers' sdpa applies sliding windows with masks."""
    if fills_windows(spec):
        yield (
            f"sequence_length = {spec.training.sequence_length} fills the window of {spec.model.sliding_window} "
            "tokens: transformers' sdpa then passes a mask to PyTorch, which rules out flash attention. With "
            "flash_attention_2 (attention_windows: kernel) there is no mask."
        )
