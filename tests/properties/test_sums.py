"""Every total is a sum of rows, every row is what its shape says, and nothing depends on what was asked before."""

from __future__ import annotations

import gc
import json
from functools import _lru_cache_wrapper
from math import prod

from hypothesis import given

from memcalc.api import estimate, load
from memcalc.documents.result import document
from memcalc.documents.schema import documents
from memcalc.estimation.transient import peak_bytes
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.result import RankResult
from memcalc.spec.optimizers import OPTIMIZERS
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.states.model_states import state_rows, state_sums
from tests.properties.specs import Config, configs, examples


@examples(60)
@given(configs(adapters=True, optimizers=tuple(OPTIMIZERS)))
def test_sums_and_peaks_without_rows_are_those_of_the_rows(config: Config) -> None:
    """`fit` and the engine size runs without writing rows."""
    spec = load(config)

    for stage, rank in zip(stages_of(spec), sorted(estimate(spec).ranks, key=_stage), strict=True):
        sums = {key: amount for key, amount in state_sums(spec, stage).items() if amount}
        assert sums == state_rows(spec, stage).sums
        assert peak_bytes(spec, stage, None) == rank.ledger.peak_bytes


def _stage(rank: RankResult) -> int:
    return rank.rank["pipeline_stage"]


@examples(60)
@given(configs(adapters=True, optimizers=tuple(OPTIMIZERS)))
def test_rows_sum_to_phases_and_phases_to_the_peak(config: Config) -> None:
    """Rows of a phase and component sum to that component, components to the total, and the peak is the maximum."""
    result = estimate(config)

    for rank in result.ranks:
        ledger = rank.ledger
        for phase in ledger.phases:
            rows = [row for row in ledger.rows if phase in row.phases]
            sums = {c: sum(row.bytes for row in rows if row.component is c) for c in Component}
            assert ledger.components(phase) == {component: total for component, total in sums.items() if total}
            assert ledger.totals[phase] == sum(sums.values())
        assert ledger.peak_bytes == max(ledger.totals.values())
        earlier = ledger.phases[: ledger.phases.index(ledger.peak_phase)]
        assert all(ledger.totals[phase] < ledger.peak_bytes for phase in earlier)
    assert result.ledger.peak_bytes == max(rank.ledger.peak_bytes for rank in result.ranks)


@examples(60)
@given(configs(adapters=True, optimizers=tuple(OPTIMIZERS)))
def test_a_row_is_as_large_as_its_shape_says(config: Config) -> None:
    """bytes = count x elements x bytes of the dtype, in whole numbers above 0."""
    for rank in estimate(config).ranks:
        for row in rank.ledger.rows:
            assert row.bytes == row.count * prod(row.shape) * DTYPE_BYTES[row.dtype] > 0, row


@examples(60)
@given(configs(adapters=True, optimizers=tuple(OPTIMIZERS)))
def test_the_allocator_returns_multiples_of_512_bytes(config: Config) -> None:
    """What is requested and what rounding adds come to whole blocks in every phase."""
    for rank in estimate(config).ranks:
        assert all(total % 512 == 0 for total in rank.ledger.totals.values())


@examples(30)
@given(configs(adapters=True))
def test_the_document_is_what_its_schema_says_and_survives_json(config: Config) -> None:
    """Written, read and validated, it is the same document."""
    written = document(estimate(config))
    read = documents()["estimate"].validate_json(json.dumps(written))

    assert read["spec"].model_dump(mode="json") == written["spec"]
    assert {**read, "spec": None} == {**written, "spec": None}
    assert sum(written["components"].values()) == written["peak"]["allocated_bytes"]
    assert [phase["allocated_bytes"] for phase in written["phases"]] == [
        sum(phase["components"].values()) for phase in written["phases"]
    ]


@examples(30)
@given(configs(adapters=True))
def test_a_resolved_spec_loads_to_itself(config: Config) -> None:
    """Dumped with every default filled in and loaded again, it is the same run with the same answer."""
    spec = load(config)
    again = load(json.loads(json.dumps(spec.model_dump(mode="json"))))

    assert again == spec
    assert document(estimate(again)) == document(estimate(spec))


@examples(20)
@given(configs(adapters=True))
def test_an_estimate_does_not_depend_on_what_was_asked_before(config: Config) -> None:
    """Once with the caches as earlier examples left them, once with all of them empty."""
    warm = document(estimate(config))
    gc.unfreeze()  # tests/conftest.py has hidden what was there before the first test
    caches = [found for found in gc.get_objects() if isinstance(found, _lru_cache_wrapper)]
    gc.freeze()
    ours = [cache for cache in caches if cache.__module__.startswith("memcalc.")]
    assert len(ours) >= 5
    for cache in ours:
        cache.cache_clear()

    assert document(estimate(config)) == warm
