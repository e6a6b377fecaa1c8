"""Answer requests, and write the modules for the web page; runs in Pyodide (`compile.mjs`).

The modules that an answer loads become byte code of this interpreter, which halves the time to the first answer. All
others stay sources, which are smaller.
"""

import json
import marshal
import site
import sys
import zipfile
from importlib.util import MAGIC_NUMBER
from pathlib import Path

FOLDER = site.getsitepackages()[0]
HEADER = MAGIC_NUMBER + bytes(12)  # of a .pyc: no flags, time 0, size 0
BOOT: tuple[str, ...] = sys.boot_modules  # type: ignore[attr-defined]  # what is imported before sitecustomize


def answer() -> str:
    """Answer requests of each kind; return the choices of the form as JSON."""
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
    requests: list[dict[str, object]] = [{"kind": "estimate", "run": each} for each in runs]
    requests += [{"kind": "diff", "run": run, "other": run}]
    requests += [{"kind": "fit", "run": run, "maximize": "micro_batch_size"}]
    for request in requests:
        for part in map(json.loads, parts(json.dumps(request))):
            assert part["part"] != "error", part
    return json.dumps(choices())


def code(content: bytes, name: str) -> bytes:
    """Compile a module. memcalc keeps its assertions; others lose theirs and their docstrings, as with python -OO."""
    optimize = 0 if name.startswith("memcalc/") else 2
    return marshal.dumps(compile(content, name, "exec", dont_inherit=True, optimize=optimize))


def write_zip(target: str, files: dict[str, bytes]) -> None:
    """Write an archive; `build_page.py` gives its files a constant date."""
    with zipfile.ZipFile(target, "w") as made:
        for name in sorted(files):
            made.writestr(name, files[name])


def write_modules(files: dict[str, bytes]) -> bytes:
    """Return the content of `modules.bin`, from the modules' paths and contents."""
    index, at = {}, 0
    for file in sorted(files):
        parts = Path(file.removeprefix(f"{FOLDER}/").rpartition(".zip/")[2]).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        index[".".join(parts[:-1] if is_package else parts)] = (file, is_package, at, len(files[file]))
        at += len(files[file])
    head = marshal.dumps(index)
    return len(head).to_bytes(4, "little") + head + b"".join(files[file] for file in sorted(files))


def main() -> str:
    """Replace /packages.zip and /library.zip by what the page serves; return the choices of the form as JSON."""
    zipfile.ZipFile("/packages.zip").extractall(FOLDER)
    offered = answer()
    loaded = {getattr(module, "__file__", None) or "" for module in sys.modules.values()}
    first = {getattr(sys.modules[name], "__file__", None) or "" for name in BOOT if name in sys.modules}
    library = next(path for path in sys.path if path.endswith(".zip"))
    modules: dict[str, bytes] = {}
    kept: dict[str, dict[str, bytes]] = {"/packages.zip": {}, "/library.zip": {}}
    for archive, folder in (("/packages.zip", FOLDER), ("/library.zip", library)):
        with zipfile.ZipFile(archive) as given:
            for name in given.namelist():
                content, file = given.read(name), f"{folder}/{name}"
                if not name.endswith(".py"):
                    kept[archive][name] = content
                elif file in first:
                    kept[archive][f"{name}c"] = HEADER + code(content, name)
                elif file in loaded:
                    modules[f"{file}c"] = code(content, name)
                else:
                    modules[file] = content
    importer = Path("/sitecustomize.py").read_bytes()
    kept["/library.zip"]["sitecustomize.pyc"] = HEADER + code(importer, "sitecustomize.py")
    kept["/packages.zip"]["modules.bin"] = write_modules(modules)
    for archive, files in kept.items():
        write_zip(f"{archive}.new", files)
    return offered


main()
