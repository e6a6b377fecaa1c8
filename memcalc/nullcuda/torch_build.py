"""The torch that a Python would import, located and described without importing it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memcalc.errors import Unavailable

HOW_TO_GET_ONE = (
    "Install PyTorch's CUDA build without NVIDIA's libraries, which are not needed: "
    "pip install --no-deps 'torch==={version}' (docs/guides/dry-run.md)."
)
SUGGESTED = "2.13.0"  # the version in memcalc's tests

# Packages with their own CUDA code, on the whole search path (an environment may inherit packages from another one that
# has torch): the NVIDIA libraries that they need are stubbed too. Scanning every package would take longer than all
# other steps.
EXTENSIONS = re.compile(
    r"(torchvision|torchaudio|bitsandbytes|flash_attn.*|xformers|transformer_engine.*|apex|amp_C|fused_\w+_cuda"
    r"|causal_conv1d.*|mamba_ssm|selective_scan_cuda|grouped_gemm.*|deep_gemm.*|liger_kernel)(\..*\.so)?"
)

# Versions of cuDNN and NCCL if torch's metadata do not state them: newer than in any released build of torch.
NEWEST_CUDNN, NEWEST_NCCL = (9, 99, 0), (2, 99, 0)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A CUDA build of torch."""

    directory: Path  # of the package
    version: str  # as in torch.__version__
    cuda: tuple[int, int]  # major and minor version of CUDA that it was built with
    cudnn: tuple[int, int, int]  # version of cuDNN that it was built with
    nccl: tuple[int, int, int]  # version of NCCL that it was built with
    extensions: tuple[Path, ...]  # libraries of other packages that also need CUDA

    @property
    def libraries(self) -> tuple[Path, ...]:
        """Libraries with dependencies that the stubs must satisfy."""
        own = [path for path in (self.directory / "lib").iterdir() if ".so" in path.suffixes and path.is_file()]
        return (*sorted(own), *self.extensions)


def find_torch(pythons: Iterable[str]) -> TorchBuild:
    """Return the first CUDA build of torch that one of these interpreters would import.

    Raises:
        Unavailable: there is none, or only one without CUDA.
    """
    wrong = ""
    for python in dict.fromkeys(pythons):
        entries = _search_path(python)
        for entry in entries:
            folder = Path(entry) / "torch"
            if (folder / "version.py").is_file():
                text = (folder / "version.py").read_text()
                if _assigned(text, "cuda"):
                    return _describe(folder, text, [Path(entry) for entry in entries])
                wrong = wrong or _without_cuda(folder, text)
                break
    raise Unavailable(
        wrong
        or f"The null CUDA device runs PyTorch, which is not installed. {HOW_TO_GET_ONE.format(version=SUGGESTED)}"
    )


def _without_cuda(folder: Path, text: str) -> str:
    version = _assigned(text, "__version__")
    kind = "ROCm" if _assigned(text, "hip") else "CPU"
    way_out = HOW_TO_GET_ONE.format(version=version.partition("+")[0])
    return f"torch {version} in {folder} is a {kind} build, but the null device needs a CUDA build. {way_out}"


def _search_path(python: str) -> list[str]:
    if python == sys.executable:
        return [entry for entry in sys.path if entry]
    script = "import json, sys; print(json.dumps(sys.path))"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=60, check=True)  # noqa: S603 -- the interpreter that the user is about to run
    except (OSError, subprocess.SubprocessError):
        return []
    entries: list[str] = json.loads(done.stdout.splitlines()[-1])
    return [entry for entry in entries if entry]


def _assigned(text: str, name: str) -> str:
    """Return the string that torch/version.py assigns to a name; "" for None."""
    match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _describe(folder: Path, text: str, search_path: list[Path]) -> TorchBuild:
    version = _assigned(text, "__version__")
    numbers = [int(number) for number in re.findall(r"\d+", _assigned(text, "cuda"))]
    required = _metadata(folder)
    return TorchBuild(
        directory=folder,
        version=version,
        cuda=(numbers[0], numbers[1]),
        cudnn=_required(required, "nvidia-cudnn", NEWEST_CUDNN),
        nccl=_required(required, "nvidia-nccl", NEWEST_NCCL),
        extensions=tuple(_extensions(dict.fromkeys([folder.parent, *search_path]))),
    )


def _metadata(folder: Path) -> str:
    """Return the metadata of the installed wheel; "" if torch is not installed from a wheel."""
    for path in folder.parent.glob("torch-*.dist-info/METADATA"):
        return path.read_text(errors="replace")
    return ""


def _required(metadata: str, package: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
    match = re.search(rf"^Requires-Dist: {package}-cu\d+ *==(\d+)\.(\d+)\.(\d+)", metadata, re.MULTILINE)
    return (int(match[1]), int(match[2]), int(match[3])) if match else default


def _extensions(search_path: Iterable[Path]) -> Iterator[Path]:
    for folder in search_path:
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if EXTENSIONS.fullmatch(entry.name):
                yield from sorted(entry.rglob("*.so")) if entry.is_dir() else [entry]
