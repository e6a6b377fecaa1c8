"""Undefined symbols of shared libraries, each with the library and the version that it is bound to.

pyelftools finds the sections and reads the small ones. The symbol table, with hundreds of thousands of entries in
torch's libraries, is read as plain records (System V gABI, chapter "Symbol Table": 24 bytes per entry in ELF64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.errors import Unavailable
from memcalc.extras import installation

SYMBOL = struct.Struct("<IBBHQQ")  # st_name, st_info, st_other, st_shndx, st_value, st_size
UNDEFINED = 0  # SHN_UNDEF
HIDDEN_BIT = 0x7FFF  # mask of a version index without its hidden bit


class UndefinedSymbol(NamedTuple):
    """One undefined symbol. Library and version are empty if the file does not state them."""

    symbol: str
    library: str  # soname
    version: str


class Needs(NamedTuple):
    """All dependencies of one file."""

    libraries: tuple[str, ...]  # sonames of DT_NEEDED
    symbols: tuple[UndefinedSymbol, ...]


def read_needs(path: Path) -> Needs:
    """Return the dependencies of a shared library.

    Raises:
        Unavailable: pyelftools is missing.
        ValueError: the file is not a 64-bit little-endian ELF file.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError:
        raise Unavailable(
            f"The null CUDA device needs pyelftools, which is not installed. Run: {installation('null')}"
        ) from None
    with path.open("rb") as file:
        try:
            elf: Any = ELFFile(file)
        except ELFError as error:
            raise ValueError(f"{path} is not an ELF file: {error}") from error
        if elf.elfclass != 64 or not elf.little_endian:
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
        libraries = [] if dynamic is None else [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
        return Needs(tuple(libraries), () if symbols is None else tuple(_undefined(elf, symbols)))


def _undefined(elf: Any, symbols: Any) -> Iterator[UndefinedSymbol]:
    names: bytes = elf.get_section(symbols["sh_link"]).data()
    origins = _origins(elf)
    versions = elf.get_section_by_name(".gnu.version")
    indices: Iterable[int] = () if versions is None else memoryview(versions.data()).cast("H")
    of_symbol = list(indices)
    for number, (name, _, _, section, _, _) in enumerate(SYMBOL.iter_unpack(symbols.data())):
        if section == UNDEFINED and name:
            index = of_symbol[number] & HIDDEN_BIT if of_symbol else 1
            yield UndefinedSymbol(names[name : names.index(b"\0", name)].decode(), *origins.get(index, ("", "")))


def _origins(elf: Any) -> dict[int, tuple[str, str]]:
    """Return library and version by version index of the file."""
    section = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return {}
    return {
        entry["vna_other"]: (library.name, entry.name)
        for library, entries in section.iter_versions()
        for entry in entries
    }
