"""transformers' Trainer: a script with TrainingArguments in a YAML file, on one GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.programs.environments import HF5, HF448, HF457
from benchmarks.programs.huggingface import ADAPTERS as KINDS
from benchmarks.programs.huggingface import (
    CARDS,
    PRECISIONS,
    adapter_fields,
    draw_batch,
    draw_model,
    trainer_fields,
)
from benchmarks.programs.program import Draw, Family, Program, Sized, script, written_yaml

FILE = "config.yaml"
MOST_BILLIONS = 3  # of parameters that are loaded in fp32: the host holds them for a moment


def draw_program(draw: Draw, release: tuple[int, int] = (5, 23), *, empties: bool = False) -> Program:
    """A program on one GPU; `empties`: it frees cached blocks in some steps."""
    adapters = draw.of("adapters", KINDS)
    model = draw_model(draw, adapters, release)
    attention = draw.of("attention", (None, None, "sdpa", None, "eager"))
    batch = draw_batch(draw, model, attention)
    precision = draw.of("precision", PRECISIONS) if adapters != "qlora" else {"bf16": True, "torch_dtype": "bfloat16"}
    if release < (5, 0) and model.billions > MOST_BILLIONS:  # which loads in fp32 unless the script says otherwise
        precision = {"bf16": True, "torch_dtype": "bfloat16"}
    data = draw.of("data", ("texts", "mixed"))
    fields: dict[str, Any] = {
        "model_name_or_path": model.hub_id,
        "dataset_name": "data",
        "block_size" if data == "texts" else "max_seq_length": batch.length,
        "attn_implementation": attention,
        **precision,
        **adapter_fields(draw, adapters),
        **trainer_fields(draw, batch),
        **({"torch_empty_cache_steps": draw.of("emptied caches", (1, 2, 4))} if empties else {}),
    }
    return Program(
        files={FILE: written_yaml(fields), "train.py": script("trainer.py")},
        command=f"python train.py {FILE}",
        card=draw.of("card", CARDS),
        sized=Sized(FILE, framework="trainer"),
        models=(model.hub_id,),
        data=data,
    )


FAMILIES = (
    Family("trainer-5", HF5, draw_program),
    Family("trainer-5-emptied", HF5, partial(draw_program, empties=True)),
    Family("trainer-4.57", HF457, partial(draw_program, release=(4, 57))),
    Family("trainer-4.48", HF448, partial(draw_program, release=(4, 48))),
)
