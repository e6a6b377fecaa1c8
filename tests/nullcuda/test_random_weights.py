"""`--random-weights`: from_pretrained without a checkpoint. Needs transformers beside PyTorch's CUDA build."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from memcalc.nullcuda import run
from memcalc.nullcuda.result import DONE

# 2 layers of Llama: 3 * 128 * 344 + 4 * 128 * 128 + 2 * 128 weights a layer, 128 of the norm, 1000 * 128 of the
# embedding, with which the head is tied.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
PARAMETERS = 2 * (3 * 128 * 344 + 4 * 128 * 128 + 2 * 128) + 128 + 1000 * 128

LOADS = """
import json, torch, transformers
found = []
for named in ({}, {"dtype": torch.float32}, {"attn_implementation": "eager"}):
    model = transformers.AutoModelForCausalLM.from_pretrained("model", **named)
    first = model.get_input_embeddings().weight
    found.append([str(first.dtype), first.device.type, model.config._attn_implementation, str(model.name_or_path),
                  sum(p.numel() for p in model.parameters())])
bare, info = transformers.LlamaModel.from_pretrained("model", output_loading_info=True, num_hidden_layers=1)
found.append([bare.config.num_hidden_layers, len(info["missing_keys"])])
model.save_pretrained("saved")
found.append([transformers.LlamaForCausalLM.from_pretrained("saved").name_or_path])
print(json.dumps(found))
"""


@pytest.fixture
def with_transformers(null_python: str, dry_run_here: Path) -> Path:
    asks = "from importlib.metadata import version; version('transformers')"
    if subprocess.run([null_python, "-c", asks], capture_output=True, check=False).returncode:
        pytest.skip("no transformers beside PyTorch's CUDA build")
    (dry_run_here / "model").mkdir()
    (dry_run_here / "model" / "config.json").write_text(json.dumps(CONFIG))
    return dry_run_here


@pytest.mark.long
def test_models_load_from_their_config_alone(with_transformers: Path, null_python: str) -> None:
    (with_transformers / "script.py").write_text(LOADS)
    with (with_transformers / "out").open("w") as out:
        result = run([null_python, "script.py"], "h100-80gb", random_weights=True, stdout=out)

    assert result.outcome == DONE
    assert json.loads((with_transformers / "out").read_text().splitlines()[-1]) == [
        ["torch.bfloat16", "cpu", "sdpa", "model", PARAMETERS],
        ["torch.float32", "cpu", "sdpa", "model", PARAMETERS],
        ["torch.bfloat16", "cpu", "eager", "model", PARAMETERS],
        [1, 0],
        ["saved"],
    ]
