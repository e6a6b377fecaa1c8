"""The page in a real browser: where it is, how it is served and driven. Also used by benchmarks/page.py."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "page"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("MEMCALC_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


_ASK = """request => new Promise((resolve) => {
  window.probe ??= Object.assign(new Worker("worker.js", { type: "module" }), { requests: 0 });
  const parts = [], id = ++probe.requests;
  probe.onmessage = ({ data }) => {
    if (data.id !== id) return;
    if (data.kind === "part") parts.push(data.text);
    if (data.kind === "done" || data.kind === "failed") resolve([parts, data.error ?? null]);
  };
  probe.postMessage({ id, request });
})"""


def ask(page: Any, request: dict[str, Any]) -> tuple[list[str], str | None]:
    """Send a request to a worker of the page, without its form: the parts of the answer, and an unexpected error."""
    parts, error = page.evaluate(_ASK, request)
    return parts, error


def launch_arguments() -> list[str]:
    """A container's root has no user namespaces for the sandbox."""
    return ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []


class _Quiet(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".bin": "application/octet-stream",
    }

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a directory, served on the loopback interface as any static host serves it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
