"""What a layer of routed experts keeps beyond its matrices, as torch's autograd does."""

import pytest

import memcalc
from memcalc.ledger.component import Component

# 4 experts, 2 a token, 2·32 tokens: each expert gets R = 2·32·2/4 = 32 rows, together 128.
EXPERTS = {
    "architecture": "mixtral",
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 96,
    "moe": {"num_experts": 4, "num_experts_per_token": 2, "expert_intermediate_size": 96},
}
RUN = {"model": EXPERTS, "training": {"b": 2, "s": 32, "attention": "flash", "recipe": "pure"}}


@pytest.mark.parametrize(
    ("tensor", "each"),
    [
        ("weighted expert outputs", 2 * 2 * 32 * 2 * 64),  # the source of index_add: bf16 rows of every token copy
        ("sum of router weights", 4 * 2 * 32),  # the divisor: one fp32 number for each token
    ],
)
def test_the_combination_of_experts_keeps_what_its_gradient_formulas_name(tensor: str, each: int) -> None:
    rows = memcalc.estimate(RUN).ledger.live_rows("loss_1", Component.ACTIVATIONS)

    assert [(row.count, row.bytes) for row in rows if row.tensor == tensor] == [(3, 3 * each)]


def test_torch_keeps_the_same() -> None:
    import torch

    source = torch.rand(4, 3, requires_grad=True)
    summed = torch.zeros(2, 3).index_add(0, torch.tensor([0, 1, 0, 1]), source)
    divided = source / source.sum(-1, keepdim=True)

    assert summed.grad_fn._saved_source is source  # type: ignore[union-attr]
    assert divided.grad_fn._saved_other.shape == (4, 1)  # type: ignore[union-attr]
