"""Which stub libraries are made, and what is generated for each."""

from __future__ import annotations

from memcalc.nullcuda.elf import Needs, UndefinedSymbol
from memcalc.nullcuda.stubs import Library, generated_source, libraries, version_script

TORCH = Needs(
    ("libcudart.so.13", "libcusparse.so.12", "libnccl.so.2", "libcurl.so.4", "libc10.so"),
    (
        UndefinedSymbol("cudaMalloc", "libcudart.so.13", "libcudart.so.13"),
        UndefinedSymbol("cusparseCreate", "libcusparse.so.12", "libcusparse.so.12"),
        UndefinedSymbol("cusparseSpMM", "libcusparse.so.12", "libcusparse.so.12"),
        UndefinedSymbol("nvshmem_init", "libnvshmem_host.so.3", "NVSHMEM"),
        UndefinedSymbol("ncclAllReduce", "", ""),
        UndefinedSymbol("cuLaunchKernel", "", ""),
        UndefinedSymbol("curl_easy_init", "libcurl.so.4", "CURL_4"),
        UndefinedSymbol("cunningly_named", "", ""),
        UndefinedSymbol("malloc", "libc.so.6", "GLIBC_2.2.5"),
    ),
)


def made() -> dict[str, Library]:
    return {library.soname: library for library in libraries([TORCH])}


def test_only_libraries_of_nvidias_are_made() -> None:
    """Those that torch names, by need or by version, and the two that are only loaded at run time."""
    assert set(made()) == {
        "libcudart.so.13",
        "libcusparse.so.12",
        "libnccl.so.2",
        "libnvshmem_host.so.3",
        "libcuda.so.1",
        "libnvidia-ml.so.1",
    }


def test_symbols_without_versions_go_by_their_names() -> None:
    assert made()["libnccl.so.2"].symbols == {"ncclAllReduce": ""}
    assert made()["libcuda.so.1"].symbols == {"cuLaunchKernel": ""}


def test_versions_are_the_ones_that_torch_asks_for() -> None:
    assert version_script(made()["libcudart.so.13"]) == "libcudart.so.13 { global: *; };\n"
    assert version_script(made()["libnvshmem_host.so.3"]) == "NVSHMEM { global: *; };\n"
    assert version_script(made()["libnccl.so.2"]) is None


def test_further_versions_name_their_symbols() -> None:
    library = Library("libnvjitlink.so.12", {"a": "V1", "b": "V2", "c": "V2"})

    assert version_script(library) == "V1 { global: *; };\nV2 { global: b; c; };\n"


def test_stubs_are_weak_so_that_written_functions_win() -> None:
    assert "API __attribute__((weak)) long cudaMalloc(void) { return SUCCESS; }" in generated_source(
        made()["libcudart.so.13"]
    )


def test_what_is_not_modelled_is_refused_and_named() -> None:
    """cuSPARSE: 10 is CUSPARSE_STATUS_NOT_SUPPORTED; handles can be made all the same."""
    source = generated_source(made()["libcusparse.so.12"])

    assert 'null_unmodelled("libcusparse", "cusparseSpMM", &seen); return 10;' in source
    assert "long cusparseCreate(void) { return SUCCESS; }" in source
