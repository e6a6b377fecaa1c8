"""Random runs over random batches: tables and single estimates agree to the byte."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.engine import batches, evaluate
from tests.engine.test_evaluation import assert_same
from tests.properties.specs import configs, examples


@pytest.fixture(autouse=True)
def arrays_for_all(monkeypatch):
    monkeypatch.setattr(batches, "FEW", 0)


@given(data=st.data())
@examples(40)
def test_tables_equal_single_estimates(data):
    config = data.draw(configs(adapters=True))
    axes: dict[str, Any] = {
        "s": sorted(data.draw(st.sets(st.integers(1, 130), min_size=1, max_size=3))),
        "b": sorted(data.draw(st.sets(st.integers(1, 9), min_size=1, max_size=3))),
        "gradient_accumulation_steps": data.draw(st.sampled_from([[1], [1, 2], [3], [1, 2, 8]])),
    }
    gpu = data.draw(st.sampled_from([None, "h100-80gb", "t4"]))
    assert_same(config, evaluate(config, axes, gpu=gpu), gpu=gpu)
