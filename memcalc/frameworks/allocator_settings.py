"""Settings of the PyTorch allocator that frameworks set before a run starts.

Accelerate 1.11, DeepSpeed 0.17, LitGPT 0.5, GPT-NeoX at ea7aefd, TRL 1.9 and NeMo's library set none. The launcher of
NeMo's performance scripts sets some (scripts/performance/executors.py), but no file of a run shows whether it was used.
"""

from __future__ import annotations

from memcalc.frameworks.draft import Draft

FIELD = "training.alloc_conf"
EXPANDABLE = "expandable_segments:True"


def place_allocator_settings(draft: Draft, settings: str, program: str) -> None:
    """Set the allocator settings of a framework, with a note.

    Args:
        draft: the configuration that is being read.
        settings: in the syntax of PYTORCH_CUDA_ALLOC_CONF.
        program: the program that sets them.
    """
    draft.default(FIELD, settings)
    if FIELD not in draft.overridden:
        draft.notes.append(f"allocator settings {settings}, set by {program}; change them with --set alloc_conf=")
