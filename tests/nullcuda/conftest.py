"""Devices to test on: one built for a made-up torch, without any; and PyTorch's CUDA build, where it is installed."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from memcalc.nullcuda import DryRun, environment, run
from memcalc.nullcuda.build import device_folder
from memcalc.nullcuda.gpu_description import find_null_gpu, properties
from memcalc.nullcuda.torch_build import TorchBuild
from tests.nullcuda.scripts import Ended, Script, run_scripts

ROOT = Path(__file__).parents[2]

# Made by `make .venv-null`; another one can be named.
NULL_PYTHON = Path(os.environ.get("MEMCALC_NULL_PYTHON") or ROOT / ".venv-null" / "bin" / "python")

OnDevice = Callable[..., Any]


@pytest.fixture(autouse=True)
def needs_linux() -> None:
    if platform.system() != "Linux":
        pytest.skip("the null device is for Linux")


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture(scope="session")
def shared_library(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a shared library from C text."""

    def build(name: str, source: str, *flags: str | Path) -> Path:
        folder = tmp_path_factory.mktemp("library")
        (folder / "source.c").write_text(source)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-w", "-o", folder / name, folder / "source.c", *flags], check=True
        )
        return folder / name

    return build


def fake_torch(folder: Path, shared_library: Callable[..., Path], version: str = "9.9.0+cu128") -> TorchBuild:
    """A torch that needs two functions of a versioned runtime and one of NCCL's, which has no versions."""
    script = folder / "map"
    script.write_text("libcudart.so.12 { global: *; };")
    runtime = shared_library(
        "libcudart.so.12",
        "int cudaMalloc(){} int cudaNobodyWroteThis(){}",
        "-Wl,-soname,libcudart.so.12",
        f"-Wl,--version-script,{script}",
    )
    needing = "int cudaMalloc(); int cudaNobodyWroteThis(); int ncclSend(); int f(){cudaMalloc();cudaNobodyWroteThis();ncclSend();}"
    library = shared_library("libtorch_cuda.so", needing, f"-L{runtime.parent}", "-l:libcudart.so.12")
    (folder / "torch" / "lib").mkdir(parents=True)
    shutil.copy(library, folder / "torch" / "lib")
    return TorchBuild(folder / "torch", version, (12, 8), (9, 10, 2), (2, 27, 3), ())


@pytest.fixture(scope="session")
def torch_build(shared_library: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> TorchBuild:
    return fake_torch(tmp_path_factory.mktemp("site-packages"), shared_library)


@pytest.fixture(scope="session")
def device(torch_build: TorchBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built device, without any torch."""
    return device_folder(torch_build, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def on_device(device: Path) -> OnDevice:
    """Runs Python with the runtime, driver and NCCL of the null device at hand; returns what it assigns to `result`."""
    prelude = f"""
import ctypes, json
from ctypes import byref, c_float, c_int, c_longlong, c_size_t, c_void_p, create_string_buffer
core = ctypes.CDLL("{device}/libmemcalcnull.so", ctypes.RTLD_GLOBAL)
rt, cu, nccl, nvml = (ctypes.CDLL("{device}/" + n) for n in ("libcudart.so.12", "libcuda.so.1", "libnccl.so.2", "libnvidia-ml.so.1"))
def malloc(size):
    out = c_void_p()
    return rt.cudaMalloc(byref(out), c_size_t(size)), out
def counts():
    numbers = (c_longlong * 6)()
    core.null_read_counts(numbers)
    return list(numbers)
def copy(to, source, size):
    return rt.cudaMemcpyAsync(to, source, c_size_t(size), 4, None)
"""

    def run(code: str, card: str = "h100-80gb", gpus: int = 1, *, delayed: bool = False, **variables: str) -> Any:
        figures = properties(find_null_gpu(card), gpus, delayed_events=delayed)
        process = subprocess.run(
            [sys.executable, "-c", f"{prelude}\n{code}\nprint(json.dumps(result))"],
            env={**os.environ, "MEMCALC_NULL_PROPERTIES": figures, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def null_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all the processes that pytest shares the tests among, below a directory that this run has of its own."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"


@pytest.fixture(autouse=True)
def own_cache(null_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(null_cache))


@pytest.fixture(scope="session")
def null_python(compiler: str, null_cache: Path) -> str:
    """An interpreter with PyTorch's CUDA build; the first process of pytest that needs its device builds it for all."""
    if not NULL_PYTHON.exists():
        pytest.skip(f"no CUDA build of torch in {NULL_PYTHON.parents[1]}: `make .venv-null` installs one")
    null_cache.mkdir(exist_ok=True)
    with (null_cache / "lock").open("w") as lock, pytest.MonkeyPatch.context() as monkeypatch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setenv("XDG_CACHE_HOME", str(null_cache))
        environment("h100-80gb", pythons=[str(NULL_PYTHON)])
    return str(NULL_PYTHON)


@pytest.fixture(scope="session")
def run_all(
    null_python: str, null_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Ended]]:
    """Runs several scripts' texts, each in a process of its own, with one import of torch or other modules."""

    def call(scripts: Mapping[str, str], modules: str = "torch") -> dict[str, Ended]:
        folder = tmp_path_factory.mktemp("scripts")
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("XDG_CACHE_HOME", str(null_cache))
            monkeypatch.chdir(folder)
            return run_scripts(scripts, null_python, folder, modules)

    return call


@pytest.fixture
def dry_run_here(null_python: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for scripts, with the cache of this test session."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def dry_run(dry_run_here: Path, null_python: str) -> Script:
    """Runs a script's text on an H100; its output is kept in the file "out"."""

    def call(text: str, *arguments: str, gpus: int = 1, **named: Any) -> DryRun:
        (dry_run_here / "script.py").write_text(text)
        with (dry_run_here / "out").open("w") as out:
            return run([null_python, "script.py", *arguments], "h100-80gb", gpus=gpus, stdout=out, **named)

    return call
