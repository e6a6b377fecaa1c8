"""Peaks of requests in closed form: loops by hand, and beside the same requests round by round."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memcalc.ledger.component import Component
from memcalc.stream.peaks import IntervalPeak, SizelessStream, live_at, peaks
from memcalc.stream.requests import EngineTensor, Requests

BLOCK = 512
SAVED, SCRATCH, GRADIENT = (
    EngineTensor(Component.ACTIVATIONS, name, "uint8", "n", "a test") for name in ("saved", "scratch", "gradient")
)


def peaks_of(requests: Requests) -> list[IntervalPeak]:
    stream = SizelessStream(requests)
    return peaks(stream, [-(-kind.requested // BLOCK) * BLOCK for kind in stream.kinds])


def alive(requests: Requests, peak: IntervalPeak) -> dict[tuple[str, int], int]:
    """How many storages are live, by name and blocks."""
    stream = SizelessStream(requests)
    kinds = ((stream.kinds[number], count) for number, count in live_at(stream, peak).items())
    return {(getattr(kind.label, "tensor", ""), kind.requested // BLOCK): count for kind, count in kinds}


def test_a_loop_saves_in_each_round_and_peaks_in_the_last() -> None:
    """Four rounds save 2 blocks each, with 3 blocks of scratch: at the end 8, at the peak 6 + 2 + 3."""
    requests = Requests()
    requests.begin("forward")
    with requests.repeat(4):
        saved = requests.take(2 * BLOCK, 0, SAVED)
        requests.drop([requests.take(3 * BLOCK, 0, SCRATCH)])
    requests.begin("backward")
    with requests.repeat(4):
        requests.take(BLOCK, 0, GRADIENT)
        requests.drop([saved])

    _, forward, backward = peaks_of(requests)

    assert (forward.bytes, forward.last) == (11 * BLOCK, True)
    assert alive(requests, forward) == {("saved", 2): 4, ("scratch", 3): 1}
    # Backward frees more than it allocates: its first round is the highest, 8 + 1 blocks.
    assert (backward.bytes, backward.last) == (9 * BLOCK, False)
    assert alive(requests, backward) == {("saved", 2): 4, ("gradient", 1): 1}


def test_what_a_round_hands_to_the_next_exists_once() -> None:
    """Each round frees what the round before has handed on: a prefetch does not add up."""
    requests = Requests()
    requests.begin("forward")
    handed = requests.take(BLOCK, 0, SCRATCH)
    with requests.repeat(9):
        following = requests.take(BLOCK, 0, SCRATCH)
        requests.drop([handed])

    (_, forward) = peaks_of(requests)

    assert forward.bytes == 2 * BLOCK
    requests.drop([following])
    requests.begin("end")
    assert peaks_of(requests)[-1].bytes == 0


def test_requests_of_other_streams_count_without_their_stream() -> None:
    requests = Requests()
    requests.take(BLOCK + 1, 2)

    assert peaks_of(requests)[0].bytes == 2 * BLOCK


@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), max_size=4),
)
def test_a_loop_is_its_rounds(rounds: int, forward: list[tuple[int, bool]], gradients: list[int]) -> None:
    """Storages of some blocks that stay or go at once; backward frees what stays in reverse, and leaves gradients."""
    looped, unrolled = Requests(), Requests()
    looped.begin("forward")
    with looped.repeat(rounds):
        saved = _forward(looped, forward)
    looped.begin("backward")
    with looped.repeat(rounds):
        _backward(looped, saved, gradients)
    unrolled.begin("forward")
    of_rounds = [_forward(unrolled, forward) for _ in range(rounds)]
    unrolled.begin("backward")
    for each in reversed(of_rounds):
        _backward(unrolled, each, gradients)

    found, expected = peaks_of(looped), peaks_of(unrolled)

    assert [peak.bytes for peak in found] == [peak.bytes for peak in expected]
    for peak in found:
        assert sum(blocks * count for (_, blocks), count in alive(looped, peak).items()) * BLOCK == peak.bytes


def _forward(requests: Requests, sizes: list[tuple[int, bool]]) -> list[int]:
    saved = []
    for blocks, stays in sizes:
        storage = requests.take(blocks * BLOCK, 0, SAVED if stays else SCRATCH)
        if stays:
            saved.append(storage)
        else:
            requests.drop([storage])
    return saved


def _backward(requests: Requests, saved: list[int], gradients: list[int]) -> None:
    for blocks in gradients:
        requests.take(blocks * BLOCK, 0, GRADIENT)
    requests.drop(reversed(saved))
