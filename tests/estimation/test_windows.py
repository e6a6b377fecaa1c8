"""A window that the sequence fills: what transformers' attention takes more is said, for it is not counted."""

from __future__ import annotations

import memcalc
from memcalc.estimation.windows import masked_bytes
from tools.trainer import compared

RUN = ("mistral-7b", "implementation=huggingface", "recipe=pure", "num_layers=4", "b=1")


def test_the_recorded_run_held_so_much_more() -> None:
    """4 layers, s 4096: a mask of 2·s² and 2·2·s·(32 - 8)·128 of repeated keys and values. 1 MiB are rests of blocks."""
    (run,) = [run for run in compared() if "adafactor" in run.case["case"]]
    more = masked_bytes(memcalc.load(*RUN, "s=4096"))

    assert more == 4 * (2 * 4096**2 + 2 * 2 * 4096 * (32 - 8) * 128)
    assert abs(run.allocated[0] - run.allocated[1] - more) < 2**20


def test_it_is_said() -> None:
    filled = memcalc.estimate(*RUN, "s=4096").notes
    below = memcalc.estimate(*RUN, "s=4095").notes

    assert any("fills the window of 4096 tokens" in note and "0.31 GiB more" in note for note in filled)
    assert not any("window" in note for note in below)


def test_one_layer_at_a_time_where_all_are_recomputed() -> None:
    kept, again = (masked_bytes(memcalc.load(*RUN, "s=4096", f"recompute={how}")) for how in ("none", "full"))

    assert kept == 4 * again
