"""The torch that a Python would import is found and described without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memcalc.errors import Unavailable
from memcalc.nullcuda.torch_build import NEWEST_CUDNN, find_torch

VERSION_FILE = """from typing import Optional
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
hip: Optional[str] = {hip}
"""
REQUIRES = "Requires-Dist: nvidia-cudnn-cu12==9.10.2.21; platform_system == 'Linux'\n"


def install(folder: Path, version: str, cuda: str = "None", hip: str = "None", metadata: str = "") -> None:
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(VERSION_FILE.format(version=version, cuda=cuda, hip=hip))
    (folder / f"torch-{version}.dist-info").mkdir()
    (folder / f"torch-{version}.dist-info" / "METADATA").write_text(metadata)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    return tmp_path


def test_a_cuda_build_is_described_by_its_files(site: Path) -> None:
    install(site, "2.8.0+cu128", cuda="'12.8'", metadata=REQUIRES)

    found = find_torch([sys.executable])

    assert (found.version, found.cuda, found.cudnn) == ("2.8.0+cu128", (12, 8), (9, 10, 2))
    assert found.nccl == (2, 99, 0)  # the metadata do not say


def test_without_metadata_the_libraries_are_newer_than_any_torch_asks_for(site: Path) -> None:
    install(site, "2.8.0", cuda="'12.8'")

    assert find_torch([sys.executable]).cudnn == NEWEST_CUDNN


def test_packages_with_cuda_code_are_looked_at_too(site: Path) -> None:
    install(site, "2.8.0", cuda="'12.8'")
    for name in (
        "bitsandbytes/libbitsandbytes_cuda128.so",
        "flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so",
        "yaml/_yaml.so",
    ):
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_bytes(b"")

    assert [path.name for path in find_torch([sys.executable]).extensions] == [
        "libbitsandbytes_cuda128.so",
        "flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so",
    ]


def test_packages_of_an_environment_that_stands_on_another_ones_torch(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "2.8.0", cuda="'12.8'")
    own = tmp_path / "own"
    (own / "bitsandbytes").mkdir(parents=True)
    (own / "bitsandbytes" / "libbitsandbytes_cuda128.so").write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(own), str(tmp_path / "not-there.zip"), str(site)])

    assert [path.parent.parent for path in find_torch([sys.executable]).extensions] == [own]


@pytest.mark.parametrize(("hip", "kind"), [("None", "CPU"), ("'6.3'", "ROCm")])
def test_another_build_is_named_with_the_way_out(site: Path, hip: str, kind: str) -> None:
    install(site, "2.13.0+x", hip=hip)

    with pytest.raises(Unavailable, match=rf"torch 2\.13\.0\+x in .* is a {kind} build.*--no-deps 'torch===2\.13\.0'"):
        find_torch([sys.executable])


def test_no_torch_at_all_is_said_so(site: Path) -> None:
    with pytest.raises(Unavailable, match=r"PyTorch, which is not installed.*--no-deps 'torch==="):
        find_torch([sys.executable])


def test_the_first_python_with_a_cuda_build_is_taken(site: Path, tmp_path: Path) -> None:
    """An interpreter that does not answer is ignored."""
    install(site, "2.8.0", cuda="'12.8'")

    assert find_torch([str(tmp_path / "no-python"), sys.executable]).version == "2.8.0"
