"""The libraries to build, and the generated part of each: every symbol without a hand-written definition."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from memcalc.nullcuda.elf import Needs

# Libraries of NVIDIA, by soname.
OURS = re.compile(r"lib(cu(?!rl)|nv|nccl)\w*(-ml)?\.so")

# Hand-written sources, by the library's name without ".so" and version.
SOURCES = {
    "libcudart": "cudart.c",
    "libcuda": "cuda.c",
    "libcublas": "cublas.c",
    "libcublasLt": "cublaslt.c",
    "libcudnn": "cudnn.c",
    "libnccl": "nccl.c",
    "libnvidia-ml": "nvml.c",
    "libnvrtc": "nvrtc.c",
}

# Some libraries have symbols without versions, and ELF does not state a symbol's library: its name does. The sonames
# are those of CUDA 12 and 13; one that torch itself names takes precedence.
UNVERSIONED = (
    (re.compile(r"nccl[A-Z]"), "libnccl.so.2"),
    (re.compile(r"cusparseLt[A-Z]"), "libcusparseLt.so.0"),
    (re.compile(r"cuFile[A-Z]"), "libcufile.so.0"),
    (re.compile(r"nvshmem"), "libnvshmem_host.so.3"),
    (re.compile(r"nvml[A-Z]"), "libnvidia-ml.so.1"),
    (re.compile(r"cu[A-Z]"), "libcuda.so.1"),
)

# Loaded by name at run time, so no file lists them as needed.
ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")

# "Not supported" in the status codes of libraries that compute sizes of tensors or workspaces: functions that are not
# modelled are rejected, and PyTorch's error names them. Functions of other libraries do not affect memory: success.
REFUSALS = {"libcusolver": 9, "libcusparse": 10, "libcufft": 16, "libcusparseLt": 10}
HARMLESS = re.compile(r"Create|Destroy|Set[A-Z]|[Ii]nit|Get(Stream|Version|Property|ErrorString)")


@dataclass
class Library:
    """One library to build."""

    soname: str  # its soname
    symbols: dict[str, str] = field(default_factory=dict)  # symbols that it must define, each with its version or ""

    @property
    def name(self) -> str:
        """The soname without ".so" and version: "libcudart"."""
        return self.soname.partition(".so")[0]


def libraries(needs: Iterable[Needs]) -> list[Library]:
    """Return the NVIDIA libraries that these files need, each with the needed symbols."""
    found = {soname: Library(soname) for soname in ALWAYS}
    loose: list[str] = []
    for need in needs:
        for soname in filter(OURS.match, need.libraries):
            found.setdefault(soname, Library(soname))
        for symbol, soname, version in need.symbols:
            if OURS.match(soname):
                found.setdefault(soname, Library(soname)).symbols[symbol] = version
            elif not soname:
                loose.append(symbol)
    for symbol in loose:
        home = next((soname for pattern, soname in UNVERSIONED if pattern.match(symbol)), None)
        if home is not None:
            named = [soname for soname in found if soname.partition(".so")[0] == home.partition(".so")[0]]
            library = found.setdefault(named[0] if named else home, Library(home))
            library.symbols.setdefault(symbol, "")
    return [found[soname] for soname in sorted(found)]


def generated_source(library: Library) -> str:
    """Return C that defines every symbol weakly: a hand-written definition in the same library overrides it."""
    lines = ["/* Generated. */", '#include "null.h"']
    lines += [
        f"API __attribute__((weak)) long {symbol}(void) {{ {_body(library, symbol)} }}"
        for symbol in sorted(library.symbols)
    ]
    return "\n".join(lines) + "\n"


def _body(library: Library, symbol: str) -> str:
    status = REFUSALS.get(library.name)
    if status is None or HARMLESS.search(symbol):
        return "return SUCCESS;"
    return f'static int seen; null_unmodelled("{library.name}", "{symbol}", &seen); return {status};'


def version_script(library: Library) -> str | None:
    """Return the linker's version script with the versions that torch needs; None if it needs none."""
    versions = sorted(set(library.symbols.values()) - {""})
    if not versions:
        return None
    first, *others = versions
    # Other defined symbols get the first version, as in NVIDIA's libraries, which have one.
    nodes = [f"{first} {{ global: *; }};"]
    for version in others:
        symbols = "".join(f" {symbol};" for symbol, own in sorted(library.symbols.items()) if own == version)
        nodes.append(f"{version} {{ global:{symbols} }};")
    return "\n".join(nodes) + "\n"
