"""Seeded requests to the page, and a digest of each answer: the same in the page and in every Python.

python -m tests.page.answers > native.txt             # needs no pytest, any Python that memcalc supports
python -m tests.page.answers --browser > page.txt     # needs `make page`, Chromium and Playwright
diff native.txt page.txt
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memcalc.page.engine import parts
from memcalc.page.form import choices
from tests.page.browser import BROWSER, SITE, ask, launch_arguments, served

ANSWERED = 200  # estimates; what a rule refuses is compared, not counted
SEARCHES = [{"maximize": name} for name in ("", "micro_batch_size", "sequence_length", "layers", "parameters")] + [
    {"minimize": name} for name in ("gpus", "gpu_kind", "recompute")
]

Request = dict[str, Any]
Answer = Callable[[Request], list[str]]


def native(request: Request) -> list[str]:
    """The parts of an answer in this Python."""
    return [*parts(json.dumps(request))]


def random_runs() -> Iterator[dict[str, Any]]:
    """Runs over all presets, GPUs and the form's fields, three fields each; rules refuse many of them."""
    draw, offered = random.Random(27), choices()
    fields = [field for block in offered["blocks"] for field in block["fields"] if "lora" not in field["path"]]
    for number in itertools.count():
        chosen = {}
        for field in draw.sample(fields, 3):
            if field["values"]:
                chosen[field["path"]] = draw.choice(field["values"])
            elif field["kind"] == "number":
                chosen[field["path"]] = str(draw.choice((1, 2, 4, 8)))
        model = offered["models"][number % len(offered["models"])]
        yield {"model": model, "gpu": draw.choice(offered["gpus"])["name"], "fields": chosen}


def answers(answer: Answer) -> Iterator[tuple[Request, list[str]]]:
    """The requests until 200 estimates were answered, each with its parts.

    After every eighth answered estimate, a search of another kind for that model, on one GPU and on eight, and the run
    compared with its default.
    """
    answered = 0
    for run in random_runs():
        request = {"kind": "estimate", "run": run}
        found = answer(request)
        yield request, found
        if json.loads(found[0])["part"] != "answer":
            continue
        answered += 1
        if answered % 8 == 0:
            number = answered // 8 - 1
            plain = {"model": run["model"], "gpu": run["gpu"], "gpus": "18"[number // len(SEARCHES) % 2]}
            more: list[Request] = [
                {"kind": "fit", "run": plain} | SEARCHES[number % len(SEARCHES)],
                {"kind": "diff", "run": run, "other": plain},
            ]
            for each in more:
                yield each, answer(each)
        if answered == ANSWERED:
            return


def digest(parts: list[str]) -> str:
    """A digest of an answer's parts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def main() -> None:
    """Print a line for each request: the digest of its answer, what part came first, and the request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", action="store_true", help="ask the page in Chromium, not this Python")
    parser.add_argument("--site", type=Path, default=SITE, help="the page's directory")
    given = parser.parse_args()
    if not given.browser:
        _print(native)
        return
    from playwright.sync_api import sync_playwright

    with served(given.site) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=launch_arguments())
        page = browser.new_page()
        page.goto(address, timeout=0)
        page.set_default_timeout(0)
        _print(lambda request: ask(page, request)[0])
        browser.close()


def _print(answer: Answer) -> None:
    for request, found in answers(answer):
        print(digest(found), json.loads(found[0])["part"], json.dumps(request), flush=True)


if __name__ == "__main__":
    main()
