"""The border of a ladder: exact where the peak rises, and verified above where it does not."""

from hypothesis import given
from hypothesis import strategies as st

from memcalc.search.boundary_search import NEIGHBORS, fit_boundary
from tests.properties.specs import examples


@examples(100)
@given(st.lists(st.integers(1, 10_000), unique=True, max_size=60), st.integers(0, 10_001), st.integers(0, 80))
def test_a_rising_peak_has_one_border(values: list[int], most: int, start: int) -> None:
    ladder = sorted(values)
    found = fit_boundary(ladder, lambda value: value <= most, start)

    assert found.value == max((value for value in ladder if value <= most), default=0)
    assert found.next_value == min((value for value in ladder if value > most), default=None)
    assert found.gaps == ()


@examples(100)
@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(0, 80))
def test_whatever_the_peak_does_the_neighbors_were_tried(fits: list[bool], start: int) -> None:
    """`fits[i]` says whether i + 1 fits, in no order at all."""
    ladder = range(1, len(fits) + 1)
    asked: list[int] = []

    def ask(value: int) -> bool:
        asked.append(value)
        return fits[value - 1]

    found = fit_boundary(ladder, ask, start)

    assert len(asked) == len(set(asked))
    assert found.value == 0 or fits[found.value - 1]
    above = range(found.value + 1, min(found.value + NEIGHBORS, len(fits)) + 1)
    assert not any(fits[value - 1] for value in above)
    below = [value for value in sorted(asked) if value < found.value]
    assert found.gaps == tuple(value for value in below if not fits[value - 1])


def test_a_dip_beyond_the_border_is_climbed() -> None:
    """7 needs more than 8 and 9 do: the border is 9, with a gap below it if the search met it."""

    def fits(value: int) -> bool:
        return value <= 6 or value in (8, 9)

    for start in range(99):
        for step in (1, 2, 3, 50):
            found = fit_boundary(range(1, 100), fits, start, step)
            assert (found.value, found.next_value) == (9, 10)
            assert found.gaps == ((7,) if 7 in found.tried else ())


@examples(100)
@given(st.integers(0, 1_000), st.integers(0, 1_200), st.integers(1, 300))
def test_any_first_step_leads_to_the_border(most: int, start: int, step: int) -> None:
    assert fit_boundary(range(1, 1_101), lambda value: value <= most, start, step).value == most


def test_the_answer_is_not_below_a_value_that_fits() -> None:
    """60 to 70 fit, and so does all up to 20: from 100 on downwards the search would miss the island."""

    def fits(value: int) -> bool:
        return value <= 20 or 60 <= value <= 70

    assert fit_boundary(range(1, 101), fits, 98, 45).value == 20
    assert fit_boundary(range(1, 101), fits, 98, 45, least=61).value == 70


@examples(60)
@given(st.lists(st.integers(0, 3_000), min_size=NEIGHBORS, max_size=NEIGHBORS), st.integers(0, 4_000))
def test_a_peak_with_a_period_has_its_last_border(borders: list[int], start: int) -> None:
    """What is padded to multiples: each residue has a border of its own, however far apart they are."""

    def fits(value: int) -> bool:
        return value <= 500 + borders[value % NEIGHBORS]

    last = max(value for value in range(1, 4_000) if fits(value))
    assert fit_boundary(range(1, 10_000), fits, start).value == last


def test_round_values_beyond_the_border_are_tried() -> None:
    """All up to 1,000 fit, and multiples of 64 up to 1,200: 1,152 = 18 · 64 is the last."""

    def fits(value: int) -> bool:
        return value <= (1_200 if value % 64 == 0 else 1_000)

    assert fit_boundary(range(1, 5_000), fits, 989).value == 1_000
    found = fit_boundary(range(1, 5_000), fits, 989, round_places=64)
    assert (found.value, found.next_value) == (1_152, 1_153)
    assert set(found.gaps) >= set(range(1_001, 1_009))


def test_the_ladder_ends() -> None:
    assert fit_boundary(range(1, 7), lambda value: value <= 3).above == 3
    assert fit_boundary(range(1, 7), lambda _: True).above == 0


def test_few_are_asked() -> None:
    """Doubling to 2^20, halving back, eight neighbors above: 48 of a million; 24 from a bound that is near."""
    assert len(fit_boundary(range(1, 2**30), lambda value: value <= 1_000_000).tried) <= 48
    assert len(fit_boundary(range(1, 2**30), lambda value: value <= 1_000, 1_099, 34).tried) <= 24


def test_an_empty_ladder() -> None:
    assert fit_boundary([], lambda _: True).value == 0
