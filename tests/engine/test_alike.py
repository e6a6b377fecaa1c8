"""Batches that are sized together: those that are one sequence come first, and halves are the whole."""

from hypothesis import given
from hypothesis import strategies as st

from memcalc.engine.alike import Alike


def test_one_sequence_and_several_are_columns_of_the_same_arrays():
    alike = Alike(micro=[2, 0, 1], lengths=[0, 1], steps=[0], single=1)
    assert alike.kinds == [0, 1]
    assert alike.lanes == (slice(0, 2), slice(2, 6))


def test_where_tapes_are_the_same_there_is_one_kind():
    assert Alike([0, 1], [0], [0], single=0).lanes == (slice(0, 2),)
    assert Alike([0], [0, 1], [0], single=1).lanes == (slice(0, 2),)


@given(micro=st.integers(1, 9), lengths=st.integers(1, 9), data=st.data())
def test_halves_are_the_whole(micro, lengths, data):
    single = data.draw(st.integers(0, micro))
    whole = Alike([*range(micro)], [*range(lengths)], [0], single)
    if micro * lengths == 1:
        return

    one, two = whole.halves

    several = {(b, s, b < single) for b in whole.micro for s in whole.lengths}
    parts = [{(b, s, n < half.single) for n, b in enumerate(half.micro) for s in half.lengths} for half in (one, two)]
    assert parts[0] | parts[1] == several
    assert not parts[0] & parts[1]
    assert all(parts)
