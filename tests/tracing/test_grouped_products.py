"""Experts as one product a group, by transformers' modules; expected are readings of the null CUDA device."""

from __future__ import annotations

import memcalc


def test_products_of_groups_in_fp32() -> None:
    """Autocast has no rule for them, so they run in fp32 under it: for which PyTorch's own fake kernel refuses."""
    sizes = ("num_layers=1", "V=1024", "s=64", "recipe=amp", "implementation=huggingface")

    trace = memcalc.trace("mixtral-8x7b", *sizes, gpu="h100-80gb", steps=2)

    assert trace.result.ledger.totals == {
        "model": 5_838_652_416,
        "optimizer": 5_838_652_416,
        "input": 5_838_653_440,
        "zero_grad_1": 5_838_653_440,
        "forward_1": 6_009_590_272,
        "loss_1": 6_009_068_032,
        "backward_1": 11_765_501_440,
        "optimizer_step_1": 29_260_367_872,
        "zero_grad_2": 23_421_716_480,
        "forward_2": 17_722_544_640,
        "loss_2": 17_722_022_400,
        "backward_2": 23_442_804_224,
        "optimizer_step_2": 29_260_367_872,
    }
