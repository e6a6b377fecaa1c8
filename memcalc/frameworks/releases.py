"""The releases of packages that decide memory: those that are told apart where a file does not name one."""

from __future__ import annotations

from typing import NamedTuple


class Package(NamedTuple):
    """A package and the releases that differ in memory.

    Args:
        name: as people call it.
        candidates: one release for each way in which the package behaved, the newest first: the last release before
            the next change. Older ones than the last are known only where a run names them.
    """

    name: str
    candidates: tuple[str, ...]

    @property
    def newest(self) -> str:
        """The release whose fields and defaults memcalc has."""
        return self.candidates[0]


RELEASES = {
    # 5.0: weights are loaded in the checkpoint's dtype (modeling_utils.py).
    # 4.49: the loss shifts labels, and no longer copies the logits (loss/loss_utils.py).
    "transformers": Package("transformers", ("5.23.0", "4.57.6", "4.48.3")),
    # 1.15: the head and the loss run in tiles (trainer/utils.py, add_fused_lm_head).
    # 1.7: SFT's loss is checkpointed in chunks of tokens (trainer/sft_trainer.py, _chunked_cross_entropy_loss).
    "trl": Package("TRL", ("1.16.0", "1.14.2", "1.6.0")),
}


def number(release: str) -> tuple[int, ...]:
    """A release as numbers, which compare: "4.57.6" -> (4, 57, 6)."""
    return tuple(int(part) for part in release.removeprefix("v").split("."))
