"""Views as one self-contained HTML file: the web page's script and style, uPlot, and the data, inlined."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.resources import files
from pathlib import Path
from typing import Any

from memcalc import __version__
from memcalc.errors import NotWritten
from memcalc.files import write_text
from memcalc.report.plots.files import check_place
from memcalc.report.plots.markup import markup, script_data
from memcalc.report.views.reduction import reductions

SUFFIXES = (".html", ".htm")
MOST_BYTES = 1_000_000  # of a report that is passed around

_START = 'render(JSON.parse(document.getElementById("data").textContent), document.getElementById("view"));'


def write_report(path: Path, view: dict[str, Any]) -> None:
    """Write a view (see `memcalc.report.views`) as a report, with less detail if it would exceed MOST_BYTES.

    Raises:
        InputError: another suffix, or a directory that does not exist.
        NotWritten: the file cannot be written, or exceeds MOST_BYTES with the least detail, too.
    """
    check_place(path, SUFFIXES)
    for each in reductions(view):
        page = report_page(each)
        if len(page.encode()) <= MOST_BYTES:
            write_text(path, page)
            return
    raise NotWritten(str(path), f"a report has at most {MOST_BYTES:,} bytes", "Use --format json.")


def report_page(view: dict[str, Any]) -> str:
    """Return the page. Its content policy runs only these scripts, so that no name in the data can become a script."""
    views = re.sub(r"^export ", "", _static("views.js"), flags=re.MULTILINE)
    scripts = [_static("uPlot.iife.min.js"), f"{views}\n{_START}"]
    allowed = " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    library, drawing = scripts
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{markup(view["title"])}</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>
{_static("uPlot.min.css")}
{_static("views.css")}
</style>
</head>
<body class="report">
<header><h1>{markup(view["title"])}</h1></header>
<main id="view"></main>
<footer class="soft"><p>Written by memcalc {__version__}. Plots: uPlot (MIT).</p></footer>
<script type="application/json" id="data">{script_data(view)}</script>
<script>{library}</script>
<script>{drawing}</script>
</body>
</html>
"""


def _static(name: str) -> str:
    return files("memcalc.page").joinpath("static", name).read_text(encoding="utf-8")
