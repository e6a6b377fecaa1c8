"""PyTorch's allocator on the null device against the model of it, over the training step of every preset.

    python benchmarks/preset_histories.py .venv-null/bin/python benchmarks/recordings/histories/null-a100-80gb.jsonl

The interpreter named has PyTorch's CUDA build, transformers, pydantic and pyyaml. Each preset's two steps run in a
process of their own, on a GPU that never ends, with PyTorch's own memory history; the requests that it notes are
replayed, and every line of the history is compared (action, address within its segment, size, stream), then every
counter of torch.cuda.memory_stats. Cases are those of record_traces.py, or of the presets named behind the file;
recorded ones are skipped.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memcalc.allocator import history
from memcalc.events import Event, EventType
from memcalc.recorder.real_device import sizes

CARD = "a100-80gb"
STEPS = 2
MOST_SECONDS = 240  # of the processor, for one case
ON_DEVICE = "--on-device"  # how main starts this file again
ENTRIES = 20_000_000  # of PyTorch's history
FAR = 2**34  # more than these runs map in one segment, less than the address space of an expandable one

Line = tuple[str, int, int, int]  # action, address, size, stream


class Silent:
    """An observer that looks at nothing."""

    def phase(self, _: str) -> Any:
        """Nothing around a phase."""
        return nullcontext()


def main(python: str, recordings: str, *presets: str) -> None:
    """Start this file again, on the device."""
    subprocess.run([python, __file__, ON_DEVICE, recordings, *presets], env=os.environ | device(python), check=True)


def device(python: str) -> dict[str, str]:
    """Variables for a process on a GPU that never runs out."""
    from memcalc.nullcuda import environment
    from memcalc.nullcuda.gpu_description import find_null_gpu

    variables = environment(CARD, pythons=[python], skip_init=True)
    total = f" memory={find_null_gpu(CARD).usable_bytes} "
    variables["MEMCALC_NULL_PROPERTIES"] = variables["MEMCALC_NULL_PROPERTIES"].replace(total, f" memory={2**42} ")
    variables["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[1])
    return variables


def record_all(file: Path, presets: Sequence[str]) -> None:
    """On the device: a fork for each case, so that torch is imported once and each allocator starts empty."""
    from benchmarks.record_traces import cases

    known = {json.loads(line)["case"] for line in file.read_text().splitlines()} if file.exists() else set()
    for case in sorted(cases(), key=lambda case: "huggingface" in case):
        if case in known or (presets and case.split()[0] not in presets):
            continue
        if (child := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
            status = 1
            try:
                record = compared(case)
                with file.open("a") as out:
                    out.write(json.dumps(record, separators=(",", ":")) + "\n")
                print(case, record["first_difference"] or "equal", record["seconds"], flush=True)
                status = 0
            except Exception as error:  # noqa: BLE001 -- the next case is another process's
                print(f"{case}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            os._exit(status)
        os.waitpid(child, 0)


def compared(case: str) -> dict[str, Any]:
    """One record. Bytes, and seconds of the processor for building the model and for each step."""
    import torch

    from benchmarks.record_traces import load
    from memcalc.step.loop import TrainingRun

    torch.cuda.memory._record_memory_history("all", None, "python", ENTRIES)  # noqa: SLF001 -- no public name
    start = time.process_time()
    run = TrainingRun(load(case), torch.device("cuda", 0))
    run.execute(STEPS, Silent())
    seconds = time.process_time() - start
    trace = torch.cuda.memory._snapshot()["device_traces"][0]  # noqa: SLF001 -- PyTorch has no public function
    theirs = [(entry["action"], entry["addr"], entry["size"], entry["stream"]) for entry in trace]
    statistics = torch.cuda.memory_stats()
    found = history(events_of(theirs), "", torch.__version__.partition("+")[0])
    ours = [(entry.action, entry.address, entry.size, entry.stream) for entry in found.entries]
    counters = sorted(found.result.statistics.keys() & statistics.keys())
    different = [name for name in counters if found.result.statistics[name] != statistics[name]]
    return {
        "case": case,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"null:{CARD}",
        "versions": {"torch": torch.__version__},
        "parameters": sizes(run)[0],
        "seconds": round(seconds, 2),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "lines": len(theirs),
        "counters": len(counters),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "first_difference": first_difference(relative(ours), relative(theirs)),
        "different_counters": different,
    }


def events_of(lines: list[Line]) -> list[Event]:
    """What was asked of the allocator."""
    numbers: dict[int, int] = {}
    events = []
    for number, (action, address, size, stream) in enumerate(lines):
        if action == "alloc":
            numbers[address] = number
            events.append(Event(EventType.ALLOC, number, size, stream=stream))
        elif action == "free_requested":
            events.append(Event(EventType.FREE, numbers.pop(address)))
    return events


def first_difference(ours: list[Line], theirs: list[Line]) -> str | None:
    """Where the two part; None: nowhere."""
    for number, (mine, real) in enumerate(zip(ours, theirs, strict=False)):
        if mine != real:
            return f"line {number}: model {mine}, PyTorch {real}"
    return None if len(ours) == len(theirs) else f"{len(ours)} lines and {len(theirs)}"


def relative(entries: list[Line]) -> list[Line]:
    """Entries with addresses counted from the begin of their segment; of expandable ones from their first page."""
    mapped: dict[int, int] = {}  # bytes of each segment by its begin
    rows: list[Line] = []
    for action, address, size, stream in entries:
        begin = max((at for at in mapped if at <= address), default=-FAR)
        if action == "segment_alloc" or (action == "segment_map" and address - begin >= FAR):
            mapped[address] = 0
            begin = address
        rows.append((action, address - begin, size, stream))
        if action.startswith("segment"):
            mapped[begin] += size if action in {"segment_alloc", "segment_map"} else -size
            if not mapped[begin]:
                del mapped[begin]
    return rows


if __name__ == "__main__":
    if sys.argv[1] == ON_DEVICE:
        record_all(Path(sys.argv[2]), sys.argv[3:])
    else:
        main(*sys.argv[1:])
