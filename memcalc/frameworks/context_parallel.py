"""How frameworks on PyTorch's context parallelism exchange keys and values."""

from __future__ import annotations

from memcalc.frameworks.draft import Draft

METHOD = "parallelism.context_parallel_method"
# Names of torch distributed/tensor/experimental/_context_parallel/_attention.py, set_rotate_method. Its alltoall passes
# keys and values on to the next rank.
ROTATIONS = {"allgather": "all-gather", "alltoall": "ring"}


def place_rotation(draft: Draft, name: object = None) -> None:
    """Set the method, if several ranks share a sequence; `name` is the file's word, None the default everywhere.

    The default is allgather: accelerate 1.15 utils/dataclasses.py, TorchContextParallelConfig; torchtitan 0.2.2
    config/job_config.py and torchtune recipes/full_finetune_distributed.py, context_parallel_rotate_method.
    """
    if draft.given("parallelism.context_parallel") in (None, 1) or METHOD in draft.values:
        return
    if name is None:
        draft.default(METHOD, ROTATIONS["allgather"])
    else:
        draft.translate(METHOD, name, ROTATIONS)
