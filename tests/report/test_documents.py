"""What commands print as JSON is what `memcalc schema result` says."""

import json
from typing import Any

import pytest

from memcalc.cli.app import main
from memcalc.report.schema import documents, result_schema

SMALL = ["--set", "l=2", "--set", "d=64", "--set", "h=4", "--set", "V=128", "--set", "s=64"]

COMMANDS = {
    "everything that fits": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--gpus", "4"]),
    "nothing fits as it is": ("fit", ["fit", "llama-3-8b", "--gpu", "t4", "--gpus", "1"]),
    "fewest cards": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--minimize", "gpus"]),
    "smallest card": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--minimize", "gpu_kind"]),
    "least recomputation": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--minimize", "recompute"]),
    "deepest model": ("fit", ["fit", "gpt2", *SMALL, "--gpu", "t4", "--maximize", "layers"]),
    "a grid": ("sweep", ["sweep", "gpt2", *SMALL, "--vary", "b=1,2", "--gpu", "t4"]),
    "a grid with what cannot be": ("sweep", ["sweep", "gpt2", *SMALL, "--vary", "tensor_parallel=1,3"]),
    "a plan": ("recompute", ["recompute", "gpt2", *SMALL, "--budget", "1GiB"]),
    "a plan beside the host": ("recompute", ["recompute", "gpt2", *SMALL, "--budget", "1GiB", "--gpu", "t4"]),
    "many": ("check", ["check", "gpt2", "--gpu", "t4"]),
    "one": ("estimate", ["estimate", "gpt2", *SMALL]),
}


@pytest.mark.parametrize(("kind", "arguments"), COMMANDS.values(), ids=COMMANDS)
def test_documents(kind: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert main([*arguments, "--format", "json"]) in (0, 1)
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)

    documents()[kind].model_validate_json(json.dumps(printed))
    jsonschema.validate(printed, result_schema())


def test_a_document_with_a_field_too_many_is_none() -> None:
    """What the models do not know they refuse, so nothing is printed that the schema leaves out."""
    for kind, model in documents().items():
        assert model.model_config["extra"] == "forbid", kind
