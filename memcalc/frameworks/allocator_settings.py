"""Settings of PyTorch's allocator that frameworks make before a run starts.

What was looked for and not found: Accelerate 1.11, DeepSpeed 0.17, LitGPT 0.5, GPT-NeoX at ea7aefd, TRL 1.9 and NeMo's
library set none; of NeMo the launcher of its performance scripts does (scripts/performance/executors.py), and no file
of a run says whether it was used.
"""

from __future__ import annotations

from memcalc.frameworks.draft import Draft

FIELD = "training.alloc_conf"
EXPANDABLE = "expandable_segments:True"


def place_allocator_settings(draft: Draft, settings: str, whose: str) -> None:
    """Set the allocator settings of a framework, with a note.

    Args:
        draft: our configuration in the making.
        settings: as PYTORCH_CUDA_ALLOC_CONF takes them.
        whose: the program that sets them.
    """
    draft.default(FIELD, settings)
    if FIELD not in draft.overridden:
        draft.notes.append(f"allocator settings {settings}, which {whose} sets: --set alloc_conf= for others or none")
