"""A single number, such as a mean of means, has no rows that ranks could share."""

from __future__ import annotations

import memcalc
from memcalc.layout.local_parameters import shard_shape


def test_each_rank_has_a_single_number() -> None:
    assert shard_shape((), 8, "fsdp2") == ()
    assert shard_shape((10, 3), 8, "fsdp2") == (2, 3)  # ceil(10 / 8) rows


def test_adafactor_on_sharded_parameters_is_estimated() -> None:
    """Its update takes the mean of the means of a matrix's rows. PyTorch cannot run it on DTensors, so nothing fits."""
    sharded = ("recipe=fp32", "optimizer=adafactor", "zero_stage=3", "data_parallel=2", "num_layers=2")

    result = memcalc.estimate("gpt2", *sharded, gpu="a100-40gb").replayed

    assert result.confidence == "replay"
    assert result.fits is None
