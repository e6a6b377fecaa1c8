"""One published model of every family with formulas, traced (benchmarks/catalogue_families.py): the estimate agrees."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.api.sources import load
from memcalc.catalogue.shipped import find_shipped, shipped_entries
from memcalc.ledger.component import Component
from memcalc.spec.model_families.conversion import has_family_formulas, known_families
from memcalc.spec.model_families.multimodal import language_config
from memcalc.spec.towers import TOWERS
from tests.thinning import quick_every

RECORDS = Path(__file__).parents[2] / "benchmarks" / "recordings" / "catalogue" / "families.jsonl"
CLOSE = 0.01  # of the trace


@cache
def records() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in RECORDS.read_text().splitlines())


@pytest.mark.parametrize("record", quick_every(24, records()), ids=lambda record: record["family"])
def test_peak_and_activations_are_within_a_percent(record: dict[str, Any]) -> None:
    ledger = memcalc.estimate(record["hub_id"], *record["settings"]).replayed.ledger
    kept = {phase: ledger.components(phase).get(Component.ACTIVATIONS, 0) for phase in record["activations"]}

    assert ledger.peak_bytes == pytest.approx(record["peak_bytes"], rel=CLOSE)
    assert max(kept.values()) == pytest.approx(max(record["activations"].values()), rel=CLOSE)


def test_records_are_of_families_with_formulas_each_once() -> None:
    families = [record["family"] for record in records()]

    assert len(families) == len({*families})
    assert {*families} <= {*known_families(), *TOWERS}
    for record in records():
        entry = find_shipped(record["hub_id"])
        assert entry is not None
        assert entry.config["model_type"] == record["family"]


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(TOWERS))
def test_the_traced_vision_language_model_has_the_published_count(family: str) -> None:
    """The class of its language model may have other defaults than the family, and keys lack the defaults of the family."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from memcalc.step.huggingface import build_config

    of_family = (each for each in shipped_entries() if each.config["model_type"] == family)
    entry = next(each for each in of_family if has_family_formulas(language_config(each.config) or {}))
    config = build_config(load(entry.hub_id, "sequence_length=64"))
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)

    assert sum(parameter.numel() for parameter in model.parameters()) == entry.parameters
