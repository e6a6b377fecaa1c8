"""Memory that operators allocate beyond their outputs in forward and backward, compared with memcalc's rules.

    python -m benchmarks.probe --device cuda --record FILE.jsonl
    python -m benchmarks.probe --device null:h100-80gb --python .venv-null/bin/python
    python -m benchmarks.probe --device cpu --tiny

A line for each operator and shape: bytes hidden inside at the peak, by the allocator's history (on the CPU by
the profiler), and the same of a trace on fake tensors with the rules of that GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from memcalc.errors import MemcalcError
from memcalc.measuring.records import RECORDS

INSIDE = Path(__file__).with_name("probed_operators.py")


def main() -> int:
    """Parse the command line, probe in a process of its own, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or null:CARD")
    parser.add_argument("--python", help="for null: an interpreter whose torch is a CUDA build")
    parser.add_argument("--record", type=Path, help="append every line to this file")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for the CPU")
    arguments = parser.parse_args()
    try:
        lines = probed(arguments.device, arguments.python, tiny=arguments.tiny)
    except MemcalcError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{'operator':<34} {'shape':<26} {'direction':<9} {'measured':>14} {'rule':>14}")
    for line in lines:
        if arguments.record is not None:
            RECORDS.append(({"record": 2} | line,), arguments.record)
        rule = "-" if line["rule"] is None else f"{line['rule']:,}"
        print(f"{line['operator']:<34} {line['shape']:<26} {line['direction']:<9} {line['hidden']:>14,} {rule:>14}")
    known = [line for line in lines if line["rule"] is not None]
    alike = sum(line["hidden"] == line["rule"] for line in known)
    print(f"{alike} of {len(known)} as the rules say.")
    return 0


def probed(device: str, python: str | None, *, tiny: bool) -> list[dict[str, object]]:
    """The lines of a device, with the rules of its GPU beside them."""
    kind, _, card = device.partition(":")
    program, variables = sys.executable, {}
    with tempfile.TemporaryDirectory() as folder:
        if kind == "null":
            from memcalc.nullcuda.gpu_description import find_null_gpu
            from memcalc.nullcuda.tracing import interpreter, step_environment

            found, program = find_null_gpu(card), interpreter(python)
            variables = step_environment(found, found, program, Path(folder))
        command = [program, str(INSIDE), "cpu" if kind == "cpu" else "cuda", "tiny" if tiny else "full"]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MemcalcError(f"the probe ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rules: dict[tuple[str, str, str], int] = {}
    if kind != "cpu":
        from benchmarks.probed_operators import fake_lines

        name = card if kind == "null" else lines[0]["device"]
        rules = {
            (line["operator"], line["shape"], line["direction"]): line["hidden"] for line in fake_lines(name, tiny=tiny)
        }
    return [line | {"rule": rules.get((line["operator"], line["shape"], line["direction"]))} for line in lines]


if __name__ == "__main__":
    sys.exit(main())
