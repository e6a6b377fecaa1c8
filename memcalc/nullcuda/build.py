"""Build of the null device's libraries for one build of torch, once, into a cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from memcalc.directories import LOCK, temporary_directory
from memcalc.errors import Unavailable
from memcalc.nullcuda.elf import Needs, read_needs
from memcalc.nullcuda.stubs import SOURCES, Library, generated_source, libraries, version_script
from memcalc.nullcuda.torch_build import TorchBuild

SOURCE_FOLDER = Path(__file__).parent / "src"
CORE = "libmemcalcnull.so"
CORE_SOURCES = ("device.c", "host.c", "kept.c", "exchange.c", "clock.c")
VALUES, VALUES_SOURCE = "libmemcalcvalues.so", "values.cpp"
PROGRAMS = "bin"  # directory of the device's programs, for PATH
NVIDIA_SMI = "nvidia-smi"
BUILDING = ".building-"

# The library's file has another name than its soname, which is a link to it. torch searches the mapped files for
# "libcudart.so", and if it finds one it loads NVIDIA's real libraries, where they are installed.
FILE_SUFFIX = ".null"


def device_folder(torch: TorchBuild, cache: Path | None = None) -> Path:
    """Return the directory with the libraries for this torch; build them if they are missing.

    Raises:
        Unavailable: this is not Linux, there is no C compiler, it fails, or the cache cannot be written.
    """
    if platform.system() != "Linux":
        raise Unavailable(
            f"The null CUDA device needs Linux, and this is {platform.system()}: PyTorch has no CUDA build with "
            "replaceable libraries elsewhere. Use a Linux machine, container or WSL; `memcalc estimate` runs anywhere."
        )
    cache = cache or cache_folder()
    folder = cache / key(torch)
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with temporary_directory(BUILDING, cache) as scratch:
            _build(torch, scratch)
            _publish(scratch, folder)
    except OSError as error:
        raise Unavailable(
            f"The null CUDA device is built once, in {cache}: {error.strerror or error}. "
            "Free space there, or set XDG_CACHE_HOME to another directory."
        ) from error
    return folder


def cache_folder() -> Path:
    """Return the directory of built devices.

    Raises:
        Unavailable: XDG_CACHE_HOME is not set, and the user has no home directory.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named or Path.home() / ".cache") / "memcalc" / "nullcuda"
    except RuntimeError as error:  # a numeric user id of a container, without a home
        raise Unavailable(
            "The null CUDA device is built once, into a cache in the home directory, which is missing. "
            "Set XDG_CACHE_HOME to a directory."
        ) from error


def key(torch: TorchBuild) -> str:
    """Return a name that identifies everything the libraries depend on."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in (*sorted(SOURCE_FOLDER.iterdir()), *(here / name for name in ("build.py", "elf.py", "stubs.py"))):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((torch.version, torch.cuda, torch.cudnn, torch.nccl, platform.machine())).encode())
    digest.update(_cxx_compiler(torch).encode())
    for path in torch.extensions:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return f"torch-{torch.version}-cuda-{torch.cuda[0]}-{digest.hexdigest()[:16]}"


def _publish(scratch: Path, folder: Path) -> None:
    """Rename the finished directory to its final name, atomically."""
    scratch.chmod(0o755)  # temporary directories are private
    (scratch / LOCK).unlink(missing_ok=True)
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process has published the same
            raise


def _build(torch: TorchBuild, folder: Path) -> None:
    compiler = _compiler()
    flags = [
        *("-shared", "-fPIC", "-O1", "-std=gnu11", "-fno-builtin", f"-I{SOURCE_FOLDER}"),
        f"-DCUDA_VERSION={1000 * torch.cuda[0] + 10 * torch.cuda[1]}",
        f"-DCUDNN_VERSION={_number(torch.cudnn)}",
        f"-DNCCL_VERSION={_number(torch.nccl)}",
    ]
    core = [str(SOURCE_FOLDER / name) for name in CORE_SOURCES]
    _compile([compiler, *flags, "-o", str(folder / CORE), *core, f"-Wl,-soname,{CORE}", "-ldl", "-lpthread"])
    wanted = libraries(need for path in torch.libraries if _same_cuda(need := read_needs(path), torch))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        values = pool.submit(_make_values, torch, folder)  # takes longest
        program = pool.submit(_make_program, [compiler, *flags[1:]], folder)
        list(pool.map(lambda library: _make(library, [compiler, *flags], folder), wanted))
        program.result()
        values.result()
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # the name that Triton links against


def _make_program(command: Sequence[str], folder: Path) -> None:
    """Compile nvidia-smi, which programs call to find GPUs and which a machine without a driver lacks."""
    (folder / PROGRAMS).mkdir()
    source = str(SOURCE_FOLDER / "nvidia_smi.c")
    link = [f"-L{folder}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN/.."]
    _compile([*command, "-o", str(folder / PROGRAMS / NVIDIA_SMI), source, *link])


def _make_values(torch: TorchBuild, folder: Path) -> None:
    """Compile the library of known values; without it the device works too, but reports that no value is known."""
    compiler = _cxx_compiler(torch)
    if not compiler:
        return
    own_strings = int(
        b"__cxx11" in (torch.directory / "lib" / "libc10.so").read_bytes()
    )  # torch before 2.7 has the old strings
    flags = ["-shared", "-fPIC", "-O1", "-std=c++20", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={own_strings}"]
    link = [f"-L{torch.directory / 'lib'}", "-lc10", "-ltorch_cpu", f"-L{folder}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN"]
    source = str(SOURCE_FOLDER / VALUES_SOURCE)
    command = [compiler, *flags, f"-I{torch.directory / 'include'}", "-o", str(folder / VALUES), source, *link]
    try:
        _compile(command)
    except Unavailable:
        (folder / VALUES).unlink(missing_ok=True)


def _cxx_compiler(torch: TorchBuild) -> str:
    """Return the system's C++ compiler: $CXX, else c++, g++ or clang++; "": there is none, or torch has no headers."""
    if not (torch.directory / "include" / "torch" / "library.h").is_file():
        return ""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), "")


def _same_cuda(needs: Needs, torch: TorchBuild) -> bool:
    """Return whether a library is for torch's CUDA version:

    some packages ship code for several, with other struct layouts.
    """
    runtimes = [name for name in needs.libraries if name.startswith("libcudart.so.")]
    return all(name.split(".")[2] == str(torch.cuda[0]) for name in runtimes)


def _number(version: tuple[int, int, int]) -> int:
    """Return a version as cuDNN (since 9) and NCCL (since 2.9) encode it: 9.20.1 is 92001."""
    return 10000 * version[0] + 100 * version[1] + version[2]


def _make(library: Library, command: Sequence[str], folder: Path) -> None:
    """Compile one library: the hand-written source if there is one, and stubs for the other symbols."""
    file = f"{library.soname}{FILE_SUFFIX}".removeprefix("lib")
    generated = folder / f"{library.name}.c"
    generated.write_text(generated_source(library))
    sources = [str(generated)]
    if library.name in SOURCES:
        sources.append(str(SOURCE_FOLDER / SOURCES[library.name]))
    link = [f"-Wl,-soname,{library.soname}", f"-L{folder}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN", "-ldl"]
    script = version_script(library)
    if script is not None:
        versions = folder / f"{library.name}.map"
        versions.write_text(script)
        link.append(f"-Wl,--version-script,{versions}")
    _compile([*command, "-o", str(folder / file), *sources, *link])
    (folder / library.soname).symlink_to(file)


def _compiler() -> str:
    """Return the system's C compiler: $CC, else cc, gcc or clang."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise Unavailable(
        "The null CUDA device is compiled once, and there is no C compiler (cc, gcc, clang). "
        "Install one, e.g. `apt-get install gcc libc6-dev` or `dnf install gcc`, or name one with CC."
    )


def _compile(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- memcalc's own command line
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line or "No space" in line]
        detail = (lines or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
        raise Unavailable(
            f"The C compiler {command[0]} could not build the null CUDA device: {detail.strip()} "
            "Check that it compiles C at all (on Debian and Ubuntu it needs libc6-dev), or name another with CC."
        )
