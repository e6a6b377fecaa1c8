"""Programs that compile their models: an own loop in the manner of nanoGPT, and transformers' Trainer.

They are drawn as those of `loop` and `trainer` are, with the one line or field that compiles, on one GPU and with
LAYERS layers or fewer: the compiler takes minutes for each ten layers, and every layer is compiled alike. memcalc sizes
a step without torch.compile, so `benchmarks.programs.compare` shows how far the eager figure is an upper bound.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import yaml

from benchmarks.programs.environments import HF5
from benchmarks.programs.loop import draw_program as draw_loop
from benchmarks.programs.program import Draw, Family, Program, written_yaml
from benchmarks.programs.trainer import draw_program as draw_trainer
from memcalc.catalogue.shipped import find_shipped

LAYERS = 6
TIMEOUT = 3000  # seconds: the host compiles every graph
SIZES = ((4, 12, 768), (6, 16, 1024), (6, 6, 384), (4, 20, 1280), (6, 12, 768), (4, 16, 2048))  # l, h, d
MODEL = "model"  # directory of a config.json with fewer layers
_SCALER = '    scaler = torch.amp.GradScaler("cuda"'
_COMPILED = "    model = torch.compile(model)\n"  # nanoGPT, train.py: before DDP wraps it
_TOKENIZER = "AutoTokenizer.from_pretrained(script_args.model_name_or_path)"


def draw_compiled_loop(draw: Draw) -> Program:
    """A loop with a script that compiles the model."""
    program = draw_loop(draw, sizes=SIZES, numbers_of_gpus=(1,))
    before, scaler, after = program.files["train.py"].partition(_SCALER)
    assert scaler
    files = {**program.files, "train.py": before + _COMPILED + scaler + after}
    return replace(program, files=files, timeout=TIMEOUT)


def draw_compiled_trainer(draw: Draw) -> Program:
    """A script around Trainer; its file sets `torch_compile`, its model has a config of its own."""
    program = draw_trainer(draw)
    (hub_id,) = program.models
    file, script = program.sized.file, program.files["train.py"]
    assert _TOKENIZER in script
    fields = {**yaml.safe_load(program.files[file]), "model_name_or_path": MODEL, "torch_compile": True}
    files = {
        file: written_yaml(fields),
        f"{MODEL}/config.json": json.dumps(shortened(hub_id), indent=2) + "\n",
        "train.py": script.replace(_TOKENIZER, f'AutoTokenizer.from_pretrained("{hub_id}")'),
    }
    return replace(program, files=files, timeout=TIMEOUT)


def shortened(hub_id: str) -> dict[str, Any]:
    """The model's config with LAYERS layers.

    Raises:
        LookupError: memcalc's catalogue does not have it.
    """
    entry = find_shipped(hub_id)
    if entry is None:
        raise LookupError(hub_id)
    config = dict(entry.config)
    name = "n_layer" if "n_layer" in config else "num_hidden_layers"
    types = {"layer_types": config["layer_types"][:LAYERS]} if "layer_types" in config else {}
    return config | {name: LAYERS} | types


FAMILIES = (
    Family("loop-compiled", HF5, draw_compiled_loop),
    Family("trainer-5-compiled", HF5, draw_compiled_trainer),
)
