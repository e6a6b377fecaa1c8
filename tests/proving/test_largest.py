"""The largest micro-batches that a real H100 and H200 ran, as the simulated allocator predicts them today."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.measuring.measurement import DONE
from memcalc.measuring.records import read
from memcalc.measuring.result import allocator_conf
from memcalc.proving.largest import predicted
from memcalc.proving.summary import device_of
from memcalc.spec.loading import load
from tools.measured import of_gpus

BATCH = " --set micro_batch_size="


def searches() -> dict[str, list[dict[str, Any]]]:
    """Records of each search, by run: every micro-batch that was tried."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in of_gpus("suite", "largest"):
        for record in read(path):
            run, batch, _ = record["command"].partition(BATCH)
            if batch:
                found.setdefault(f"{run} {allocator_conf(record['allocator'])}".strip(), []).append(record)
    return found


SEARCHES = searches()


def batch_of(record: dict[str, Any]) -> int:
    return int(record["spec"]["training"]["micro_batch_size"])


@pytest.mark.long
@pytest.mark.parametrize("run", SEARCHES)
def test_the_prediction_is_what_ran_and_no_more(run: str) -> None:
    """Never one too many: what is predicted ran, and of the searches that came to their end one more did not."""
    records = SEARCHES[run]
    ran = {batch_of(record) for record in records if record["outcome"] == DONE}
    died = {batch_of(record) for record in records if record["outcome"] != DONE}
    conf = allocator_conf(records[0]["allocator"])
    found = predicted(load(records[0]["spec"]), device_of(records[0]), conf)

    assert found is not None
    if died:
        assert found == max(ran) == min(died) - 1
    else:  # expandable segments: cut off after 100 had run
        assert found >= max(ran)


def test_there_are_ten_of_them() -> None:
    assert len(SEARCHES) == 10
