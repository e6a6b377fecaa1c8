"""Names that would be elements, scripts or entities stay text in every drawing: by parsers, and in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from memcalc.cli.app import main
from memcalc.events import write_events
from memcalc.events.event import Event, EventType
from memcalc.text import harmless, json_safe
from tests.thinning import quick_every

OWNED = "owned-by-a-name"
NAMES = (
    f"<script>document.title='{OWNED}'</script>",
    f"</script><script>document.title='{OWNED}'</script>",
    f"<img src=x onerror=\"document.title='{OWNED}'\">",
    f'"><svg onload="document.title=\'{OWNED}\'">',
    "<!--<script>",
    "]]>",
    "&amp;&lt;%TITLE%",
    "$\\frac{1}{0",
    "\x00\x1b[31m\u2028\ufffe\udfff",
    "'; alert(1); //",
)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Elements(HTMLParser):
    """Tags and texts of an HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.handlers: list[str] = []
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.images += tag == "img"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def drawings(name: str, folder: Path) -> dict[str, Path]:
    """Every kind of drawing, of a run that is called so, with phases, modules and lines of that name."""
    events = folder / "run.jsonl"
    write_events(
        events,
        [
            Event(EventType.PHASE, phase=name),
            Event(EventType.ALLOC, 1, 4 << 20, phase=name, module=name, operator=name, line=name),
            Event(EventType.ALLOC, 2, 30 << 20, phase=name, module=name, line=name),
            Event(EventType.FREE, 1),
        ],
    )
    config = folder / "run.yaml"
    config.write_text(f"name: {json.dumps(re.sub('[^ -~]', '', name) or 'x')}\npreset: gpt2\n")
    found = {kind: folder / f"drawing-{number}.{kind[-4:].strip('-')}" for number, kind in enumerate(KINDS)}
    main(
        ["replay", str(events), "--picture", str(found["space-svg"]), "--picture", str(found["space-svg"])]
        + ["--plot", str(found["run-html"]), "--plot", str(found["run-svg"])]
    )
    main(["replay", str(events), "--picture", str(found["space-html"])])
    main(
        ["sweep", str(config), "--vary", "b=1,2,3", "--vary", "s=64,128", "--gpu", "h100-80gb"]
        + ["--plot", str(found["sweep-svg"]), "--plot", str(found["sweep-html"])]
    )
    return found


KINDS = ("run-html", "run-svg", "space-html", "space-svg", "sweep-html", "sweep-svg")


@pytest.fixture(scope="module", params=quick_every(3, NAMES, first=1), ids=repr)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path]]:
    """A name, and every kind of drawing with it."""
    return request.param, drawings(request.param, tmp_path_factory.mktemp("drawn"))


def test_drawings_hold_nothing_but_text(drawn: tuple[str, dict[str, Path]]) -> None:
    for kind, path in drawn[1].items():
        content = path.read_text(encoding="utf-8")
        elements = Elements()
        elements.feed(content)

        assert (elements.images, elements.handlers) == (0, [])
        assert elements.scripts == (2 if kind == "run-html" else 0)  # the page's own: its data, and what shows them
        if kind.endswith("svg"):
            ET.fromstring(content)


def test_a_name_reads_as_it_is(drawn: tuple[str, dict[str, Path]]) -> None:
    """In the data that the page's script shows, and in the tooltips of the address space."""
    name, paths = drawn
    if name not in NAMES[:8]:
        pytest.skip("signs that are not written as they are")
    data = re.search(
        r'<script[^>]*id="data"[^>]*>(.*?)</script>', paths["run-html"].read_text(encoding="utf-8"), re.DOTALL
    )

    assert data is not None
    assert any(name in stretch for stretch in json.loads(data[1])["stretches"])
    assert harmless(name) in html.unescape(paths["space-svg"].read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_no_name_runs_in_a_browser(drawn: tuple[str, dict[str, Path]], tmp_path: Path) -> None:
    flags = ["--headless", "--disable-gpu", "--no-sandbox", f"--user-data-dir={tmp_path}", "--virtual-time-budget=2000"]
    proof = tmp_path / "proof.html"
    proof.write_text(f"<html><body>{NAMES[0]}</body></html>")

    def title(path: Path) -> str:
        assert BROWSER is not None
        done = subprocess.run(
            [BROWSER, *flags, "--dump-dom", path.as_uri()],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=os.environ | {"HOME": str(tmp_path)},
        )
        found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
        assert done.stdout
        return html.unescape(found[1]) if found else ""

    assert title(proof) == OWNED  # the browser would have run it
    if OWNED in drawn[0]:  # the others cannot run anything
        assert OWNED not in map(title, drawn[1].values())


@pytest.mark.filterwarnings("error")
def test_a_name_of_thousands_of_signs_leaves_room_for_the_picture(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(json.dumps({"name": "long " * 600, "preset": "gpt2"}))

    assert main(["estimate", str(tmp_path / "long.yaml"), "--plot", str(tmp_path / "long.svg")]) == 0


def test_data_of_a_plot_has_no_control_characters(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "\u202eevil\x1b[31m##[x]", "preset": "gpt2"}))

    assert main(["estimate", str(tmp_path / "run.yaml"), "--plot", str(tmp_path / "run.json")]) == 0
    text = (tmp_path / "run.json").read_text()
    assert json_safe(text) == text
    assert "evil" in text
