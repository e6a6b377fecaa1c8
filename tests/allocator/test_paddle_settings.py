"""Paddle's flags: what they mean by release, and which are refused."""

from __future__ import annotations

import pytest

from memcalc.allocator.paddle.settings import parse_settings
from memcalc.errors import InputError

GIB = 2**30


@pytest.mark.parametrize(
    ("version", "strategy", "static", "threshold"),
    [
        ("1.5", "naive_best_fit", True, -1),  # garbage is not collected below 1.6
        ("1.6.3", "naive_best_fit", True, 0),
        ("1.7", "auto_growth", True, 0),  # the default from 1.7
        ("2.0", "auto_growth", False, 0),  # programs are dynamic graphs
        ("3.1", "auto_growth", False, 0),
    ],
)
def test_defaults_by_release(version: str, strategy: str, static: bool, threshold: int) -> None:
    settings = parse_settings("", version=version)

    assert (settings.strategy, settings.static_graph, settings.collection_threshold) == (strategy, static, threshold)


def test_a_flag_of_the_collector_means_a_static_graph() -> None:
    assert not parse_settings("FLAGS_free_idle_chunk=1").static_graph
    settings = parse_settings("FLAGS_eager_delete_tensor_gb=1.5 FLAGS_fast_eager_deletion_mode=false")

    assert settings.static_graph
    assert settings.collection_threshold == 1.5 * GIB
    assert not settings.fast_collection
    assert parse_settings("eager_delete_tensor_gb=-0.5").collection_threshold == -1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("FLAGS_fraction_of_gpu_memory=0.5", "has no setting 'FLAGS_fraction_of_gpu_memory'.*fraction_of_gpu_memory_to_use"),
        ("nonsense", "'nonsense' is not a setting of Paddle. Write name=value"),
        ("fraction_of_gpu_memory_to_use=1.2", "fraction_of_gpu_memory_to_use = 1.2 is invalid. The value must be between 0 and 1"),
        ("memory_fraction_of_eager_deletion=x", "must be a number"),
        ("eager_delete_tensor_gb=nan", "must be a finite number below 1e\\+30"),
        ("eager_delete_tensor_gb=1e308", "must be a finite number below 1e\\+30"),
        ("gpu_memory_limit_mb=-1", "must be a whole number of MiB"),
        ("free_idle_chunk=perhaps", "must be true or false"),
        ("allocator_strategy=thread_local", "must be auto_growth or naive_best_fit"),
        ("gpu_memory_limit_mb=1,gpu_memory_limit_mb=2", "set to 1 and to 2"),
        ("gpu_memory_limit_mb=100,initial_gpu_memory_in_mb=200", "less than the chunk of 200 MiB"),
        ("small_pool_pre_alloc_in_mb=2", "given without small_pool_size_in_mb"),
        ("small_pool_size_in_mb=1,auto_growth_chunk_size_in_mb=8", "is ignored when small_pool_size_in_mb is set"),
        ("static_graph=false,eager_delete_tensor_gb=1", "is about static graphs, but static_graph is false"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_settings(flags)


def test_a_strategy_that_contradicts_the_flags_is_refused() -> None:
    with pytest.raises(InputError, match="allocator_strategy is naive_best_fit, but the requested allocator is auto"):
        parse_settings("FLAGS_allocator_strategy=naive_best_fit", "auto_growth")


def test_flags_that_have_no_effect_are_named() -> None:
    notes = parse_settings("gpu_allocator_retry_time=0,initial_gpu_memory_in_mb=5").notes

    assert notes == (
        "gpu_allocator_retry_time has no effect: no other thread frees memory while one waits",
        "initial_gpu_memory_in_mb has no effect: it is a flag of naive_best_fit",
    )


@pytest.mark.parametrize("version", ["0.9", "4.0", "new", "31"])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(InputError, match="is not a version of Paddle"):
        parse_settings("", version=version)
