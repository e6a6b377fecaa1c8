"""Whether the batches of a program have different lengths: each as long as its longest sequence, unless it packs."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft

FIELD = "training.variable_lengths"
NOTE = (
    "assuming that the data give batches of different lengths, which fragments memory; if all are of the same length: "
    "--set variable_lengths=false"
)


def place_lengths(draft: Draft, *, packs: bool = False) -> None:
    """Set that batches have different lengths, which the data decide, unless the program packs every sequence.

    Args:
        draft: the configuration being read.
        packs: whether the program concatenates texts to sequences that are all of the same length.
    """
    if packs or draft.given(FIELD) is not None:
        return
    draft.default(FIELD, True)
    draft.notes.append(NOTE)
