"""Building the device: once, whole or not at all, with a message for whatever can be missing."""

from __future__ import annotations

import errno
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import Unavailable
from memcalc.nullcuda import build
from memcalc.nullcuda.build import BUILDING, device_folder, key
from memcalc.nullcuda.elf import read_needs
from memcalc.nullcuda.torch_build import TorchBuild


def test_every_need_is_met(device: Path, torch_build: TorchBuild) -> None:
    """The functions that torch needs are defined, under the version it asks for, beside hand-written ones."""
    from elftools.elf.elffile import ELFFile

    with (device / "libcudart.so.12").open("rb") as file:
        elf: Any = ELFFile(file)
        symbols = elf.get_section_by_name(".dynsym")
        defined = {symbol.name for symbol in symbols.iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"}
        versions = {
            entry.name for _, entries in elf.get_section_by_name(".gnu.version_d").iter_versions() for entry in entries
        }
    assert {"cudaMalloc", "cudaNobodyWroteThis", "cudaGetDeviceProperties_v2"} <= defined
    assert "libcudart.so.12" in versions


def test_the_stubs_need_only_each_other_and_libc(device: Path) -> None:
    needed = {name for path in device.glob("*.null") for name in read_needs(path).libraries}

    loader = {name for name in needed if name.startswith("ld-linux")}
    assert needed - loader <= {"libmemcalcnull.so", "libc.so.6", "libdl.so.2"}


def test_a_built_device_is_found_again_at_once(device: Path, torch_build: TorchBuild) -> None:
    start = time.process_time()

    assert device_folder(torch_build, device.parent) == device
    assert time.process_time() - start < 0.2


@pytest.mark.long
def test_two_builders_at_once_agree(torch_build: TorchBuild, tmp_path: Path, compiler: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: device_folder(torch_build, tmp_path), range(2))

    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == [key(torch_build)]


def test_a_build_that_fails_leaves_nothing(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build, "_make", full)

    with pytest.raises(Unavailable, match=r"No space left on device.*XDG_CACHE_HOME"):
        device_folder(torch_build, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_what_killed_builds_left_behind_goes_in_time(torch_build: TorchBuild, tmp_path: Path, compiler: str) -> None:
    old, young = tmp_path / f"{BUILDING}old", tmp_path / f"{BUILDING}young"
    for folder in (old, young):
        folder.mkdir()
    os.utime(old, (0, 0))

    device_folder(torch_build, tmp_path)

    assert not old.exists()
    assert young.exists()  # somebody may be at it


def test_a_cache_that_cannot_be_made_is_named(torch_build: TorchBuild, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(Unavailable, match=r"built once, in .*file/cache: .*XDG_CACHE_HOME"):
        device_folder(torch_build, tmp_path / "file" / "cache")


def test_a_user_without_a_home_is_asked_for_a_directory(
    torch_build: TorchBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pathlib says it where HOME is not set and the user's number is in no list of users."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)

    with pytest.raises(Unavailable, match=r"a cache in the home directory, which is missing.*XDG_CACHE_HOME"):
        device_folder(torch_build)


def test_without_a_compiler_the_message_says_what_to_install(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    with pytest.raises(Unavailable, match=r"there is no C compiler.*apt-get install gcc"):
        device_folder(torch_build, tmp_path / "cache")


def test_a_broken_compiler_is_named(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'fatal error: stdio.h: No such file' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))

    with pytest.raises(Unavailable, match=r"broken-cc could not build.*stdio\.h"):
        device_folder(torch_build, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_elsewhere_than_on_linux_the_message_says_where_to_go(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")

    with pytest.raises(Unavailable, match="needs Linux, and this is Darwin"):
        device_folder(torch_build, tmp_path)


def test_the_key_names_what_the_device_depends_on(torch_build: TorchBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    base = key(torch_build)

    assert base.startswith("torch-9.9.0+cu128-cuda-12-")
    assert key(replace(torch_build, version="9.9.1+cu128")) != base
    assert key(replace(torch_build, cudnn=(9, 11, 0))) != base
    assert key(replace(torch_build)) == base


def test_code_for_another_cuda_is_left_out(torch_build: TorchBuild) -> None:
    """Some packages ship one library for each CUDA version; its structures are laid out differently."""
    from memcalc.nullcuda.elf import Needs

    assert build._same_cuda(Needs(("libcudart.so.12",), ()), torch_build)
    assert not build._same_cuda(Needs(("libcudart.so.11.0",), ()), torch_build)
