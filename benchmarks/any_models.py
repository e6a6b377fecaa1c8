"""Trace the cases of any_models.yaml on fake tensors, run them on the null device, and record the memory of both.

    python benchmarks/any_models.py --python NULL_ENV/bin/python [--case NAME]...

NULL_ENV has a CUDA build of torch, transformers and diffusers; so has this Python, with any build of torch. The null
device runs the step unrecorded (any_model_step.py), so that PyTorch's own allocator counts.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

import memcalc
from memcalc.spec.model_families.transformers_fallback import DIFFUSERS

HERE = Path(__file__).resolve().parent
RECORD = HERE / "recordings" / "any-models" / "null-h100-80gb-torch-2.13.0.jsonl"
CARD, STEPS = "h200", 2


def main() -> None:
    """Run what is to be run, and append a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the null device")
    parser.add_argument("--case", action="append", help="run this one only, recorded or not")
    arguments = parser.parse_args()
    known = {line["case"]: line for line in map(json.loads, RECORD.read_text().splitlines())} if RECORD.exists() else {}
    cases = yaml.safe_load((HERE / "any_models.yaml").read_text())
    for case in cases:
        if case["case"] in (arguments.case or ()) or (not arguments.case and case["case"] not in known):
            known[case["case"]] = recorded(case, arguments.python)
            lines = [known[each["case"]] for each in cases if each["case"] in known]
            RECORD.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            print(json.dumps(known[case["case"]]))


def recorded(case: dict[str, Any], python: str) -> dict[str, Any]:
    """One case on both."""
    config, given = HERE / "any_models" / f"{case['config']}.json", case["set"]
    traced = traced_case(case)
    command = [python, str(HERE / "any_model_step.py"), str(config), str(STEPS), *given]
    dry = memcalc.dry_run(command, gpu=CARD)
    assert dry.peak is not None
    assert dry.exit_code == 0, dry
    packages = ("torch", "transformers", *(["diffusers"] if of_diffusers(case) else []))
    return {
        "case": case["case"],
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/any_models.py --case '{case['case']}'",
        "card": CARD,
        "versions": {name: version(name) for name in packages},
        "trace": traced,
        "null": {"allocated_bytes": dry.peak.allocated_bytes, "reserved_bytes": dry.peak.reserved_bytes},
    }


def of_diffusers(case: dict[str, Any]) -> bool:
    """Whether diffusers builds the model, and not transformers."""
    return DIFFUSERS in json.loads((HERE / "any_models" / f"{case['config']}.json").read_text())


def traced_case(case: dict[str, Any]) -> dict[str, Any]:
    """Return the traced memory of a case."""
    config = HERE / "any_models" / f"{case['config']}.json"
    result = memcalc.trace(str(config), *case["set"], gpu=CARD, steps=STEPS).result
    return {
        "parameters": result.parameters,
        "phase": result.ledger.peak_phase,
        "allocated_bytes": result.ledger.peak_bytes,
        "reserved_bytes": result.headline.reserved_bytes,
    }


if __name__ == "__main__":
    main()
