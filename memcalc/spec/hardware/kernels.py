"""GPU properties that kernels depend on, with defaults if no GPU is given."""

from __future__ import annotations

from memcalc.spec.hardware.gpus import GpuSpec
from memcalc.workspaces.multiprocessors import Multiprocessors

# NVIDIA's A100, if no GPU is given, or one without CUDA.
DEFAULT_CAPABILITY = (8, 0)
DEFAULT_MULTIPROCESSORS = 108
DEFAULT_THREADS = 2048


def capability(gpu: GpuSpec | None) -> tuple[int, int]:
    """Return (major, minor) of the GPU's compute capability."""
    return (gpu and gpu.compute_capability) or DEFAULT_CAPABILITY


def multiprocessors(gpu: GpuSpec | None) -> Multiprocessors:
    """Return the properties that decide the launch geometry of kernels."""
    return Multiprocessors(
        (gpu and gpu.multiprocessors) or DEFAULT_MULTIPROCESSORS,
        (gpu and gpu.max_threads_per_multiprocessor) or DEFAULT_THREADS,
        capability(gpu)[0],
    )


def gpu_omissions(gpu: GpuSpec | None) -> tuple[str, ...]:
    """Return what memcalc does not know about a GPU's kernels."""
    if gpu is None or gpu.compute_capability is not None:
        return ()
    return (f"kernels of the {gpu.label} and their workspaces: assumed to be those of CUDA on an A100",)


# FlashAttention-2, and PyTorch's copies of its kernels, need Ampere or later; the memory-efficient kernel in bf16, too:
# torch 2.13 aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, less_than_sm80_mem_efficient_dtypes.
FLASH = (8, 0)
FLASH_LARGEST_HEAD = 256  # torch 2.13 aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash


def kernel_for_heads(attention: str, head_dim: int) -> str:
    """Return the kernel that scaled_dot_product_attention takes for heads of this dimension.

    Flash attention does not support large heads, and transformers repeats keys and values of large grouped heads, so
    that the math kernel is not needed (transformers 5.23 integrations/sdpa_attention.py, use_gqa_in_sdpa).

    Args:
        attention: `training.attention`.
        head_dim: dimension of the heads.
    """
    return "memory-efficient" if attention in ("flash", "math") and head_dim > FLASH_LARGEST_HEAD else attention


def missing_kernel(dtype: str, attention: str, gpu: GpuSpec | None) -> str:
    """Return the fused attention that a GPU lacks, so that PyTorch takes a kernel which saves more; "" if none.

    Args:
        dtype: `training.dtype`.
        attention: `training.attention`.
        gpu: the GPU.
    """
    if gpu is None or (gpu.compute_capability or FLASH) >= FLASH:
        return ""
    if attention == "flash":
        return "flash attention"
    return "memory-efficient attention in bf16" if (attention, dtype) == ("memory-efficient", "bf16") else ""


def missing_units(dtype: str, attention: str, gpu: GpuSpec) -> list[str]:
    """Return what a GPU lacks for a run: matrix units for its dtype, an attention kernel.

    Args:
        dtype: `training.dtype`.
        attention: `training.attention`.
        gpu: the GPU.
    """
    lacks = []
    if dtype == "bf16" and gpu.bf16_tflops is None:
        lacks.append("no bf16 matrix units")
    if kernel := missing_kernel(dtype, attention, gpu):
        lacks.append(f"no {kernel}")
    return lacks


def needs_columns(recipe: str, gpu: GpuSpec | None) -> bool:
    """Return whether a second copy is made for the matmuls of backward.

    Before Blackwell, and on consumer Blackwell GPUs, FP8 tensor cores support one layout only, so a transposed copy is
    made. MXFP8 and blocks of 128 need a copy with scales along the other axis. Without a GPU, Hopper is assumed.
    Transformer Engine 2.11 pytorch/utils.py: is_non_tn_fp8_gemm_supported.
    """
    capability = None if gpu is None else gpu.compute_capability
    in_any_layout = capability is not None and ((10, 0) <= capability < (12, 0) or capability >= (13, 0))
    return recipe in ("mxfp8", "blockwise") or not in_any_layout
