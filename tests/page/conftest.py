"""The page in Chromium, for the tests that need it; elsewhere they are skipped, with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.browser import BROWSER, ROOT, SITE, launch_arguments, served
from tools.build_page import digest

PATIENCE = 120_000  # milliseconds: a busy machine starts a page slowly


class Opened:
    """A browser with the page's address, and what its pages have said."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        self.address = address
        self.said: list[str] = []  # console messages, errors, and requests to other hosts

    def page(self, hash_: str = "", **options: Any) -> Any:
        """Return the page, in a new profile, when its first answer is complete."""
        page = self.browser.new_page(**options)
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("blob:", "data:", self.address)) else self.said.append(request.url)
            ),
        )
        page.goto(self.address + hash_)
        settled(page)
        return page


def settled(page: Any) -> None:
    """Wait until nothing is being computed."""
    page.wait_for_selector("body[data-state=done], body[data-state=failed], body[data-state=idle]", timeout=PATIENCE)


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    """Closed after its tests: a browser that stays open beside other tests takes their time and half a minute to end."""
    if not (SITE / "built.json").is_file():
        pytest.skip(f"no web page in {SITE.relative_to(ROOT)}: `make page` builds it")
    if json.loads((SITE / "built.json").read_text())["sources"] != digest():
        pytest.skip("the web page is of other sources than these: run `make page` again")
    if BROWSER is None:
        pytest.skip("no Chromium: install it (Debian: chromium), or name a browser in MEMCALC_BROWSER")
    driver = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright to drive Chromium: pip install playwright"
    )
    with served(SITE) as address, driver.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=launch_arguments())
        yield Opened(browser, address)
        browser.close()
