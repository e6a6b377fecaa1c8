"""The largest micro-batches that a real H100 and H200 ran, beside what `memcalc fit` answers whoever asks for them."""

import pytest

import memcalc
from memcalc.measuring.measurement import DONE
from memcalc.spec.hardware.gpus import find_gpu
from tests.thinning import quick_every
from tools.real_gpus import searches

SEARCHES = searches()
ALLOC_CONF = " --alloc-conf "
PYTORCH = "torch_version=v2.11"  # that of the records


@pytest.mark.parametrize("search", quick_every(2, SEARCHES), ids=" ".join)
def test_the_largest_micro_batch_ran_and_the_next_one_did_not(search: tuple[str, str]) -> None:
    """As a user types it: the run, the GPU by its name, and the version of PyTorch. Nothing is known of the device."""
    gpu, run = search
    tried = SEARCHES[search]
    ran = {batch for batch, record in tried.items() if record["outcome"] == DONE}
    died = tried.keys() - ran
    words, _, settings = run.partition(ALLOC_CONF)
    name, *overrides = words.split()
    if settings:
        overrides.append(f"alloc_conf={settings}")
    answer = memcalc.fit(name, *overrides, PYTORCH, gpu=gpu, maximize="micro_batch_size")
    found = answer.maxima["micro_batch_size"]

    assert answer.verdict == "fits"
    assert found.gaps == ()
    if died:
        assert found.value == max(ran) == min(died) - 1
        assert not found.is_close
    else:  # expandable segments: the search ended after 100 had run
        assert found.value >= max(ran)


def test_nine_of_them_came_to_their_end() -> None:
    ended = [tried for tried in SEARCHES.values() if any(record["outcome"] != DONE for record in tried.values())]

    assert (len(SEARCHES), len(ended)) == (10, 9)


def test_usable_memory_is_what_the_recorded_devices_had() -> None:
    """The table has the lowest total that is reported for a GPU: it is never more than a device has, and of these two
    it is less by an eighth of a percent at most. So a search needs no device's own total."""
    for (gpu, _), tried in SEARCHES.items():
        for record in tried.values():
            total, usable = record["device"]["total_bytes"], find_gpu(gpu).usable_bytes
            assert 0 <= total - usable <= total / 800
