"""The cache of results that depend only on a spec."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from memcalc.layout.spec_cache import cached_by_spec
from memcalc.spec.loading import load


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_share_it() -> None:
    """Without a copy, three of four runs of this test ended with "deque mutated during iteration"."""
    specs = [load("gpt2", (f"b={batch}",)) for batch in range(1, 9)]
    batch_of = cached_by_spec(lambda spec: spec.training.micro_batch_size)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(batch_of, specs * 2000))

    assert found == [*range(1, 9)] * 2000
