"""Take the screenshots of the web page for docs/: `make page-pictures`. Needs `make page`, Chromium and Playwright."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tests.page.browser import BROWSER, ROOT, SITE, launch_arguments, served

RUN = "#kind=estimate&model=llama-3-8b&gpu=h100-80gb&training.recipe=pure&training.micro_batch_size=4"
RUN += "&training.recompute=full"

# The picture's name in docs/pictures: its width and height in pixels, and the color scheme.
PICTURES: dict[str, tuple[int, int, Literal["light", "dark"]]] = {
    "page-light.png": (1280, 1235, "light"),
    "page-dark.png": (1280, 1235, "dark"),
    "page-phone.png": (360, 2300, "light"),
}


def take(folder: Path) -> list[Path]:
    """Take all of them into a directory."""
    from playwright.sync_api import sync_playwright

    taken = []
    with served(SITE) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=launch_arguments())
        for name, (width, height, scheme) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(address + RUN)
            page.wait_for_selector("body[data-state=done]", timeout=120_000)
            page.wait_for_timeout(300)  # until the plot has been drawn
            page.evaluate("document.querySelector('#status :last-child').textContent = ''")  # a time, which differs
            page.screenshot(path=folder / name)
            taken.append(folder / name)
            page.close()
        browser.close()
    return taken


def main() -> None:
    """Take every screenshot."""
    for path in take(ROOT / "docs" / "pictures"):
        print(path)


if __name__ == "__main__":
    main()
