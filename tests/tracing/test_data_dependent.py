"""Sizes that depend on values: choices among E are spread evenly, and what is unknown is selected whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from memcalc.spec.hardware.gpus import find_gpu
from memcalc.tracing.session import fake_cpu, fake_cuda

TOKENS, EXPERTS, CHOSEN = 48, 8, 2


@pytest.fixture(params=["cuda", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A simulated device, with either semantics."""
    with fake_cuda(find_gpu("a100-80gb")) if request.param == "cuda" else fake_cpu() as session:
        yield session.device


@pytest.fixture
def chosen(device: torch.device) -> Tensor:
    """The experts of each token: (48, 2), of 8."""
    return torch.rand(TOKENS, EXPERTS, device=device).topk(CHOSEN, dim=-1).indices


def test_an_expert_takes_its_share_of_the_tokens(chosen: Tensor) -> None:
    """The loop of transformers' MoE blocks: 48 tokens x 2 choices / 8 experts = 12 for each of all 8."""
    mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    taken = [torch.where(mask[expert[0]]) for expert in hit]

    assert len(taken) == EXPERTS
    assert {(rank.shape, token.shape) for rank, token in taken} == {((12,), (12,))}


def test_choices_compared_with_one_expert(chosen: Tensor) -> None:
    """48 x 2 choices, one in 8 of which is this expert; the others are the rest."""
    this = chosen == 3

    assert this.nonzero().shape == (12, 2)
    assert (~this).nonzero().shape == (84, 2)
    assert chosen.flatten()[this.flatten()].shape == (12,)


def test_a_mask_of_the_chosen(chosen: Tensor, device: torch.device) -> None:
    """2 marks in each row of 8: 96 in all, and 12 in a column."""
    mask = torch.zeros(TOKENS, EXPERTS, device=device).scatter_(1, chosen, 1.0)

    assert mask.nonzero().shape == (96, 2)
    assert (mask[:, 5] > 0).nonzero().shape == (12, 1)
    assert mask.bool().clone().nonzero().shape == (96, 2)


def test_of_an_unknown_mask_every_element_is_selected(device: torch.device) -> None:
    x = torch.rand(6, 5, 4, device=device, requires_grad=True)
    mask = torch.rand(6, 5, device=device) > 0.5

    assert mask.nonzero().shape == (30, 2)
    assert x[mask].shape == (30, 4)
    assert x.masked_select(mask[..., None]).shape == (120,)
    x[mask].sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (6, 5, 4)


def test_counts_and_distinct_values(chosen: Tensor, device: torch.device) -> None:
    """Of values chosen among 8 at most 8 differ; of unknown ones all."""
    values, inverse, counts = chosen.unique(return_inverse=True, return_counts=True)

    assert (values.shape, inverse.shape, counts.shape) == ((8,), (48, 2), (8,))
    assert torch.rand(10, device=device).long().unique().shape == (10,)
    assert torch.bincount(chosen.flatten(), minlength=EXPERTS).shape == (8,)
    assert torch.histc(chosen.flatten().float(), bins=EXPERTS, min=0, max=EXPERTS - 1).shape == (8,)


def test_sorted_choices_are_choices(chosen: Tensor) -> None:
    """Sorting permutes: one in 8 of the sorted ones is still this expert."""
    assert (chosen.flatten().sort().values == 0).nonzero().shape == (12, 1)


def test_repeats_are_as_many_as_the_caller_says(device: torch.device) -> None:
    x, repeats = torch.rand(4, 3, device=device), torch.rand(4, device=device).long()

    assert x.repeat_interleave(repeats, dim=0, output_size=9).shape == (9, 3)
    assert x.repeat_interleave(repeats, dim=0).shape == (4, 3)
