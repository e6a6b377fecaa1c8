"""Figures that others have printed on a real A100, to the byte.

Those with a workspace of 8,519,680 bytes are by torch before 2.12's rule for capability 8.0, which is today's too
(memcalc/workspaces/linear_algebra.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

MIB = 2**20
A100 = "a100-80gb"
WORKSPACE = (2 * 4096 + 8 * 16) * 2**10


def block(*shape: int, item: int = 4) -> int:
    """The bytes of a tensor, rounded up to blocks of 512."""
    size = item
    for extent in shape:
        size *= extent
    return -(-size // 512) * 512


def test_linear_forward_and_backward(notebook_on: Any) -> None:
    """fp32 Linear(256, 250), one row: weight and bias 256,000 + 1,024; then a workspace for each thread."""
    with notebook_on(A100) as notebook:
        model = nn.Linear(256, 250, device="cuda")
        assert notebook.allocated == block(250, 256) + block(250) == 257_024
        x = torch.randn(1, 256, device="cuda")
        assert notebook.allocated == 257_024 + block(1, 256) == 258_048
        y = model(x)
        assert notebook.allocated == 258_048 + block(1, 250) + WORKSPACE == 8_778_752
        y.sum().backward()
        # The gradients of weight and bias, and autograd's workspace; the sum and its gradient are gone.
        assert notebook.allocated == 8_778_752 + 257_024 + WORKSPACE == 17_555_456


def test_small_tensors_and_the_cache(notebook_on: Any) -> None:
    """(1024,) fp32: 4,096 in a segment of 2 MiB, which empty_cache frees; (800,): 3,200 bytes in seven blocks."""
    with notebook_on(A100) as notebook:
        x = torch.zeros(1024, device="cuda")
        assert (notebook.allocated, notebook.reserved) == (4096, 2 * MIB)
        del x
        assert (notebook.allocated, notebook.reserved) == (0, 2 * MIB)
        torch.cuda.empty_cache()
        assert notebook.reserved == 0
        y = torch.zeros(800, device="cuda")
        assert notebook.allocated == 3584
        del y


def test_two_layers_with_relu_and_sigmoid(notebook_on: Any) -> None:
    """ReLU keeps its output, Sigmoid too; without gradients only what has a name stays."""
    b, d, h, o = 100, 256, 128, 10
    with notebook_on(A100) as notebook:
        model = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, o), nn.Sigmoid()).to("cuda")
        weights = block(h, d) + block(h) + block(o, h) + block(o)
        x = torch.randn(b, d, device="cuda")
        held = weights + block(b, d)
        assert notebook.allocated == held
        with torch.no_grad():
            y = model(x)
        assert notebook.allocated == held + block(b, o) + WORKSPACE
        del y
        y = model(x)
        # The first Linear's output is freed once ReLU has made its own: it is in no formula of a derivative.
        assert notebook.allocated == held + WORKSPACE + block(b, h) + block(b, o)
        y.sum().backward()
        assert notebook.allocated == held + 2 * WORKSPACE + block(b, o) + weights


def test_layer_norm_written_by_hand(notebook_on: Any) -> None:
    """(x - mean) / sqrt(var + eps), operator by operator: autograd keeps x, the difference, the root, and the quotient."""
    rows, width = 64, 1024
    with notebook_on(A100) as notebook:
        weight = torch.ones(width, device="cuda", requires_grad=True)
        x = torch.randn(rows, width, device="cuda", requires_grad=True)
        before = notebook.allocated
        assert before == block(width) + block(rows, width)
        difference = x - x.mean(-1, keepdim=True)
        deviation = (difference.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        normed = difference / deviation
        y = normed * weight
        assert notebook.allocated == before + 3 * block(rows, width) + block(rows)
        del difference, deviation, normed
        assert notebook.allocated == before + 3 * block(rows, width) + block(rows)
        y.sum().backward()
        del y
        assert notebook.allocated == before + block(rows, width) + block(width)


@pytest.mark.parametrize(("optimizer", "states"), [(torch.optim.SGD, 0), (torch.optim.Adam, 2)])
def test_four_steps(notebook_on: Any, monkeypatch: pytest.MonkeyPatch, optimizer: Any, states: int) -> None:
    """Linear(256, 250), batch 100, no workspaces: Adam holds twice the model from the first step on."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with notebook_on(A100) as notebook:
        model = nn.Linear(256, 250, device="cuda")
        size = block(250, 256) + block(250)
        update = optimizer(model.parameters(), lr=1e-3)
        x = torch.randn(100, 256, device="cuda")
        held = size + block(100, 256)
        for step in range(4):
            moments = states * size if step else 0
            update.zero_grad()
            assert notebook.allocated == held + moments
            y = model(x)
            assert notebook.allocated == held + moments + block(100, 250)
            y.sum().backward()
            del y
            assert notebook.allocated == held + moments + size
            update.step()
            assert notebook.allocated == held + states * size + size
