"""What a program learns from the device where kernels compute nothing: masks are full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memcalc.nullcuda import run
from memcalc.nullcuda.result import DONE

MASKS = """
import json, torch
x = torch.randn(4, 8, device="cuda", requires_grad=True)
mask = torch.zeros(4, 8, dtype=torch.bool, device="cuda")
picked = x[mask]
picked.sum().backward()
filled = torch.zeros(4, 8, device="cuda")
filled[mask] = picked.detach()
print(json.dumps([list(picked.shape), list(mask.nonzero().shape), len(torch.where(mask)), list(x.masked_select(mask).shape),
                  bool(mask.all()), bool(mask.any()), bool(torch.isnan(x).any()), list(x.grad.shape), mask.nonzero().stride()]))
"""


@pytest.mark.long
def test_masks_are_full(dry_run_here: Path, null_python: str) -> None:
    """4 x 8 = 32 elements; an index has two numbers, which the kernel stores by dimension: stride 32 between them."""
    (dry_run_here / "script.py").write_text(MASKS)
    with (dry_run_here / "out").open("w") as out:
        result = run([null_python, "script.py"], "h100-80gb", stdout=out)

    assert result.outcome == DONE
    found = json.loads((dry_run_here / "out").read_text())
    assert found == [[32], [32, 2], 2, [32], True, False, False, [4, 8], [1, 32]]
    assert "elements were selected by a mask" in " ".join(result.warnings)


SORTS = """
import torch
for n in (100, 5000, 100_000):
    torch.sort(torch.zeros(n, device="cuda"), stable=True)
    torch.cumsum(torch.zeros(n, device="cuda"), 0)
    torch.topk(torch.zeros(n, device="cuda"), 5)
    torch.unique(torch.zeros(n, dtype=torch.long, device="cuda"))
    torch.nn.Embedding(100, 8, device="cuda")(torch.zeros(n, dtype=torch.long, device="cuda")).sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    "card", ["rtx-4090", *(pytest.param(card, marks=pytest.mark.long) for card in ("b200", "v100-16gb"))]
)
def test_sorts_run_on_cards_without_kernels_of_their_own(dry_run_here: Path, null_python: str, card: str) -> None:
    """CUB knows the architectures that PyTorch was compiled for: 8.9 takes the kernels of 8.6."""
    (dry_run_here / "script.py").write_text(SORTS)

    assert run([null_python, "script.py"], card).outcome == DONE
