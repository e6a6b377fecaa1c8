"""Checkpoints for loaders other than transformers: files of the right size with nothing in them.

Each kind is made once for a model, and linked into a program's folder as `checkpoints/ORG/NAME`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from benchmarks.programs.data import make_model
from benchmarks.synthetic import write_tiktoken, write_weights
from memcalc.nullcuda import environment

LITGPT, TORCHTUNE = "litgpt", "torchtune"
TIKTOKEN = 128_000  # byte pairs of Llama 3's tokenizer, without its special tokens

_LITGPT = """
import sys
from pathlib import Path
import torch, yaml
from dataclasses import asdict
from litgpt.model import GPT, Config
from litgpt.utils import save_config
folder, name = Path(sys.argv[1]), sys.argv[2]
config = Config.from_name(name)
with torch.device("meta"):
    model = GPT(config)
state = {key: torch.empty(value.shape, dtype=torch.bfloat16, device="cpu") for key, value in model.state_dict().items()}
torch.save(state, folder / "lit_model.pth")
save_config(config, folder)
"""


def make_checkpoint(kind: str, folder: Path, models: Path, hub_id: str, python: Path) -> Path:
    """The checkpoint of a model, made where it is not there yet.

    Args:
        kind: LITGPT or TORCHTUNE.
        folder: of all checkpoints.
        models: folder of configs and tokenizers, see `make_model`.
        hub_id: of the model.
        python: of the environment with the packages that know the format.
    """
    place = folder / kind / hub_id
    if (place / "made").exists():
        return place
    place.mkdir(parents=True, exist_ok=True)
    model = make_model(models, hub_id)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (place / name).write_text((model / name).read_text())
    if kind == LITGPT:
        subprocess.run([python, "-c", _LITGPT, place, hub_id.rpartition("/")[2]], check=True, env=_null(python))
    else:
        write_weights(place, json.loads((place / "config.json").read_text()))
        write_tiktoken(place / "original" / "tokenizer.model", TIKTOKEN)
    (place / "made").touch()
    return place


def _null(python: Path) -> dict[str, str]:
    """The variables with which a build of torch for CUDA is imported where NVIDIA's libraries are missing."""
    return {**os.environ, **environment("h100-80gb", pythons=(str(python),))}
