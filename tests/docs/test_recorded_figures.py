"""Figures of recorded runs that pages name in their prose are those of the data file."""

from pathlib import Path

from memcalc.verdict.recorded_errors import reserve_ratio
from memcalc.verdict.run_types import ONE_GPU

DOCS = Path(__file__).parents[2] / "docs"


def test_ratios_of_reserved_to_allocated_memory() -> None:
    median, errors = reserve_ratio((ONE_GPU,))
    most = f"{median * (1 + errors.high):.2f}"
    oom = (DOCS / "guides" / "oom.md").read_text(encoding="utf-8")
    recomputation = (DOCS / "explanations" / "recomputation.md").read_text(encoding="utf-8")

    assert f"reserve a median of {median:.3f} times what they allocate" in oom
    assert f"The maximum at a peak is {most}" in oom
    assert f"divided by {most}; the report states this. {most} is the highest recorded ratio" in recomputation
