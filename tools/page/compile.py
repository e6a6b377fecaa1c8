"""Answer requests, and write the modules for the web page; runs in Pyodide (`compile.mjs`).

The modules that an answer loads become byte code of this interpreter, which halves the time to the first answer. Those
that an estimate loads are in the file that the page loads first. All others stay sources, which are smaller.
"""

import collections
import dataclasses
import json
import marshal
import re
import site
import sys
import zipfile
import zlib
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import annotationlib  # type: ignore[import-not-found]

FOLDER = site.getsitepackages()[0]
HEADER = MAGIC_NUMBER + bytes(12)  # of a .pyc: no flags, time 0, size 0
BOOT: tuple[str, ...] = sys.boot_modules  # type: ignore[attr-defined]  # what is imported before sitecustomize


class Generated:
    """What modules compile when they are imported, for `sitecustomize.py`; records it from now on."""

    def __init__(self) -> None:
        self.sources: dict[str, Any] = {}  # of dataclasses, named tuples and annotations -> byte code
        self.patterns: dict[tuple[Any, int], tuple[Any, ...]] = {}  # pattern and flags -> arguments of _sre.compile
        for module, run in ((dataclasses, exec), (collections, eval)):
            vars(module)[run.__name__] = self._recording(run)
        vars(annotationlib)["compile"] = self._compiled
        self._record_patterns(vars(re)["_compiler"])

    def _record_patterns(self, compiler: Any) -> None:
        sre, translate = vars(compiler)["_sre"], compiler.compile
        arguments: list[tuple[Any, ...]] = []

        def record_arguments(*given: Any) -> Any:
            arguments.append(given)
            return sre.compile(*given)

        def record(pattern: Any, flags: int = 0) -> Any:
            made = translate(pattern, flags)
            if isinstance(pattern, str | bytes):
                _, kinds, codes, *groups = arguments[-1]
                # Flags and codes are subclasses of int, which cannot be marshalled.
                self.patterns[pattern, int(flags)] = (int(kinds), [int(each) for each in codes], *groups)
            return made

        vars(compiler).update(_sre=SimpleNamespace(**vars(sre) | {"compile": record_arguments}), compile=record)

    def _recording(self, run: Any) -> Any:
        return lambda source, *scopes: run(self._compiled(source, "<generated>", run.__name__), *scopes)

    def _compiled(self, source: str, file: str, kind: str) -> Any:
        self.sources[source] = made = compile(source, file, kind)
        return made


def module_name(file: str) -> str:
    """Return the name of the module in a file of an archive."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


TRIED: set[str] = set()  # modules that were imported; an import may have failed without consequences
sys.addaudithook(lambda event, arguments: TRIED.add(arguments[0]) if event == "import" else None)


def answer() -> tuple[set[str], str]:
    """Answer requests of each kind.

    Returns:
        the modules that estimates load, and the choices of the form as JSON.
    """
    from memcalc.startup import start_quickly

    start_quickly()
    from memcalc.page.engine import parts
    from memcalc.page.form import choices

    run = {"model": "gpt2", "gpu": "h100-80gb", "gpus": "2"}
    llama = {"model": "meta-llama/Llama-3.1-8B", "gpu": "t4"}
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 512}
    fields: tuple[dict[str, str], ...] = (
        {"parallelism.pipeline_parallel": "2"},
        {"training.implementation": "huggingface", "training.finetune": "lora"},
    )
    runs: list[dict[str, object]] = [run, *(llama | {"fields": each} for each in fields)]  # type: ignore[list-item]
    runs += [llama | {"gpus": "8", "fields": {"parallelism.zero_stage": "3"}}]
    runs += [{"text": json.dumps(config), "gpu": "t4"}]
    requests: list[dict[str, object]] = [{"kind": "diff", "run": run, "other": run}]
    requests += [{"kind": "fit", "run": run, "maximize": "micro_batch_size"}]

    def check(request: dict[str, object]) -> None:
        for part in map(json.loads, parts(json.dumps(request))):
            assert part["part"] != "error", part

    for each in runs:
        check({"kind": "estimate", "run": each})
    first = TRIED | set(sys.modules)
    for request in requests:
        check(request)
    return first, json.dumps(choices())


def code(content: bytes, name: str) -> bytes:
    """Compile a module. memcalc keeps its assertions; others lose theirs and their docstrings, as with python -OO."""
    optimize = 0 if name.startswith("memcalc/") else 2
    return marshal.dumps(compile(content, name, "exec", dont_inherit=True, optimize=optimize))


def write_zip(target: str, files: dict[str, bytes]) -> None:
    """Write an archive; `build_page.py` gives its files a constant date."""
    with zipfile.ZipFile(target, "w") as made:
        for name in sorted(files):
            made.writestr(name, files[name])


def write_modules(first: dict[str, bytes], rest: dict[str, bytes], generated: Generated) -> tuple[bytes, bytes]:
    """Return the contents of `modules.bin` and `rest.bin`, from the modules' paths and contents."""
    index, at = {}, 0
    for path, content in (*sorted(first.items()), *sorted(rest.items())):
        name = module_name(path.removesuffix("c").removeprefix(f"{FOLDER}/").rpartition(".zip/")[2])
        index[name] = (path, path.endswith(("/__init__.py", "/__init__.pyc")), at, len(content))
        at += len(content)
    modules, others = (b"".join(files[path] for path in sorted(files)) for files in (first, rest))
    head = {"index": index, "rest": zlib.crc32(others), "sources": generated.sources, "patterns": generated.patterns}
    written = marshal.dumps(head)
    return len(written).to_bytes(4, "little") + written + modules, others


def main() -> str:
    """Replace /packages.zip and /library.zip by what the page serves; return the choices of the form as JSON."""
    zipfile.ZipFile("/packages.zip").extractall(FOLDER)
    generated = Generated()
    needed, offered = answer()
    compiled = TRIED | set(sys.modules)
    library = next(path for path in sys.path if path.endswith(".zip"))
    first: dict[str, bytes] = {}
    rest: dict[str, bytes] = {}
    kept: dict[str, dict[str, bytes]] = {"/packages.zip": {}, "/library.zip": {}}
    for archive, folder in (("/packages.zip", FOLDER), ("/library.zip", library)):
        with zipfile.ZipFile(archive) as given:
            for file in given.namelist():
                content, name = given.read(file), module_name(file)
                if not file.endswith(".py"):
                    kept[archive][file] = content
                elif name in BOOT:
                    kept[archive][f"{file}c"] = HEADER + code(content, file)
                elif name in compiled:
                    (first if name in needed else rest)[f"{folder}/{file}c"] = code(content, file)
                else:
                    rest[f"{folder}/{file}"] = content
    importer = Path("/sitecustomize.py").read_bytes()
    kept["/library.zip"]["sitecustomize.pyc"] = HEADER + code(importer, "sitecustomize.py")
    modules, others = write_modules(first, rest, generated)
    kept["/packages.zip"] |= {"modules.bin": modules, "rest.bin": others}
    for archive, files in kept.items():
        write_zip(f"{archive}.new", files)
    return offered


main()
