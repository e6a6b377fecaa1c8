"""The page in Chromium: every control, shared links, pasted and hostile configurations, the keyboard, small screens.

Needs `make page`, Chromium and Playwright; skipped elsewhere, with the reason (see conftest.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import quote

import pytest

from memcalc.page.form import choices
from tests.page.answers import answers, native
from tests.page.browser import ROOT, ask
from tests.page.conftest import Opened, settled
from tests.page.test_engine import CONFIG_JSON

AXE = ROOT / "build" / "page-modules" / "node_modules" / "axe-core" / "axe.min.js"
SMALL = "model=gpt2&gpu=a10g"


@pytest.fixture(scope="module")
def page(opened: Opened) -> Iterator[Any]:
    """One page for the tests that leave its form as they find it."""
    found = opened.page(f"#kind=estimate&{SMALL}")
    yield found
    found.close()


def shown(page: Any, **fields: str) -> str:
    """The verdict after these fields are set as a user sets them."""
    for name, text in fields.items():
        control = page.locator(f"[name='{name}']")
        for block in control.locator("xpath=ancestor::details").all():
            block.evaluate("block => { block.open = true; }")
        if control.evaluate("control => control.tagName") == "SELECT":
            control.select_option(text)
        else:
            control.fill(text)
    settled(page)
    return str(page.inner_text("#view .answer"))


def follow(page: Any, run: str) -> None:
    """Open a link to another run in the same tab."""
    page.evaluate("run => { document.body.dataset.state = 'typing'; location.hash = run; }", run)
    settled(page)


def test_the_first_answer_comes_by_itself(opened: Opened) -> None:
    opened.said.clear()
    page = opened.page()
    assert page.get_attribute("body", "data-state") == "done", page.inner_text("#status")
    assert page.inner_text("#view .answer").startswith("✓ FITS: needs ")
    assert page.locator(".timeline canvas").count() == 1
    assert opened.said == []  # no error, nothing that the policy forbids, no request to another host
    page.close()


def test_every_control_changes_the_run(page: Any) -> None:
    """Each field of the form arrives in the copied command."""
    for block in choices()["blocks"]:
        for field in block["fields"]:
            name = field["path"].rpartition(".")[2]
            text = (
                field["values"][-1]
                if field["values"]
                else "2"
                if field["kind"] == "number"
                else "expandable_segments:True"
            )
            follow(page, f"kind=estimate&{SMALL}&{quote(field['path'])}={quote(text)}")
            assert page.locator(f"[name='{field['path']}']").input_value() == text
            said = page.inner_text("#status") + page.inner_text("#view")
            if page.get_attribute("body", "data-state") == "failed":
                assert name in said or "GPU" in said or "parallel" in said or "sharding" in said.lower(), said[:200]
    follow(page, f"kind=estimate&{SMALL}")


def test_typing_changes_the_answer(page: Any) -> None:
    assert "FITS" in shown(page, **{"training.micro_batch_size": "1"})
    assert shown(page, **{"training.micro_batch_size": "64"}).startswith("✗ DOES NOT FIT")
    assert "Cheapest change that fits" in page.inner_text(".verdict")
    assert shown(page, **{"training.micro_batch_size": ""}).startswith("✓ FITS")


def test_a_wrong_value_is_one_message(page: Any) -> None:
    page.fill("[name='training.micro_batch_size']", "two")
    page.wait_for_selector("body[data-state=failed]")
    assert "micro_batch_size" in page.inner_text("#status.error")
    assert page.is_hidden("#hub")
    shown(page, **{"training.micro_batch_size": ""})


def test_a_component_opens_into_formulas_and_sources(page: Any) -> None:
    page.click("summary.component:has-text('optimizer state')")
    opened = page.locator("details[open] .group")
    assert "source: " in opened.first.inner_text()
    assert "bytes" in opened.first.locator("code").first.inner_text()


def test_the_timeline_tells_what_is_under_the_pointer(page: Any) -> None:
    plot = page.locator(".timeline .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] * 0.5, "y": box["height"] * 0.7})
    tip = page.inner_text(".tip")
    assert "allocated" in tip
    assert "reserved" in tip
    assert "largest tensor of " in tip  # the formula of the component under the pointer


def test_the_timeline_moves_by_keyboard_and_says_where(page: Any) -> None:
    page.focus(".timeline .plot")
    page.keyboard.press("Home")
    first = page.inner_text(".timeline .spoken")
    assert first.startswith("model: ")
    page.keyboard.press("End")
    assert page.inner_text(".timeline .spoken").startswith("optimizer_step_3: ")


def test_a_link_holds_the_run(opened: Opened, page: Any) -> None:
    shown(page, **{"training.micro_batch_size": "3", "more": "num_layers=2"})
    link = page.evaluate("location.href")
    other = opened.page(link.removeprefix(opened.address))
    assert other.inner_text("#view .run") == page.inner_text("#view .run")
    assert other.locator("[name='more']").input_value() == "num_layers=2"
    other.close()
    shown(page, **{"training.micro_batch_size": "", "more": ""})


def test_copies_and_the_download(opened: Opened) -> None:
    context = opened.browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{opened.address}#kind=estimate&{SMALL}&training.micro_batch_size=2")
    settled(page)
    copied = {}
    for name in ("link", "command", "yaml"):
        page.click(f"#copy-{name}")
        page.wait_for_timeout(50)
        copied[name] = page.evaluate("navigator.clipboard.readText()")
    assert copied["command"] == "memcalc estimate gpt2 --gpu a10g --set micro_batch_size=2"
    assert copied["yaml"] == "preset: gpt2\ntraining:\n  micro_batch_size: 2\nhardware:\n  gpu: a10g\n"
    assert copied["link"] == page.evaluate("location.href")
    with page.expect_download() as download:
        page.click("#download")
    assert json.loads(download.value.path().read_text())["name"] == "gpt2"
    context.close()


def test_a_pasted_config_json(page: Any) -> None:
    shown(page, text=json.dumps(CONFIG_JSON))
    assert page.inner_text("#view .run").startswith("config: ")
    shown(page, text="")


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "a\u202eb", "x" * 500]
)
def test_hostile_names_are_text(opened: Opened, page: Any, name: str) -> None:
    opened.said.clear()
    before = page.locator("img, script").count()
    shown(page, text=f"name: {json.dumps(name)}\npreset: gpt2\n")
    visible = page.inner_text("#view .run")
    assert visible.startswith(name if name.isprintable() else "a\\u202eb")
    assert page.locator("img, script").count() == before
    assert opened.said == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown(page, text="")


def test_what_fits_is_searched_when_asked(page: Any) -> None:
    page.click("[data-kind=fit]")
    assert "Search" in page.inner_text("#status")
    page.select_option("#maximize", "micro_batch_size")
    page.click("#search")
    settled(page)
    assert "The largest that fit" in page.inner_text("#view")
    page.select_option("#maximize", "")
    page.click("[data-kind=estimate]")
    settled(page)


def test_a_file_that_cannot_be_loaded_is_one_message(opened: Opened) -> None:
    page = opened.page(f"#kind=estimate&{SMALL}")
    page.route("**/rest.bin", lambda route: route.abort())
    page.click("[data-kind=fit]")
    page.click("#search")
    settled(page)
    assert page.inner_text("#status") == "Cannot load rest.bin, a file of this page. Reload the page."
    opened.said.clear()  # the browser's own message about the file
    page.close()


def test_a_long_search_can_be_stopped(page: Any) -> None:
    page.click("[data-kind=fit]")
    page.fill("#gpus", "64")
    page.fill("#model", "llama-3-70b")
    page.click("#search")
    page.wait_for_selector("#stop:visible")
    page.click("#stop")
    assert page.inner_text("#status") == "Stopped."
    page.fill("#gpus", "")
    page.fill("#model", "gpt2")
    page.click("[data-kind=estimate]")
    settled(page)
    assert "FITS" in page.inner_text("#view .answer")


def test_two_runs_side_by_side(page: Any) -> None:
    page.click("#keep")
    settled(page)
    page.fill("[name='training.micro_batch_size']", "4")
    settled(page)
    assert page.locator(".side .view").count() == 2
    assert page.locator(".side canvas").count() == 2
    assert "B - A" in page.inner_text("#view")
    page.fill("[name='training.micro_batch_size']", "")
    page.click("[data-kind=estimate]")
    settled(page)


def test_an_id_that_is_not_known_is_fetched_from_the_hub_when_asked(opened: Opened) -> None:
    """By a click alone, its config.json alone. The hub is a server of this test."""

    class Hub(BaseHTTPRequestHandler):
        asked: list[str] = []  # noqa: RUF012 -- of this test

        def do_GET(self) -> None:
            self.asked.append(self.path)
            body = json.dumps(CONFIG_JSON).encode()
            self.send_response(200 if "unheard" in self.path else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = opened.browser.new_page()
    local = f"http://127.0.0.1:{server.server_port}"

    def through(route: Any) -> None:
        answer = route.fetch(url=route.request.url.replace("https://huggingface.co", local))
        route.fulfill(response=answer, headers={**answer.headers, "access-control-allow-origin": "*"})

    page.route("https://huggingface.co/**", through)
    page.goto(f"{opened.address}#kind=estimate&model=some/unheard-of&gpu=a10g")
    page.wait_for_selector("body[data-state=failed]", timeout=60_000)
    assert Hub.asked == []
    page.click("#hub")
    page.wait_for_selector("body[data-state=done]")
    assert Hub.asked == ["/some/unheard-of/resolve/main/config.json"]
    assert "FITS" in page.inner_text("#view .answer")
    page.fill("[name=text]", "")
    page.fill("[name=model]", "some/missing")
    page.wait_for_selector("body[data-state=failed]")
    page.click("#hub")
    page.wait_for_selector("#status.error:has-text('404')")
    assert page.is_visible("#hub")  # to try again
    server.shutdown()
    server.server_close()
    page.close()


def test_keyboard_alone(opened: Opened) -> None:
    page = opened.page(f"#kind=estimate&{SMALL}")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.dataset?.kind || document.activeElement.className"
            )
        )
    for wanted in ("estimate", "fit", "diff", "model", "gpu", "gpus", "keep", "copy-link", "download", "plot"):
        assert wanted in seen, (wanted, seen)
    page.focus("#model")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("gpt2-medium")
    page.keyboard.press("Enter")
    page.wait_for_selector("#view .run:has-text('gpt2-medium')")
    assert page.inner_text("#view .run").startswith("gpt2-medium: ")
    page.close()


def test_the_verdict_is_read_out_and_stays_in_view_on_a_phone(opened: Opened) -> None:
    page = opened.page(f"#kind=estimate&{SMALL}", viewport={"width": 360, "height": 640})
    page.focus("[name='training.micro_batch_size']")
    assert shown(page, **{"training.micro_batch_size": "64"}).startswith("✗ DOES NOT FIT")
    said = page.locator("#status[role=status]")
    assert said.inner_text().startswith("DOES NOT FIT: needs ")
    box = said.bounding_box()
    assert box["y"] >= 0  # though the result is below the form
    assert box["y"] + box["height"] <= 640
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_no_sideways_scrolling_and_nothing_serious_for_axe(opened: Opened, scheme: str, width: int) -> None:
    page = opened.page(
        f"#kind=estimate&{SMALL}", viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=True
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("summary.component >> nth=0")
    if not AXE.is_file():
        pytest.skip("no axe-core: `make page` installs it")
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run().then(({ violations }) => violations)")
    serious = [
        (each["id"], each["impact"], [node["html"][:120] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    page.close()


# -- the same answers as natively ---------------------------------------------------------------------------------------


def test_a_few_answers_are_equal_to_native_ones_to_the_byte(page: Any) -> None:
    run = {"model": "gpt2", "gpu": "a10g", "fields": {"training.recompute": "full"}}
    requests = [{"kind": "estimate", "run": run}, {"kind": "fit", "run": run, "maximize": "micro_batch_size"}]
    for request in [*requests, {"kind": "diff", "run": run, "other": {"model": "gpt2"}}]:
        parts, error = ask(page, request)
        assert error is None
        assert parts == native(request)


@pytest.mark.long
def test_200_configurations_are_equal_to_native_ones_to_the_byte(page: Any) -> None:
    """Documents, views and messages of estimates, searches and comparisons; `tests.page.answers` for other Pythons."""
    different = []

    def in_the_page(request: dict[str, Any]) -> list[str]:
        parts, error = ask(page, request)
        return [*parts, *([error] if error else [])]

    for request, found in answers(in_the_page):
        if found != native(request):
            different.append(request)
    assert different == []


@pytest.mark.long
def test_the_command_line_prints_what_the_page_downloads(page: Any) -> None:
    """To the byte, on a stream that takes UTF-8."""
    parts, _ = ask(page, {"kind": "estimate", "run": {"model": "gpt2", "gpu": "a10g"}})
    words = [sys.executable, "-m", "memcalc", "estimate", "gpt2", "--gpu", "a10g", "--format", "json"]
    printed = subprocess.run(words, cwd=ROOT, env={"PYTHONUTF8": "1"}, capture_output=True, check=True).stdout
    assert json.loads(parts[-1])["document"].encode() == printed
