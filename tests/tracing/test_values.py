"""Small tensors of integers and booleans have values on fake tensors, as far as the host wrote them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memcalc.spec.hardware.gpus import find_gpu
from memcalc.tracing.session import Session, fake_cpu, fake_cuda
from memcalc.tracing.values import LARGEST


@pytest.fixture(params=["cuda", "cpu"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    with fake_cuda(find_gpu("a100-80gb")) if request.param == "cuda" else fake_cpu() as session:
        yield session


def test_what_is_computed_from_known_integers_is_known(session: Session) -> None:
    x = torch.arange(12, device=session.device).view(3, 4)
    doubled = (x * 2 + 1)[1:]

    assert doubled.tolist() == [[9, 11, 13, 15], [17, 19, 21, 23]]
    assert x.sum().item() == 66
    assert bool((x == 3).any())
    assert x.split((x[0, 2] + 1).item(), dim=1)[0].shape == (3, 3)
    assert session.readbacks == 0


def test_writing_in_place_is_seen_through_every_view(session: Session) -> None:
    x = torch.zeros(2, 3, dtype=torch.long, device=session.device)
    row = x[1]
    row += 5
    x[0, 0] = 7

    assert x.tolist() == [[7, 0, 0], [5, 5, 5]]
    assert row.max().item() == 5


def test_a_mask_of_known_tokens_selects_as_many_as_it_has(session: Session) -> None:
    """Three of ten tokens stand for an image."""
    tokens = torch.arange(10, device=session.device)
    mask = (tokens > 2) & (tokens < 6)
    hidden = torch.rand(10, 4, device=session.device)

    assert hidden[mask].shape == (3, 4)
    assert mask.nonzero().flatten().tolist() == [3, 4, 5]
    assert hidden.masked_select(mask[:, None]).shape == (12,)
    assert bool(mask.sum() * 4 == hidden[mask].numel())


def test_what_depends_on_scores_is_unknown(session: Session) -> None:
    scores = torch.rand(8, device=session.device)
    known = torch.zeros(8, dtype=torch.long, device=session.device)
    known.copy_(scores)

    assert (scores.argsort() + 0).tolist() == [0] * 8
    assert known.tolist() == [0] * 8
    assert torch.randint(5, 9, (3,), device=session.device).tolist() == [0] * 3
    assert session.readbacks > 0


def test_large_tensors_have_no_values(session: Session) -> None:
    assert torch.ones(LARGEST, dtype=torch.long, device=session.device).sum().item() == LARGEST
    assert session.readbacks == 0
    assert torch.ones(LARGEST + 1, dtype=torch.long, device=session.device).sum().item() == 0
    assert session.readbacks == 1


def test_what_the_host_sends_keeps_its_values() -> None:
    with fake_cuda(find_gpu("a100-80gb")) as session:
        sizes = torch.tensor([[1, 14, 14], [1, 8, 6]]).to("cuda")
        there = torch.tensor([3, 4], device="cuda")

        assert (sizes.prod(-1) // 4).tolist() == [49, 12]
        assert sizes.cpu().tolist() == sizes.to("cpu").tolist() == [[1, 14, 14], [1, 8, 6]]
        assert (there * there).tolist() == [9, 16]
        assert session.readbacks == 0


def test_what_was_not_written_is_unknown() -> None:
    """Memory of the shape of a known tensor, and shapes on the meta device, have no values."""
    with fake_cuda(find_gpu("a100-80gb")) as session:
        known = torch.arange(4, device="cuda")
        there = torch.empty_like(torch.empty(4, dtype=torch.long, device="meta"), device="cuda")

        assert torch.empty_like(known).sum().item() == 0
        assert session.readbacks == 1
        assert there.sum().item() == 0
        assert session.readbacks == 2
