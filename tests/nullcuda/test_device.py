"""The device's books, asked through its C interfaces: capacity, what reads back, events, ranks, names."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from memcalc.nullcuda.gpu_description import NCCL_FIRST_BYTES, NCCL_FURTHER_BYTES, find_null_gpu, properties
from memcalc.spec.hardware.gpus import find_gpu

H100 = find_gpu("h100-80gb")
GIB = 2**30


def test_the_gpu_is_full_where_it_should_be(on_device: Any) -> None:
    """Usable 79.10 GiB, 748 MiB of them in use from the start: 78 GiB can be had, 79 cannot."""
    result = on_device("result = [malloc(78 << 30)[0], malloc(1 << 30)[0]]")

    assert result == [0, 2]
    assert on_device("result = [malloc(79 << 30)[0]]") == [2]


def test_memory_comes_back(on_device: Any) -> None:
    code = "first = malloc(70 << 30)[1]; rt.cudaFree(first); result = malloc(70 << 30)[0]"

    assert on_device(code) == 0


def test_total_and_free_are_what_a_framework_sees(on_device: Any) -> None:
    code = """
malloc(3 << 20)  # pages of 2 MiB: 4 MiB
free, total = c_size_t(), c_size_t()
rt.cudaMemGetInfo(byref(free), byref(total))
result = [free.value, total.value]"""

    free, total = on_device(code)

    assert total == H100.usable_bytes
    assert free == total - H100.context_bytes - 4 * 2**20


def test_device_memory_costs_the_host_nothing(on_device: Any) -> None:
    code = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
malloc(1 << 30)
before = resident()
malloc(70 << 30)
result = resident() - before"""

    assert on_device(code) < 2**20


def test_what_the_host_wrote_reads_back(on_device: Any) -> None:
    code = """
_, there = malloc(1024)
copy(there, create_string_buffer(b"sizes of ranks"), 15)
back = create_string_buffer(b"x" * 20, 20)
copy(back, there, 20)
result = [back.raw.decode(), counts()[1:4]]"""

    assert on_device(code) == ["sizes of ranks" + "\0" * 6, [1, 1, 20]]


def test_what_kernels_should_have_computed_reads_as_zeros(on_device: Any) -> None:
    """After 64 kernels the block may hold something else: the old bytes are forgotten."""
    code = """
_, there = malloc(1024)
copy(there, create_string_buffer(b"old"), 4)
for _ in range(65):
    core.null_launch()
back = create_string_buffer(b"xxx")
copy(back, there, 4)
result = back.raw.hex()"""

    assert on_device(code) == "00000000"


def test_memory_that_is_freed_forgets(on_device: Any) -> None:
    code = """
_, there = malloc(1024)
copy(there, create_string_buffer(b"old"), 4)
rt.cudaFree(there)
_, again = malloc(1024)
back = create_string_buffer(b"xxx")
copy(back, again, 4)
result = [again.value == there.value, back.raw.hex()]"""

    assert on_device(code) == [True, "00000000"]


def test_copies_on_the_device_carry_what_the_host_wrote(on_device: Any) -> None:
    code = """
_, a = malloc(1024)
_, b = malloc(1024)
copy(a, create_string_buffer(b"abc"), 4)
copy(b, a, 4)
back = create_string_buffer(4)
copy(back, b, 4)
result = [back.value.decode(), counts()[1]]"""

    assert on_device(code) == ["abc", 1]


EVENT = """
stream, event = c_void_p(), c_void_p()
rt.cudaStreamCreate(byref(stream))
rt.cudaEventCreate(byref(event))
rt.cudaEventRecord(event, stream)
before = rt.cudaEventQuery(event)
rt.{wait}
result = [before, rt.cudaEventQuery(event)]"""


def test_events_are_complete_at_once(on_device: Any) -> None:
    assert on_device(EVENT.format(wait="cudaDeviceSynchronize()")) == [0, 0]


def test_delayed_events_are_complete_when_the_host_has_waited(on_device: Any) -> None:
    """600 is cudaErrorNotReady."""
    for wait in ("cudaDeviceSynchronize()", "cudaStreamSynchronize(stream)", "cudaEventSynchronize(event)"):
        assert on_device(EVENT.format(wait=wait), delayed=True) == [600, 0]
    assert on_device(EVENT.format(wait="cudaStreamSynchronize(None)"), delayed=True) == [600, 600]


def test_gpus_that_are_hidden_are_not_there(on_device: Any) -> None:
    code = "n = c_int(); rt.cudaGetDeviceCount(byref(n)); m = c_int(); nvml.nvmlDeviceGetCount_v2(byref(m)); result = [n.value, m.value]"

    assert on_device(code, gpus=8, CUDA_VISIBLE_DEVICES="0,1,2,3") == [4, 8]
    assert on_device(code, gpus=8, CUDA_VISIBLE_DEVICES="") == [0, 8]
    assert on_device(code, gpus=8, CUDA_VISIBLE_DEVICES="1,-1,2") == [1, 8]


def test_nvidia_smi_knows_the_gpus(device: Path) -> None:
    """748 MiB of an A100 are a context's; what is not known is said not to be."""

    def asked(*words: str) -> tuple[int, str]:
        variables = {"MEMCALC_NULL_PROPERTIES": properties(find_null_gpu("a100-40gb"), 2)}
        done = subprocess.run(
            [device / "bin" / "nvidia-smi", *words], env=variables, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    total = find_gpu("a100-40gb").usable_bytes >> 20
    fields = "--query-gpu=index,name,memory.total,memory.used,compute_cap,fan.speed"
    code, table = asked(fields, "--format=csv")
    assert code == 0
    assert table.splitlines() == [
        "index, name, memory.total [MiB], memory.used [MiB], compute_cap, fan.speed",
        f"0, NVIDIA A100-SXM4-40GB, {total} MiB, 748 MiB, 8.0, [N/A]",
        f"1, NVIDIA A100-SXM4-40GB, {total} MiB, 748 MiB, 8.0, [N/A]",
    ]
    assert asked("--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", "1") == (0, f"{total}\n")
    assert asked("-L")[1].startswith("GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-01000000-")
    assert asked() == (0, "".join(f"GPU {n}: NVIDIA A100-SXM4-40GB, a null device, {total} MiB\n" for n in range(2)))
    assert asked("--id=2") == (6, "")
    assert asked("dmon") == (2, "")


def test_properties_lie_where_programs_look(on_device: Any) -> None:
    """Offsets of CUDA 12's cudaDeviceProp: memory 288, major 360, multiprocessors 388, threads 624."""
    code = """
text = create_string_buffer(1032)
rt.cudaGetDeviceProperties_v2(text, 0)
def at(offset, size=4):
    return int.from_bytes(text.raw[offset : offset + size], "little")
result = [text.value.decode(), at(288, 8), at(360), at(364), at(388), at(624), at(696, 8)]"""

    name, memory, *figures = on_device(code, "a100-80gb")

    assert name == "NVIDIA A100-SXM4-80GB"
    assert memory == find_gpu("a100-80gb").usable_bytes
    assert figures == [8, 0, 108, 2048, 163 * 1024]


def test_communicators_take_memory_outside_the_allocator(on_device: Any) -> None:
    """One rank talks to nobody and takes none."""
    code = """
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
def communicate(ranks):
    out = c_void_p()
    nccl.ncclCommInitRank(byref(out), ranks, Id(), 0)
    return out
free, total = c_size_t(), c_size_t()
for ranks in (1, 8, 8):
    communicate(ranks)
rt.cudaMemGetInfo(byref(free), byref(total))
result = [total.value - free.value, counts()[4]]"""

    used, communicators = on_device(code)

    assert used == H100.context_bytes + NCCL_FIRST_BYTES + NCCL_FURTHER_BYTES
    assert communicators == 2


def test_address_ranges_and_memory_are_counted_apart(on_device: Any) -> None:
    """As expandable segments use the driver: 60 GiB of addresses are free of charge, 60 GiB of memory are not."""
    code = """
class Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", c_int), ("device", c_int), ("rest", c_int * 8)]
there = Properties(device=1)
address, handle = c_void_p(), c_void_p()
reserved = [cu.cuMemAddressReserve(byref(address), c_size_t(60 << 30), c_size_t(0), None, c_size_t(0)) for _ in range(2)]
made = [cu.cuMemCreate(byref(handle), c_size_t(60 << 30), byref(there), c_size_t(0)) for _ in range(2)]
released = cu.cuMemRelease(handle)
made.append(cu.cuMemCreate(byref(handle), c_size_t(60 << 30), byref(there), c_size_t(0)))
before = core.null_device_of(address)
cu.cuMemMap(address, c_size_t(60 << 30), c_size_t(0), handle, c_size_t(0))
result = [reserved, made, before, core.null_device_of(address)]"""

    assert on_device(code, gpus=2) == [[0, 0], [0, 2, 0], -1, 1]


def test_captured_streams_know_it(on_device: Any) -> None:
    code = """
a, b, event, graph = c_void_p(), c_void_p(), c_void_p(), c_void_p()
rt.cudaStreamCreate(byref(a)); rt.cudaStreamCreate(byref(b)); rt.cudaEventCreate(byref(event))
def capturing():
    states = []
    for stream in (a, b):
        status = c_int()
        rt.cudaStreamIsCapturing(stream, byref(status))
        states.append(status.value)
    return states
result = [capturing()]
rt.cudaStreamBeginCapture(a, 0); result.append(capturing())
rt.cudaEventRecord(event, a); rt.cudaStreamWaitEvent(b, event, 0); result.append(capturing())
rt.cudaStreamEndCapture(a, byref(graph)); result.append(capturing())"""

    assert on_device(code) == [[0, 0], [1, 0], [1, 1], [0, 0]]
