"""torch.autocast for CUDA on fake tensors: which functions cast, to which dtype, and the cache of cast weights.

PyTorch casts by a dispatch key that only CUDA tensors have. The lists are those of torch 2.13,
aten/src/ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, _FP32, _FP32_SET_OPT_DTYPE, _PROMOTE), by the names under
which Python calls these operators; the cache is that of autocast_mode.cpp, `cached_cast`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

LOWER_PRECISION = frozenset(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm addmv addr matmul "
    "__matmul__ __rmatmul__ einsum mm mv linalg_vecdot vecdot linear addbmm baddbmm bmm chain_matmul multi_dot "
    "scaled_dot_product_attention multi_head_attention_forward".split()
)
FP32 = frozenset(  # square is implemented by pow
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ square "
    "softplus layer_norm native_layer_norm rms_norm group_norm norm frobenius_norm nuclear_norm cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp".split()
)
FP32_DTYPE = frozenset("prod softmax log_softmax cumprod cumsum vector_norm matrix_norm sum".split())
PROMOTE = frozenset("addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add".split())

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Autocast:
    """The effect of an enabled `torch.autocast("cuda")` on a call's arguments.

    Args:
        on_device: returns whether a tensor is on the device.
    """

    def __init__(self, on_device: Callable[[Any], bool]) -> None:
        self._on_device = on_device
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # by the leaf's id: the leaf, kept alive, and its cast

    def arguments(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the arguments of the function of this name, cast as its list requires."""
        if name in LOWER_PRECISION:
            return self._all_cast(args, kwargs, torch.get_autocast_dtype("cuda"))
        if name in FP32:
            return self._all_cast(args, kwargs, torch.float32)
        if name in FP32_DTYPE:
            if kwargs.get("dtype") is None and args and self._eligible(args[0]) and not _dtypes(args):
                return args, {**kwargs, "dtype": torch.float32}
        elif name in PROMOTE:
            return self._all_cast(args, kwargs, _widest([*_flat(args), *_flat(tuple(kwargs.values()))]))
        return args, kwargs

    def clear(self) -> None:
        """Free the casts that backward does not need, when the outermost autocast region ends."""
        self._casts.clear()

    def _all_cast(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Arguments:
        # The C++ wrapper casts its last argument first.
        later = {name: self._cast(value, dtype) for name, value in reversed(kwargs.items())}
        return tuple(reversed([self._cast(value, dtype) for value in reversed(args)])), later

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._cast(item, dtype) for item in value)
        if not self._eligible(value) or value.dtype == dtype:
            return value
        if not self._cached(value, dtype):
            return value.to(dtype)
        known = self._casts.get(id(value))
        if known is None:
            known = self._casts[id(value)] = (value, value.to(dtype))
        return known[1]

    def _eligible(self, value: Any) -> bool:
        """Return whether a value is a floating-point tensor on the device, other than fp64."""
        return self._on_device(value) and value.is_floating_point() and value.dtype != torch.float64

    @staticmethod
    def _cached(value: Tensor, dtype: torch.dtype) -> bool:
        return (
            torch.is_autocast_cache_enabled()
            and dtype != torch.float32
            and value.requires_grad
            and value.is_leaf
            and value.dtype == torch.float32
            and not value._is_view()  # noqa: SLF001 -- no public name
        )

    @contextmanager
    def available(self) -> Iterator[None]:
        """Keep `torch.autocast("cuda")` from disabling itself because there is no GPU."""
        original = torch.clear_autocast_cache

        def clear_both() -> None:
            original()
            self.clear()

        with ExitStack() as patches:
            patches.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
            patches.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
            patches.enter_context(mock.patch("torch.clear_autocast_cache", clear_both))
            yield


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(tuple(value))
        else:
            yield value


def _dtypes(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.dtype) for value in values)


def _widest(values: list[Any]) -> torch.dtype:
    wide = any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in values)
    return torch.float32 if wide else torch.get_autocast_dtype("cuda")
