"""Traces every causal LM of transformers at its default size: one forward and backward on fake tensors.

    python benchmarks/families.py [family ...] [--jobs 2] [--limit 300]

Each family runs in a process of its own, which is ended after --limit seconds. One line of JSON a family goes to
benchmarks/recordings/families/transformers-VERSION.jsonl; `python -m tools.docs` makes docs/reports/families.md of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stderr
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = ROOT / "benchmarks" / "recordings" / "families"
BATCH, LENGTH = 1, 256
# Imported once, in the process that the children are forked from: seconds of each family otherwise.
PRELOADED = [
    "torch._dynamo",
    "torch._meta_registrations",
    "torch._decomp.decompositions",
    "torch.fx.experimental.symbolic_shapes",
    "transformers.models.mixtral.modeling_mixtral",
    "memcalc.api",
    "memcalc.recorder.run_analysis",
    "memcalc.tracing.fake",
    "memcalc.step.module_run",
]


def families() -> list[str]:
    """The model types that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def trace_family(name: str) -> dict[str, Any]:
    """Return the outcome of one family, as a record: "traced", "not instantiated" or "failed", with the reason.

    In bf16; where a family's own code does not run in it, in fp32.
    """
    record = _traced(name, "bfloat16")
    if record["outcome"] != "failed":
        return record
    second = _traced(name, "float32")
    return second if second["outcome"] == "traced" else record


def _traced(name: str, dtype: str) -> dict[str, Any]:
    import torch
    import transformers

    import memcalc

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.perf_counter()
    record: dict[str, Any] = {"family": name, "dtype": dtype}
    try:
        config = transformers.CONFIG_MAPPING[name]()
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:  # noqa: BLE001 -- whatever a family's code may raise is its reason
        return record | {"outcome": "not instantiated", "reason": reason(error)}
    record |= {"class": type(module).__name__, "parameters": sum(p.numel() for p in module.parameters())}
    module.train()
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    try:
        traced = memcalc.trace(module, inputs, loss=lambda output: output.loss, steps=1)
    except Exception as error:  # noqa: BLE001 -- any error is recorded
        return record | {"outcome": "failed", "reason": reason(error)}
    return record | {
        "outcome": "traced",
        "peak_bytes": traced.ledger.peak_bytes,
        "peak_phase": traced.ledger.peak_phase,
        "reserved_bytes": traced.reserved_bytes,
        "events": len(traced.events),
        "readbacks": traced.recording.readbacks,
        "seconds": round(time.perf_counter() - started, 2),
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def reason(error: Exception) -> str:
    """The error with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    model = [frame for frame in frames if "/models/" in frame.filename] or list(frames)
    where = f"{Path(model[-1].filename).name}:{model[-1].lineno}"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({where})"


def answer(name: str, connection: Connection) -> None:
    """Runs one family in a child process."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        connection.send(trace_family(name))  # families warn of their own defaults


def run(name: str, limit: float) -> dict[str, Any]:
    """One family in a child process; ended when it takes too long or dies."""
    context = multiprocessing.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(name, sending))
    child.start()
    sending.close()
    try:
        record = receiving.recv() if receiving.poll(limit) else {"outcome": "failed", "reason": f"over {limit:g} s"}
    except EOFError:
        record = {"outcome": "failed", "reason": "the process died"}
    child.terminate()
    child.join()
    found = {"family": name} | record
    print(f"{name}: {found['outcome']} {found.get('reason', found.get('seconds'))}", flush=True)
    return found


def main() -> None:
    """Run the families and write their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one family")
    arguments = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    path = RECORDINGS / f"transformers-{version('transformers')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {line["family"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(run, name, arguments.limit) for name in arguments.families or families()]
        for record in (done.result() for done in as_completed(running)):
            known[record["family"]] = record  # kept at once: the whole takes minutes
            path.write_text("".join(json.dumps(known[name]) + "\n" for name in sorted(known)))
    failed = sum(record["outcome"] == "failed" for record in known.values())
    traced = sum(record["outcome"] == "traced" for record in known.values())
    print(f"{traced} traced, {failed} failed, {len(known) - traced - failed} not instantiated")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
