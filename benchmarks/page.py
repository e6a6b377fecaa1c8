"""Time of the web page: the first answer in headless Chromium, cold and from the browser's cache, and then changes.

    make page && python benchmarks/page.py [--site build/page] [--rounds 5]

Needs Chromium and Playwright (`pip install playwright`, which drives an installed browser). "cold" is a new browser
profile; "cached" is the third start of a browser on one profile, which then has the files and their compiled code. Both
end when the verdict is on the screen. A change is a keystroke in one field of Llama 3 8B: "verdict" ends with the
verdict, "change" with the redrawn timeline of the replay, and "all" after the search for the cheapest change that fits
(for runs that do not fit), with the texts to copy. "weight" is what a server sends with gzip.

"cpu" is the CPU time of all processes of the browser, and "worker" that of the thread that runs Python, which the first
answer waits for (both only on Linux). They depend less than wall-clock time on other work on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.page.browser import BROWSER, launch_arguments, served

COLD, CACHED, CHANGE = 4000, 2000, 300  # milliseconds, the bars
WEIGHT = 10_000_000  # bytes
PATIENCE = 300_000  # milliseconds until a start has failed
CHANGES = [("training.micro_batch_size", text) for text in ("1", "3", "4", "8", "16")] + [
    ("training.sequence_length", text) for text in ("1024", "4096", "8192")
]
DONE = "body[data-state=done]"


class Took(NamedTuple):
    """Milliseconds: wall-clock time, and CPU time of all processes of the browser and of the worker's thread."""

    wall: float
    cpu: float
    worker: float


def cpu_times() -> tuple[float, float]:
    """Return the CPU time of the browsers that this process started, and of their workers, in steps of 10 ms."""
    parents, browsers, spent, workers = {}, set(), {}, {}
    for path in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        fields = rest.split()
        process, thread = int(path.parts[2]), int(path.parts[4])
        parents[process] = int(fields[1])
        if process == thread and name.startswith("chrom"):
            browsers.add(process)
        spent[process, thread] = int(fields[11]) + int(fields[12])
        if name.startswith("DedicatedWorker"):
            workers[process, thread] = spent[process, thread]
    own = {process for process in browsers if _descends(process, parents)}
    ticks = [sum(each for (process, _), each in found.items() if process in own) for found in (spent, workers)]
    cpu, worker = (1000 * each / os.sysconf("SC_CLK_TCK") for each in ticks)
    return cpu, worker


def _descends(process: int, parents: dict[int, int]) -> bool:
    while process in parents:
        process = parents[process]
        if process == os.getpid():
            return True
    return False


def weight(site: Path) -> int:
    """Bytes of all files that the page loads, gzipped where that makes them smaller."""
    sizes = []
    for path in site.rglob("*"):
        if path.is_file() and path.name not in ("built.json", "uPlot.LICENSE"):
            content = path.read_bytes()
            sizes.append(min(len(content), len(gzip.compress(content, 9))))
    return sum(sizes)


def first_answer(play: Any, profile: Path, address: str) -> Took:
    """From navigation to the first verdict, in a new browser process."""
    context = play.chromium.launch_persistent_context(profile, executable_path=BROWSER, args=launch_arguments())
    try:
        page = context.new_page()
        before, _ = cpu_times()
        page.goto(address, timeout=PATIENCE)
        page.wait_for_selector("#view .verdict", timeout=PATIENCE)
        cpu, worker = cpu_times()
        return Took(float(page.evaluate("performance.getEntriesByName('answer')[0].startTime")), cpu - before, worker)
    finally:
        context.close()


def changes(play: Any, address: str, rounds: int) -> list[list[Took]]:
    """From a keystroke to the verdict, to the redrawn timeline and to the end, without the pause for the next key."""
    browser = play.chromium.launch(executable_path=BROWSER, args=launch_arguments())
    try:
        page = browser.new_page()
        page.goto(address, timeout=PATIENCE)
        page.wait_for_selector(DONE, timeout=PATIENCE)
        found = []
        for name, text in CHANGES * rounds:
            before = cpu_times()
            took = page.evaluate(
                """([name, text]) => new Promise((resolve) => {
                    document.getElementById("form").elements[name].value = text;
                    const begin = performance.now(), times = [];
                    document.getElementById("form").requestSubmit();
                    const look = () => {
                        const state = document.body.dataset.state, now = performance.now() - begin;
                        if (state === "partial" || state === "done") times[0] ??= now;
                        if (times.length && !document.querySelector("#view .waiting")) times[1] ??= now;
                        if (state === "done") return resolve([times[0], times[1], now]);
                        requestAnimationFrame(look);
                    };
                    requestAnimationFrame(look);
                })""",
                [name, text],
            )
            spent = [after - earlier for earlier, after in zip(before, cpu_times(), strict=True)]
            found.append([Took(float(each), *spent) for each in took])
        return [list(each) for each in zip(*found, strict=True)]
    finally:
        browser.close()


def line(name: str, found: Sequence[Took], bar: float) -> str:
    """Return minimum, median and maximum of wall-clock and CPU time, next to the bar."""
    columns = [
        f"{min(each):6.0f} {statistics.median(each):6.0f} {max(each):6.0f} ms" for each in zip(*found, strict=True)
    ]
    median = statistics.median(took.wall for took in found)
    met = "met" if median <= bar else "MISSED"
    return f"{name:8} {columns[0]}   cpu {columns[1]}   worker {columns[2]}   bar {bar:,.0f}: {met}"


def main() -> None:
    """Measure, and print minimum, median and maximum."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=Path("build/page"))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    cold, cached = [], []
    with served(given.site) as address, sync_playwright() as play:
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as profile:
                cold.append(first_answer(play, Path(profile), address))
                first_answer(play, Path(profile), address)
                cached.append(first_answer(play, Path(profile), address))
        moved = changes(play, address, given.rounds)
    print(line("cold", cold, COLD))
    print(line("cached", cached, CACHED))
    for name, found in zip(("verdict", "change", "all"), moved, strict=True):
        print(line(name, found, CHANGE))
    size = weight(given.site)
    print(f"weight   {size:,} bytes   bar {WEIGHT:,}: {'met' if size <= WEIGHT else 'MISSED'}")
    if hasattr(os, "getloadavg"):
        print(
            "load of the machine: {} processes ready to run, over 1, 5 and 15 minutes".format(
                " ".join(f"{each:.1f}" for each in os.getloadavg())
            )
        )


if __name__ == "__main__":
    main()
