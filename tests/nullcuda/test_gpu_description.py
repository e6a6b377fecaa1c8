"""Descriptions of GPUs for the device library."""

from __future__ import annotations

import pytest

from memcalc.errors import InputError
from memcalc.estimation import outside_allocator
from memcalc.nullcuda import gpu_description
from memcalc.nullcuda.gpu_description import find_null_gpu, properties
from memcalc.spec.hardware.gpus import GpuSpec, all_gpus

PROMISED = """a100-40gb a100-80gb h100-pcie h100-80gb h100-nvl h200 b200 l4 a10g l40s t4 v100-16gb v100-32gb rtx-3090
    rtx-4090 rtx-5090 rtx-pro-6000""".split()


@pytest.mark.parametrize("name", PROMISED)
def test_promised_gpus_have_a_null_device(name: str) -> None:
    figures = properties(find_null_gpu(name), 2)

    assert "=None" not in figures
    assert " gpus=2 name=" in figures


def test_figures_are_bytes() -> None:
    """A100: 163 KiB of shared memory a block, 40 MiB of L2, 79.14 GiB usable."""
    figures = properties(find_null_gpu("a100-80gb"), 1)

    assert "major=8 minor=0 multiprocessors=108 threads=2048 blocks=32 shared_block=166912" in figures
    assert f" l2={40 * 2**20} memory={int(79.14 * 2**30)} reserve={748 * 2**20} " in figures
    assert figures.endswith(" name=NVIDIA A100-SXM4-80GB")


def test_another_makers_gpu_has_none() -> None:
    with pytest.raises(InputError, match="AMD Instinct MI300X is not an NVIDIA GPU"):
        find_null_gpu("mi300x")


def test_a_gpu_that_is_not_known_for_certain_has_none() -> None:
    with pytest.raises(InputError, match="the number of multiprocessors of"):
        find_null_gpu("gb200")


@pytest.mark.parametrize("card", [card for card in all_gpus() if card.vendor == "nvidia"], ids=lambda card: card.name)
def test_every_capability_of_the_table_is_known(card: GpuSpec) -> None:
    assert card.compute_capability in gpu_description.CAPABILITIES


def test_nccl_takes_what_an_estimate_says() -> None:
    assert gpu_description.NCCL_FIRST_BYTES == outside_allocator.FIRST_GROUP_BYTES
    assert gpu_description.NCCL_FURTHER_BYTES == outside_allocator.FURTHER_GROUP_BYTES
