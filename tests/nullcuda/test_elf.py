"""What a shared library needs is read from the file itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memcalc.nullcuda.elf import UndefinedSymbol, read_needs

VERSIONED = 'int puts(const char *); int made_up(); int f() { puts(""); return made_up(); }'


def test_a_versioned_symbol_names_its_library(shared_library: Callable[..., Path]) -> None:
    needs = read_needs(shared_library("libx.so", VERSIONED))

    assert "libc.so.6" in needs.libraries
    puts = next(need for need in needs.symbols if need.symbol == "puts")
    assert puts.library == "libc.so.6"
    assert puts.version.startswith("GLIBC_")


def test_an_unversioned_symbol_has_no_library(shared_library: Callable[..., Path]) -> None:
    needs = read_needs(shared_library("libx.so", VERSIONED))

    assert UndefinedSymbol("made_up", "", "") in needs.symbols


def test_what_a_library_defines_it_does_not_need(shared_library: Callable[..., Path]) -> None:
    needs = read_needs(shared_library("libx.so", VERSIONED))

    assert "f" not in {need.symbol for need in needs.symbols}


def test_libraries_of_other_packages_can_be_read() -> None:
    import numpy as np

    extension = next(Path(np.__file__).parent.rglob("_multiarray_umath*.so"))

    assert "malloc" in {need.symbol for need in read_needs(extension).symbols}


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("INPUT(libx.so.1)")

    with pytest.raises(ValueError, match="not an ELF file"):
        read_needs(tmp_path / "x.so")
