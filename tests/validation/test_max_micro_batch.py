"""The largest micro-batches that a real H100 and H200 ran, as the simulated allocator predicts them today."""

from __future__ import annotations

import pytest

from memcalc.measuring.measurement import DONE
from memcalc.measuring.result import allocator_conf
from memcalc.spec.loading import load
from memcalc.validation.max_micro_batch import predicted
from memcalc.validation.summary import device_of
from tools.real_gpus import searches

SEARCHES = searches()


@pytest.mark.long
@pytest.mark.parametrize("search", SEARCHES, ids=" ".join)
def test_the_prediction_is_what_ran_and_no_more(search: tuple[str, str]) -> None:
    """Never one too many: what is predicted ran, and of the searches that came to their end one more did not."""
    tried = SEARCHES[search]
    ran = {batch for batch, record in tried.items() if record["outcome"] == DONE}
    died = tried.keys() - ran
    record = next(iter(tried.values()))
    found = predicted(load(record["spec"]), device_of(record), allocator_conf(record["allocator"]))

    assert found is not None
    if died:
        assert found == max(ran) == min(died) - 1
    else:  # expandable segments: cut off after 100 had run
        assert found >= max(ran)


def test_there_are_ten_of_them() -> None:
    assert len(SEARCHES) == 10
