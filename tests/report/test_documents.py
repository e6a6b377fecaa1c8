"""What commands print as JSON is what `memcalc schema result` says."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from memcalc.cli.app import main
from memcalc.documents.schema import documents
from tests.schemas import validate_result

ROOT = Path(__file__).parents[2]
EXAMPLES, SNAPSHOTS = ROOT / "docs" / "examples", ROOT / "tests" / "snapshots" / "recorded"
SMALL = ["--set", "l=2", "--set", "d=64", "--set", "h=4", "--set", "V=128", "--set", "s=64"]

LONG = {"everything that fits", "deepest model"}  # the quick tests have others of the same command
COMMANDS = {
    "everything that fits": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--gpus", "2"]),
    "nothing fits as it is": ("fit", ["fit", "llama-3-8b", "--set", "l=2", "--gpu", "t4", "--gpus", "1"]),
    "fewest cards": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--minimize", "gpus"]),
    "smallest card": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--minimize", "gpu_kind"]),
    "least recomputation": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--minimize", "recompute"]),
    "deepest model": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--maximize", "layers"]),
    "a grid": ("sweep", ["sweep", "gpt2", *SMALL, "--vary", "b=1,2", "--gpu", "t4"]),
    "a grid with what cannot be": ("sweep", ["sweep", "gpt2", *SMALL, "--vary", "tensor_parallel=1,3"]),
    "a plan": ("recompute", ["recompute", "gpt2", *SMALL, "--budget", "1GiB"]),
    "a plan beside the host": ("recompute", ["recompute", "gpt2", *SMALL, "--budget", "1GiB", "--gpu", "t4"]),
    "a chain": ("recompute CHAIN", ["recompute", f"{EXAMPLES}/chains/products.yaml", "--budget", "1GiB"]),
    "two runs": ("diff", ["diff", "gpt2", "gpt2", *SMALL]),
    "a message": ("oom", ["oom", f"{EXAMPLES}/oom.log"]),
    "a message with its run": ("oom", ["oom", f"{EXAMPLES}/oom.log", "--config", "gpt2", "--gpu", "v100-16gb"]),
    "messages of many ranks": ("oom", ["oom", f"{EXAMPLES}/oom-ranks.log"]),
    "a snapshot": ("replay", ["replay", f"{SNAPSHOTS}/shuffled-delayed-2.13.0.pickle.gz", "--gpu", "t4", "--compare"]),
    "many": ("check", ["check", "gpt2", "--gpu", "t4"]),
    "one": ("estimate", ["estimate", "gpt2", *SMALL]),
}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        pytest.param(*command, id=name, marks=pytest.mark.long if name in LONG else ())
        for name, command in COMMANDS.items()
    ],
)
def test_documents(kind: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jsonschema")
    assert main([*arguments, "--format", "json"]) in (0, 1)
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)

    documents()[kind].validate_json(json.dumps(printed))
    validate_result(printed)


def test_a_document_with_a_field_too_many_is_none() -> None:
    """What the models do not know they refuse, so nothing is printed that the schema leaves out."""
    for adapter in documents().values():
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            adapter.validate_python({"a key too many": 1})
