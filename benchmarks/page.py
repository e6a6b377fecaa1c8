"""How quick the web page is: the first answer in headless Chromium, cold and from the browser's cache, then changes.

    make page && python benchmarks/page.py [--site build/page] [--rounds 5]

Needs Chromium and Playwright (`pip install playwright`, which drives a browser that is installed). "cold" is a new
browser profile; "cached" the third start of a new browser process on one profile, with a cache that has the files and
their compiled code. Both run until the verdict is on the screen. A change is a keystroke in one field of Llama 3 8B,
until the timeline is redrawn too. "weight" is what a server sends with gzip.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.page.browser import BROWSER, launch_arguments, served

COLD, CACHED, CHANGE = 4000, 2000, 300  # milliseconds, the bars
WEIGHT = 10_000_000  # bytes
CHANGES = [("training.micro_batch_size", text) for text in ("1", "3", "4", "8", "16")] + [
    ("training.sequence_length", text) for text in ("1024", "4096", "8192")
]
DONE = "body[data-state=done]"


def weight(site: Path) -> int:
    """Bytes of all files that the page loads, gzipped where that makes them smaller."""
    sizes = []
    for path in site.rglob("*"):
        if path.is_file() and path.name not in ("built.json", "uPlot.LICENSE"):
            content = path.read_bytes()
            sizes.append(min(len(content), len(gzip.compress(content, 9))))
    return sum(sizes)


def first_answer(play: Any, profile: Path, address: str) -> float:
    """Milliseconds from navigation to the first verdict, in a new browser process."""
    context = play.chromium.launch_persistent_context(profile, executable_path=BROWSER, args=launch_arguments())
    try:
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#view .verdict", timeout=120_000)
        return float(page.evaluate("window.firstAnswer"))
    finally:
        context.close()


def changes(play: Any, address: str) -> list[float]:
    """Milliseconds from a keystroke to the redrawn timeline, without the pause that waits for the next key."""
    browser = play.chromium.launch(executable_path=BROWSER, args=launch_arguments())
    try:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector(DONE, timeout=120_000)
        found = []
        for name, text in CHANGES:
            took = page.evaluate(
                """([name, text]) => new Promise((resolve) => {
                    document.getElementById("form").elements[name].value = text;
                    const begin = performance.now();
                    document.getElementById("form").requestSubmit();
                    const look = () => document.body.dataset.state === "done"
                        ? resolve(performance.now() - begin) : requestAnimationFrame(look);
                    requestAnimationFrame(look);
                })""",
                [name, text],
            )
            found.append(float(took))
        return found
    finally:
        browser.close()


def line(name: str, found: Sequence[float], bar: float) -> str:
    """Return least, median and most of some times, next to the bar."""
    median = statistics.median(found)
    times = f"{min(found):6.0f} {median:6.0f} {max(found):6.0f} ms"
    return f"{name:8} {times}   bar {bar:,.0f}: {'met' if median <= bar else 'MISSED'}"


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
        moved = changes(play, address)
    print(line("cold", cold, COLD))
    print(line("cached", cached, CACHED))
    print(line("change", moved, CHANGE))
    size = weight(given.site)
    print(f"weight   {size:,} bytes   bar {WEIGHT:,}: {'met' if size <= WEIGHT else 'MISSED'}")
    print(json.dumps({"cold": cold, "cached": cached, "change": moved}))


if __name__ == "__main__":
    main()
