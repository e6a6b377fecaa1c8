"""Process groups, each with buffers of the communication library."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

import pytest

import memcalc
from memcalc.estimation.outside_allocator import FIRST_GROUP_BYTES, FURTHER_GROUP_BYTES, communication_library_bytes
from memcalc.layout.stages import stages_of
from memcalc.validation.predictions import under
from tools.recorded_errors import RECORDINGS, spec_of_program

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


PIPELINE = {"pipeline_parallel": 4, "data_parallel": 1, "engine": "ddp", "zero_stage": 0}
RING = {**PIPELINE, "schedule": "interleaved", "virtual_stages": 2}
MEGATRON = {"engine": "megatron", "data_parallel": 1}
DEEPSPEED = {"engine": "deepspeed", "zero_stage": 1, "data_parallel": 1}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("framework", "parallelism", "model", "communicators"),
    [
        # dry runs, recordings/programs: torchtitan-pipeline development 0, held-out-13 3, development 5 and held-out-12 4
        ("torchtitan", PIPELINE, {}, [2, 3, 3, 2]),
        ("torchtitan", RING, {}, [3, 3, 3, 3]),
        ("torchtitan", PIPELINE | {"data_parallel": 2, "engine": "fsdp2", "zero_stage": 2}, {}, [6, 7, 7, 6]),
        (
            "torchtitan",
            RING | {"data_parallel": 2, "engine": "fsdp2", "zero_stage": 3, "pipeline_parallel": 2},
            {},
            [6, 6],
        ),
        # megatron
        ("megatron", MEGATRON | {"data_parallel": 2, "zero_stage": 1}, {}, [3]),
        ("megatron", MEGATRON | {"tensor_parallel": 2, "zero_stage": 0}, {}, [3]),
        ("megatron", MEGATRON | {"tensor_parallel": 2, "zero_stage": 1}, {}, [4]),
        ("megatron", MEGATRON | {"tensor_parallel": 2, "data_parallel": 2, "zero_stage": 1}, {}, [5]),
        ("megatron", MEGATRON | {"pipeline_parallel": 2, "zero_stage": 0}, {}, [3, 3]),
        ("megatron", MEGATRON | {"pipeline_parallel": 2, "zero_stage": 1}, TIED, [5, 5]),
        # deepspeed-pipeline development 0 and 5
        ("deepspeed", DEEPSPEED | {"pipeline_parallel": 4}, TIED, [5, 4, 4, 5]),
        ("deepspeed", DEEPSPEED | {"pipeline_parallel": 2, "data_parallel": 2}, TIED, [6, 6]),
    ],
)
def test_communicators_of_stages(
    framework: str, parallelism: dict[str, Any], model: dict[str, Any], communicators: list[int]
) -> None:
    recipes = {"deepspeed": "mixed-16", "megatron": "mixed-18", "torchtitan": "amp"}
    training = {"framework": framework, "recipe": recipes[framework], "gradient_accumulation_steps": 8}
    spec = memcalc.load({"preset": "llama-3-8b", "model": model, "training": training, "parallelism": parallelism})
    found = [communication_library_bytes(spec, stage) for stage in stages_of(spec)]

    assert found == [FIRST_GROUP_BYTES + (each - 1) * FURTHER_GROUP_BYTES for each in communicators]
    assert communication_library_bytes(spec) == max(found)


@pytest.mark.parametrize(
    ("engine", "framework"),
    [
        ({**MEGATRON, "tensor_parallel": 2, "data_parallel": 2, "zero_stage": 1}, "megatron"),
        ({**MEGATRON, "pipeline_parallel": 2, "zero_stage": 1}, "megatron"),
        ({**DEEPSPEED, "pipeline_parallel": 4}, "deepspeed"),
        ({**DEEPSPEED, "pipeline_parallel": 2, "data_parallel": 2}, "deepspeed"),
    ],
)
def test_communicators_of_an_engine_without_a_framework(engine: dict[str, Any], framework: str) -> None:
    """An engine makes its groups in a layout of `fit`, too, of which no program is known."""
    recipe = {"deepspeed": "mixed-16", "megatron": "mixed-18"}[framework]
    training = {"recipe": recipe, "gradient_accumulation_steps": 8}
    layout = {"preset": "gpt2", "training": training, "parallelism": engine}  # with tied embeddings
    named = memcalc.load(layout | {"training": training | {"framework": framework}})

    assert communication_library_bytes(memcalc.load(layout)) == communication_library_bytes(named)


@pytest.mark.parametrize("family", ["megatron", "deepspeed-pipeline", "torchtitan-pipeline", "torchtitan-experts"])
def test_communicators_of_recorded_programs(family: str) -> None:
    """Of each recorded rank, those that NCCL was asked for."""
    compared = 0
    for path in RECORDINGS.glob(f"programs/*/{family}.jsonl"):
        for record in filter(itemgetter("good"), map(json.loads, path.read_text().splitlines())):
            spec = under(spec_of_program(record), record["versions"]["torch"])
            stages, ranks = stages_of(spec), record["ranks"]
            for number, rank in enumerate(ranks):
                stage = stages[number * len(stages) // len(ranks)]
                assert communication_library_bytes(spec, stage) == rank["communication_bytes"], (path, record["number"])
                compared += 1
    assert compared >= 10
