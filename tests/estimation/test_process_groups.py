"""Process groups, each with buffers of the communication library."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.estimation.outside_allocator import FIRST_GROUP_BYTES, FURTHER_GROUP_BYTES, communication_library_bytes

SPLIT = {"tensor_parallel": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("framework", "parallelism", "groups"),
    [
        # dry runs of torchtitan 0.2.2, recordings/programs: development 0, 5, 7 and 1
        ("torchtitan", {"data_parallel": 4}, 1),
        ("torchtitan", {"data_parallel": 4, **SPLIT}, 5),
        ("torchtitan", {"data_parallel": 8, "data_parallel_replicate": 2}, 3),
        ("torchtitan", {"data_parallel": 8, "data_parallel_replicate": 2, **SPLIT}, 6),
        # other programs: shards and replicas
        ("accelerate", {"data_parallel": 8}, 1),
        ("accelerate", {"data_parallel": 8, "data_parallel_replicate": 2}, 2),
        # dry runs of DeepSpeed at each stage, recordings/programs: development, deepspeed 3, 1, 2 and 5
        *(("deepspeed", {"data_parallel": 8, "engine": "deepspeed", "zero_stage": stage}, 2) for stage in range(4)),
    ],
)
def test_groups_of_a_mesh(framework: str, parallelism: dict[str, Any], groups: int) -> None:
    spec = memcalc.load(
        {
            "preset": "llama-3-8b",
            "training": {"framework": framework},
            "parallelism": {"engine": "fsdp2", "zero_stage": 3, **parallelism},
        }
    )

    assert communication_library_bytes(spec) == FIRST_GROUP_BYTES + (groups - 1) * FURTHER_GROUP_BYTES
