"""PyTorch's out-of-memory messages."""

from __future__ import annotations

import pytest

from memcalc.allocator.driver import Driver
from memcalc.allocator.pytorch.caching import CachingAllocator
from memcalc.allocator.pytorch.messages import DeviceProcess, format_size
from memcalc.allocator.pytorch.settings import parse_settings
from memcalc.allocator.pytorch.versions import parse_version
from memcalc.errors import OutOfMemory
from tests.allocator.running import MIB, VERSIONS, allocator

OLD_PAGE = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
NEW_PAGE = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"


def message(subject: CachingAllocator, size: int) -> str:
    """Return the error text when `size` bytes are not available."""
    with pytest.raises(OutOfMemory) as error:
        subject.malloc(size)
    return str(error.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_worked_example(version: str) -> None:
    """300 + 3 of 1000 MiB are allocated, 320 reserved. 800 MiB + 5 bytes need a segment of 802."""
    subject = allocator(version=version, capacity=1000 * MIB)
    subject.malloc(300 * MIB)
    subject.malloc(3 * MIB)
    minor = parse_version(version).minor

    assert message(subject, 800 * MIB + 5) == (
        "CUDA out of memory. Tried to allocate 802.00 MiB. GPU 0 has a total capacity of 1000.00 MiB of which "
        "680.00 MiB is free. Of the allocated memory 303.00 MiB is allocated by PyTorch, and 17.00 MiB is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        f"{'PYTORCH_ALLOC_CONF' if minor == 10 else 'PYTORCH_CUDA_ALLOC_CONF'}=expandable_segments:True to avoid "
        f"fragmentation.  See documentation for Memory Management  ({OLD_PAGE if minor <= 10 else NEW_PAGE})"
    )


def test_with_a_fraction_it_names_what_is_allowed() -> None:
    """0.9 of 1000 MiB."""
    subject = allocator(capacity=1000 * MIB, fraction=0.9)
    subject.malloc(300 * MIB)
    subject.malloc(3 * MIB)

    assert "680.00 MiB is free. 900.00 MiB allowed; Of the allocated memory" in message(subject, 800 * MIB + 5)


def test_with_nvml_it_names_who_holds_what() -> None:
    processes = [DeviceProcess(4711, 2 * 1024 * MIB), DeviceProcess(None, 1536)]
    subject = CachingAllocator(driver=Driver(80 * 1024 * MIB, used=MIB), device=3, processes=processes)

    assert (
        "GPU 3 has a total capacity of 80.00 GiB of which 80.00 GiB is free. Process 4711 has 2.00 GiB memory in use. "
        "Including non-PyTorch memory, this process has 1.50 KiB memory in use. Of the allocated memory 0 bytes is "
    ) in message(subject, 90 * 1024 * MIB)


def test_what_is_used_from_the_start_is_not_free() -> None:
    subject = CachingAllocator(driver=Driver(1000 * MIB, used=500 * MIB))

    assert "total capacity of 1000.00 MiB of which 500.00 MiB is free. " in message(subject, 600 * MIB)


def test_an_exabyte() -> None:
    assert message(allocator(), 2**60) == "CUDA out of memory. Tried to allocate more than 1EB memory."
    assert message(allocator("expandable_segments:True"), 2**60) == message(allocator(), 2**61)


def test_a_preemptive_rejection_names_the_request() -> None:
    """No driver call, no flush, no num_ooms."""
    subject = allocator("throw_on_cudamalloc_oom:True", capacity=1000 * MIB)
    subject.free(subject.malloc(300 * MIB))

    assert message(subject, 800 * MIB + 5) == (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
        "limit. Requested size: 800.00 MiB"
    )
    statistics = subject.statistics()
    assert statistics["num_oom_rejections"] == 1
    assert statistics["num_ooms"] == statistics["num_alloc_retries"] == 0
    assert statistics["reserved_bytes.all.current"] == 300 * MIB


def test_under_a_fraction_the_ordinary_text_comes_first() -> None:
    subject = allocator("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.9", capacity=1000 * MIB)

    assert "900.00 MiB allowed; " in message(subject, 950 * MIB)
    assert subject.statistics()["num_oom_rejections"] == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (1000 * MIB, "1000.00 MiB"),
        (1024 * MIB, "1024.00 MiB"),
        (1024 * MIB + 1, "1.00 GiB"),
        (85899345920, "80.00 GiB"),
    ],
)
def test_sizes_as_pytorch_prints_them(size: int, text: str) -> None:
    assert format_size(size) == text


def test_a_release_before_throw_has_no_rejections() -> None:
    settings = parse_settings("", parse_version("2.11"))

    assert "num_oom_rejections" not in CachingAllocator(settings, parse_version("2.11")).statistics()
