"""Put the web page together (`make page`): its files, Pyodide, and one archive of packages. Same inputs, same bytes.

python tools/build_page.py --modules build/page-modules --wheels build/page-wheels --memcalc WHEEL --site build/page
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "memcalc" / "page" / "static"
COMPILER = ROOT / "tools" / "page" / "compile.mjs"

EPOCH = (1980, 1, 1, 0, 0, 0)  # archives do not record the day on which they were made
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm")
UPLOT = {
    "dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "dist/uPlot.min.css": "uPlot.min.css",
    "LICENSE": "uPlot.LICENSE",
}
PAGE = ("page.css", "page.js", "start.js", "views.css", "views.js", "worker.js", *UPLOT.values())

# What no page loads: native libraries of other systems, files about wheels, schemas, and the page's own files.
NEVER = re.compile(
    r"\.dist-info/(?!METADATA)|(?<!wasm32-emscripten)\.so$|^pydantic/(v1|mypy)|\.pyi$|^_yaml/"
    r"|^memcalc/(page/static|report/plots/page\.html)|^memcalc/data/.*\.schema\.json$"
    # packages that need torch, numpy, processes or a terminal
    r"|^memcalc/(cli|measuring|nullcuda|recorder|snapshots|sweeping|tracing|validation)/"
)
# Modules of the standard library that need processes, sockets or a terminal, or that only developers use.
LIBRARY_NEVER = re.compile(
    r"^(multiprocessing|xml|xmlrpc|_pyrepl|unittest|wsgiref|sqlite3|curses|dbm|ensurepip|idlelib|pydoc_data|tkinter"
    r"|turtledemo|venv|lib2to3|test|asyncio|email|http|concurrent|logging|ctypes|html|tomllib|pyodide_js)/"
    r"|^(pdb|doctest|pydoc|imaplib|smtplib|poplib|ftplib|mailbox|turtle|cProfile|profile|pstats|pickletools"
    r"|antigravity|this)\.py$|^encodings/(cp(?!437)|mac_|iso|big5|euc_|gb|hz|johab|koi8|shift_|ptcp|kz)"
)
NATIVE_LIBRARY = re.compile(r"^pydantic_core/.*\.so$")  # a separate file, which the browser compiles while it arrives
NOTHING = re.compile("$^")
KEPT = re.compile(r"^(asyncio|email|http|concurrent|logging|ctypes|html|tomllib)/")  # Pyodide or pydantic loads some


def members(archive: Path, never: re.Pattern[str], kept: re.Pattern[str] | None = None) -> dict[str, bytes]:
    """The files of an archive, without those that are never loaded."""
    with zipfile.ZipFile(archive) as opened:
        names = [name for name in opened.namelist() if not name.endswith("/")]
        return {
            name: opened.read(name)
            for name in names
            if not never.search(name) or (kept is not None and kept.search(name))
        }


def write_archive(target: Path, files: dict[str, bytes]) -> None:
    """Write an archive without compression; the same files give the same bytes."""
    with zipfile.ZipFile(target, "w") as made:
        for name in sorted(files):
            made.writestr(zipfile.ZipInfo(name, EPOCH), files[name], zipfile.ZIP_STORED)


def write_packages(target: Path, files: dict[str, bytes]) -> None:
    """Write the files as `worker.js` reads them, gzipped: the length of the index, the index, and their bytes."""
    index = json.dumps([[name, len(files[name])] for name in sorted(files)]).encode()
    content = len(index).to_bytes(4, "little") + index + b"".join(files[name] for name in sorted(files))
    target.write_bytes(gzip.compress(content, 9, mtime=0))


def sources() -> Iterator[Path]:
    """The files of the checkout that the page is made from."""
    for folder in ("memcalc", "configs", "tools/page"):
        yield from sorted(
            path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        )


def digest() -> str:
    """Return a digest of these files: a site that has another one is stale."""
    found = hashlib.sha256()
    for path in sources():
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def check_uplot(modules: Path) -> None:
    """Stop where the copies of uPlot in the package are not those of the pinned npm package."""
    for name, copy in UPLOT.items():
        if (modules / "uplot" / name).read_bytes() != (STATIC / copy).read_bytes():
            sys.exit(f"memcalc/page/static/{copy} is not {name} of the pinned uplot: copy it, and run this again.")


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("modules", "wheels", "memcalc", "site"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    modules = given.modules / "node_modules"
    check_uplot(modules)

    shutil.rmtree(given.site, ignore_errors=True)
    target = given.site / "pyodide"
    target.mkdir(parents=True)
    for name in PAGE:
        shutil.copyfile(STATIC / name, given.site / name)
    for name in PYODIDE:
        shutil.copyfile(modules / "pyodide" / name, target / name)
    lock = json.loads((modules / "pyodide" / "pyodide-lock.json").read_text())
    (target / "pyodide-lock.json").write_text(json.dumps({"info": lock["info"], "packages": {}}))

    files: dict[str, bytes] = {}
    for wheel in sorted([*given.wheels.glob("*.whl"), given.memcalc]):
        files |= members(wheel, NEVER)
    packages, library, choices = given.site / "packages.zip", target / "python_stdlib.zip", given.site / "choices.json"
    write_archive(packages, files)
    write_archive(library, members(modules / "pyodide" / "python_stdlib.zip", LIBRARY_NEVER, KEPT))
    subprocess.run(["node", COMPILER, (modules / "pyodide").resolve(), packages, library, choices], check=True)
    files = members(packages, NOTHING)
    (native,) = filter(NATIVE_LIBRARY.match, files)
    (given.site / "pydantic_core.wasm").write_bytes(files[native])
    files[native] = b""  # the import looks for a file
    (given.site / "rest.bin").write_bytes(gzip.compress(files.pop("rest.bin"), 9, mtime=0))
    write_packages(given.site / "packages.bin", files)
    write_archive(library, members(library, NOTHING))
    (given.site / "library.bin").write_bytes(gzip.compress(library.read_bytes(), 9, mtime=0))
    packages.unlink()
    library.unlink()

    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "memcalc" / "__init__.py").read_text())
    assert version is not None
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    offered = choices.read_text(encoding="utf-8").replace("<", "\\u003c")
    (given.site / "index.html").write_text(
        page.replace("%VERSION%", version[1]).replace("%CHOICES%", offered), encoding="utf-8"
    )
    choices.unlink()
    (given.site / "built.json").write_text(json.dumps({"sources": digest()}) + "\n")
    for path in sorted(path for path in given.site.rglob("*") if path.is_file()):
        print(f"{path.stat().st_size:>10,}  {path.relative_to(given.site)}")


if __name__ == "__main__":
    main()
