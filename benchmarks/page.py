"""How quick the web page is: the first answer in headless Chromium, cold and from the browser's cache, then changes.

    make page && python benchmarks/page.py [--site build/page] [--rounds 5]

Needs Chromium and Playwright (`pip install playwright`, which drives a browser that is installed). "cold" is a new
browser profile; "cached" the third start of a new browser process on one profile, with a cache that has the files and
their compiled code. Both run until the verdict is on the screen. A change is a keystroke in one field of Llama 3 8B:
"verdict" until that is on the screen, "change" until the timeline of the replay is redrawn too, and "all" until also
the cheapest change that fits has been searched (for runs that do not fit) and the texts to copy are there. "weight" is
what a server sends with gzip.

"cpu" is what all processes of the browser worked meanwhile (Linux alone). On a machine that others use, the time on the
clock says how busy it was, and this says what the page costs: with cores of its own the page takes no longer.
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
    """How long something took, in milliseconds: on the clock, and of CPU time in all processes of the browser."""

    wall: float
    cpu: float


def browser_cpu() -> float:
    """CPU time of all browsers that this process started, in milliseconds, by the kernel's clock of 10 ms."""
    parents, spent = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        fields = rest.split()
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        if name.startswith("chrom"):
            spent[process] = int(fields[11]) + int(fields[12])
    return sum(spent[each] for each in spent if _descends(each, parents)) * 1000 / os.sysconf("SC_CLK_TCK")


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
        before = browser_cpu()
        page.goto(address, timeout=PATIENCE)
        page.wait_for_selector("#view .verdict", timeout=PATIENCE)
        return Took(float(page.evaluate("window.firstAnswer")), browser_cpu() - before)
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
            before = browser_cpu()
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
            cpu = browser_cpu() - before
            found.append([Took(float(each), cpu) for each in took])
        return [list(each) for each in zip(*found, strict=True)]
    finally:
        browser.close()


def line(name: str, found: Sequence[Took], bar: float) -> str:
    """Return least, median and most on the clock and of CPU time, next to the bar."""
    columns = [
        f"{min(each):6.0f} {statistics.median(each):6.0f} {max(each):6.0f} ms" for each in zip(*found, strict=True)
    ]
    median = statistics.median(took.wall for took in found)
    return f"{name:8} {columns[0]}   cpu {columns[1]}   bar {bar:,.0f}: {'met' if median <= bar else 'MISSED'}"


def main() -> None:
    """Measure, and print least, median and most."""
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
            "other work: {} processes ready to run, over 1, 5 and 15 minutes".format(
                " ".join(f"{each:.1f}" for each in os.getloadavg())
            )
        )


if __name__ == "__main__":
    main()
