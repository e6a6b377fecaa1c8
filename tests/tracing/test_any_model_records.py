"""Traces of models without formulas are close to the null device, and are what was recorded."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
pytest.importorskip("transformers")

from benchmarks.any_models import of_diffusers, traced_case  # noqa: E402
from tools.any_models import errors, records  # noqa: E402

CASES = yaml.safe_load((ROOT / "benchmarks" / "any_models.yaml").read_text())


@pytest.mark.parametrize("figure", ["allocated", "reserved"])
def test_the_median_is_within_1_percent_and_the_worst_within_3(figure: str) -> None:
    sizes = [abs(error) for error in errors(figure)]

    assert statistics.median(sizes) <= 0.01
    assert max(sizes) <= 0.03


def test_every_case_is_recorded_with_its_versions() -> None:
    assert [record["case"] for record in records()] == [case["case"] for case in CASES]
    for name in ("bert", "t5", "vit", "whisper", "llava", "qwen2.5-vl", "sdxl-unet", "dit"):
        assert any(record["case"].startswith(name) for record in records())
    assert all({"torch", "transformers"} <= record["versions"].keys() for record in records())


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_a_trace_equals_its_record(case: dict[str, str]) -> None:
    if of_diffusers(case) and importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed")
    recorded = next(record for record in records() if record["case"] == case["case"])

    assert traced_case(case) == recorded["trace"]
