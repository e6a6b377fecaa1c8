"""Limits of a run: they are its own, like notes, and every way to make another run of it keeps them."""

import pickle
from collections.abc import Callable

import pytest

import memcalc
from memcalc.api.sources import run_of
from memcalc.importers.loading import load, opened
from memcalc.recomputation.config_chain import with_recompute
from memcalc.search.variants import varied
from memcalc.spec.limits import Limit
from memcalc.spec.loading import load_opened
from memcalc.spec.origin import Origin
from memcalc.spec.spec import Spec
from memcalc.suggestions.run_overrides import written_out

LIMITS = (Limit("the reference model of DPO", holds_memory=True, at_least_bytes=5), Limit("logging", False))


@pytest.fixture
def run() -> Spec:
    """A run with limits and notes."""
    return load("gpt2").with_origin(Origin(limits=LIMITS, notes=("a note",)))


def test_a_run_has_no_limits_by_default() -> None:
    plain = load("gpt2")

    assert plain.origin.limits == ()
    assert plain.with_origin(Origin(limits=LIMITS)).origin.limits == LIMITS
    assert plain.origin.limits == ()


@pytest.mark.parametrize(
    "made",
    [
        lambda run: run.with_origin(run.origin._replace(notes=("another",))),
        lambda run: run.model_copy(update={"name": "another"}),
        lambda run: varied(run, training={"micro_batch_size": 2}),
        lambda run: load(run, ("b=2",)),
        lambda run: load(run, gpu="h100-80gb"),
        lambda run: memcalc.load(run, "recompute=full"),
        lambda run: load_opened(opened(run), {}),
        lambda run: run_of(run, verb="fit").changed(("b=2",)),
        lambda run: run_of(run, "b=2", verb="fit").spec,
        lambda run: written_out(run).changed(("b=2",)),
        lambda run: with_recompute(run, "full"),
        lambda run: pickle.loads(pickle.dumps(run)),
        lambda run: memcalc.estimate(run).spec,
    ],
)
def test_derived_runs_keep_the_limits(run: Spec, made: Callable[[Spec], Spec]) -> None:
    assert made(run).origin.limits == LIMITS
