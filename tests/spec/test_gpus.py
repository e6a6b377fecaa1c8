"""The table of GPUs: complete rows, sane numbers, names that are found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

import memcalc
from memcalc.errors import InputError, Unavailable
from memcalc.spec.hardware import local_gpu
from memcalc.spec.hardware.gpus import GpuSpec, all_gpus, find_gpu
from memcalc.spec.hardware.kernels import gpu_omissions

PROMISED = """a100-40gb a100-80gb h100-80gb h100-pcie h100-nvl h200 b200 l4 a10g t4 p40 v100-16gb v100-32gb
    rtx-3090 rtx-4090 rtx-a6000""".split()


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_stay(name: str) -> None:
    assert find_gpu(name).name == name


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.name)
def test_a_gpu_never_offers_more_than_it_has(card: GpuSpec) -> None:
    """Usable <= what the tool shows <= what the label says (in GiB), and not absurdly less."""
    assert card.usable_bytes < card.advertised_bytes
    assert card.usable_bytes > 0.9 * card.advertised_bytes
    if card.smi_bytes is not None:
        assert card.usable_bytes < card.smi_bytes <= card.advertised_bytes
    assert 0 < card.context_bytes < 2**30
    assert card.source


@pytest.mark.parametrize("card", [card for card in all_gpus() if card.vendor == "nvidia"], ids=lambda card: card.name)
def test_cuda_gpus_know_their_capability(card: GpuSpec) -> None:
    """Threads of one multiprocessor: 1024 on Turing (7.5), 1536 on 8.6, 8.9 and 12.0, 2048 elsewhere."""
    assert card.compute_capability is not None
    threads = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}

    assert threads.get(card.compute_capability, 2048) == card.max_threads_per_multiprocessor
    assert (card.bf16_tflops is not None) == (card.compute_capability >= (8, 0))


def test_usable_bytes_are_the_lowest_total_that_frameworks_state() -> None:
    """A100 80 GB: 79.14 GiB of 80, 79.14 * 2^30 = 84,975,927,951; MI300X: 191.69 GiB of 192."""
    a100 = find_gpu("a100-80gb")

    assert a100.usable_bytes == int(79.14 * 2**30) == 84_975_927_951
    assert a100.smi_bytes == 81_920 * 2**20
    assert a100.advertised_bytes == 80 * 2**30
    assert a100.context_bytes == 748 * 2**20
    assert (a100.compute_capability, a100.multiprocessors) == ((8, 0), 108)
    assert find_gpu("mi300x").usable_bytes == int(191.69 * 2**30)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("h100", "h100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("RTX_A6000", "rtx-a6000"),
        ("4090", "rtx-4090"),
        ("4090 24GB", "rtx-4090"),
        ("rtx4070 ti super", "rtx-4070-ti-super"),
        ("H100 80GB", "h100-80gb"),
        ("a100-80", "a100-80gb"),
        ("A100 40g", "a100-40gb"),
        ("NVIDIA GeForce RTX 4060 Ti, 16380MiB", "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti, 8188 MiB", "rtx-4060-ti-8gb"),
        ("NVIDIA H200, 143771 MiB", "h200"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "rtx-4060"),
        ("TPU v5e", "tpu-v5e"),
    ],
)
def test_device_names_find_their_gpu(spelling: str, name: str) -> None:
    assert find_gpu(spelling).name == name


def test_no_name_stands_for_two_gpus() -> None:
    names = [name for card in all_gpus() for name in (card.name, *card.aliases)]

    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("a100-sxm", "a100-40gb, a100-80gb"), ("h1000", "h100-80gb"), ("rtx3091", "rtx-3090")],
)
def test_an_unknown_gpu_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(InputError) as caught:
        find_gpu(name)

    assert f"{name!r} is not a known GPU" in str(caught.value)
    assert f"Nearest: {nearest}" in str(caught.value)
    assert "memcalc gpus" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100", "'a100' is sold with 40 or 80 GB of memory. Write a100-40gb or a100-80gb."),
        ("v100", "'v100' is sold with 16 or 32 GB of memory. Write v100-16gb or v100-32gb."),
        ("4060 Ti", "'4060 Ti' is sold with 8 or 16 GB of memory. Write rtx-4060-ti-8gb or rtx-4060-ti-16gb."),
        ("8xH100", "'8xH100' names 8 GPUs. Write --gpu H100 --gpus 8."),
        ("4090 48GB", "'4090 48GB' is not a known GPU. Nearest: "),
    ],
)
def test_a_name_of_several_gpus_asks_which(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_gpu(name)

    assert message in str(caught.value)


def test_the_gpu_of_this_machine_is_found_by_its_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDeviceTotalMem of an RTX 4090: 23.52 GiB = 24,084 MiB; a GPU that the table lacks is known by its memory."""
    for name, mebibytes, found, usable in [
        ("NVIDIA GeForce RTX 4090", 24_084, "rtx-4090:24084MiB", 24_084),
        ("NVIDIA GeForce RTX 4060 Ti", 15_900, "rtx-4060-ti-16gb:15900MiB", 15_900),
        ("NVIDIA Quadro GV100", 32_490, "32490MiB", 32_490),
    ]:
        monkeypatch.setattr(
            local_gpu, "local_gpu", lambda name=name, size=mebibytes: local_gpu.LocalGpu(name, size << 20)
        )
        card = find_gpu("auto")
        find_gpu.cache_clear()
        assert (card.name, card.usable_bytes) == (found, usable << 20)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_auto_without_a_gpu_says_so() -> None:
    with pytest.raises(Unavailable, match="--gpu auto reads this machine's GPU, and "):
        find_gpu("auto")


@pytest.mark.parametrize("name", ["", "---", "x" * 10_000, "\x00"])
def test_nonsense_is_refused_in_a_short_message(name: str) -> None:
    with pytest.raises(InputError) as caught:
        find_gpu(name)

    assert len(str(caught.value)) < 300


def test_the_table_loads_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from memcalc.spec.hardware.gpus import find_gpu\n"
        "find_gpu('h200')\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_not_known_of_other_makers_kernels_is_said() -> None:
    assert gpu_omissions(None) == gpu_omissions(find_gpu("h100-80gb")) == ()
    assert gpu_omissions(find_gpu("mi300x")) == (
        "kernels of the AMD Instinct MI300X and their workspaces: assumed to be those of CUDA on an A100",
    )
    assert memcalc.estimate("gpt2", gpu="mi300x").not_modelled[0].startswith("kernels of the AMD Instinct MI300X")
