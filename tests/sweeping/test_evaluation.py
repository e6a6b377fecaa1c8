"""Tables of a grid beside estimates made one by one."""

import random
from collections.abc import Iterable
from itertools import permutations
from math import ceil
from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.ledger.result import Result
from memcalc.spec.limits import Limit
from memcalc.spec.origin import Origin
from memcalc.sweeping import blocks, evaluate
from memcalc.sweeping.arrays import COMPONENTS
from memcalc.sweeping.grid import assignments
from memcalc.sweeping.reasons import Reasons
from memcalc.sweeping.table import Table
from memcalc.sweeping.verdict_terms import CLOSE, DOES_NOT_FIT, FITS
from memcalc.verdict.judge import verdict_of
from memcalc.verdict.needs import MemoryNeed, can_replay, least_bytes, recorded_need
from tests.properties.specs import SHARE
from tests.thinning import quick_every


def assert_same(source, table: Table, *overrides: str, gpu: str | None = None) -> None:
    """Every number of every configuration is the one that formulas give for it alone; of large tables, of a sample."""
    for index in sample(len(table)):
        words = assignments(table.point(index))
        result, refusal = _estimate(source, (*overrides, *words), gpu)
        assert table.reason(index) == refusal.removeprefix("--set: "), words
        assert table.valid[index] == (result is not None)
        if result is None:
            continue
        ledger = result.ledger
        assert table.peak_bytes[index] == ledger.peak_bytes, words
        assert table.phases[table.peak_phase[index]] == ledger.peak_phase, words
        assert table.pipeline_stage[index] == result.headline.rank["pipeline_stage"], words
        need = recorded_need(result.spec, result.gpu, ledger.peak_bytes)
        assert table.reserved_bytes[index] == need.reserved_bytes
        assert table.can_replay[index] == can_replay(result.spec)
        assert table.phase_bytes[index].tolist() == [ledger.totals.get(phase, 0) for phase in table.phases], words
        at_peak = ledger.components(ledger.peak_phase)
        assert table.component_bytes[index].tolist() == [at_peak.get(each, 0) for each in COMPONENTS], words
        if result.gpu is not None:
            assert table.device_bytes[index] == need.device_bytes
            assert table.headroom_bytes[index] == result.gpu.usable_bytes - need.device_bytes
            assert_judged(table, index, need, result)


def sample(size: int) -> list[int]:
    """Indices of a table's configurations, all of them or a share (tests/conftest.py); the same in every run."""
    return sorted(random.Random(size).sample(range(size), max(min(size, 12), ceil(SHARE * size))))


def assert_judged(table: Table, index: int, need: MemoryNeed, result: Result) -> None:
    """The verdict by recorded runs where no replay is possible; elsewhere what no replay contradicts."""
    assert result.gpu is not None
    verdict = verdict_of(need, result.gpu, result.gpu.usable_bytes, 0, result.limits)
    if table.verdict[index] == FITS or not can_replay(result.spec):
        expected = {"fits": FITS, "unknown": CLOSE, "does-not-fit": DOES_NOT_FIT}
        assert table.verdict[index] == expected[verdict.answer]
    elif table.verdict[index] == DOES_NOT_FIT:
        assert least_bytes(result.spec, result.gpu) > result.gpu.usable_bytes
    assert table.fits[index] == (table.verdict[index] == FITS)
    assert table.close[index] == (table.verdict[index] == CLOSE)


def _estimate(source, overrides: tuple[str, ...], gpu: str | None) -> tuple[Result | None, str]:
    """A result by formula, or why there is none: `memcalc.estimate` would trace some runs instead."""
    try:
        return estimate(memcalc.load(source, *overrides, gpu=gpu)), ""
    except InputError as error:  # of several faults a configuration has the first as its reason
        return None, str(InputError(error.problem, error.remedy, error.location))


def test_a_grid_of_everything_equals_the_scalar_estimates():
    axes: dict[Any, Any] = {
        "recompute": ["none", "full"],
        "tensor_parallel": [1, 2, 3],
        ("zero_stage", "data_parallel"): [(0, 1), (1, 4), (3, 8)],
        "gradient_accumulation_steps": [1, 4],
        "b": [1, 2],
        "s": [128, 100_000],
    }
    table = evaluate("gpt2", axes, gpu="a100-40gb")
    assert_same("gpt2", table, gpu="a100-40gb")
    assert 0 < table.valid.sum() < len(table)


@pytest.mark.parametrize("whole", quick_every(2, [0, 2], first=1))
def test_sequences_that_fill_windows_have_tapes_of_their_own(whole: int):
    run = ("implementation=huggingface", "num_layers=5", "sliding_window=256", f"full_attention_interval={whole}")
    axes: dict[Any, Any] = {
        "recompute": ["none", "every-2"],
        ("zero_stage", "data_parallel"): [(0, 1), (3, 4)],
        "s": [128, 255, 256, 300],
        "b": [1, 2, 3],
    }
    table = evaluate("mistral-7b", axes, *run)
    assert table.valid.all()
    assert_same("mistral-7b", table, *run)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["smollm3-3b", "command-r7b"])
def test_layers_that_turn_nothing_have_tapes_of_their_own(preset: str):
    run = ("implementation=huggingface", "num_layers=5")
    axes: dict[Any, Any] = {
        "recompute": ["none", "every-2"],
        ("zero_stage", "data_parallel"): [(0, 1), (3, 4)],
        "s": [128, 300, 5000],
        "b": [1, 2],
        "attention": ["flash", "eager"],
    }
    table = evaluate(preset, axes, *run)
    assert table.valid.all()
    assert_same(preset, table, *run)


def test_sums_are_exact():
    table = evaluate("llama-3-8b", {"b": [1, 2], "pipeline_parallel": [1, 4]}, ledger=True)
    assert table.ledger_bytes is not None
    assert (table.ledger_bytes.sum(axis=2) == table.phase_bytes).all()
    assert (table.component_bytes.sum(axis=1) == table.peak_bytes).all()
    assert (table.phase_bytes.max(axis=1) == table.peak_bytes).all()


def test_blocks_are_the_table_cut_into_pieces():
    axes: dict[Any, Any] = {"recompute": ["none", "full"], "b": [1, 2, 3, 4, 5]}
    whole = evaluate("gpt2", axes)
    pieces = list(blocks("gpt2", axes, size=3))
    assert [piece.start for piece in pieces] == [0, 3, 5, 8]
    assert np.concatenate([piece.phase_bytes for piece in pieces]).tolist() == whole.phase_bytes.tolist()
    assert pieces[2].point(1) == whole.point(6)


def test_a_gpu_is_an_axis_like_any_other():
    table = evaluate("gpt2", {"gpu": ["t4", "h100-80gb"]}, "b=8")
    assert_same("gpt2", table, "b=8")
    assert table.usable_bytes[0] < table.usable_bytes[1]


def test_without_a_gpu_nothing_fits_or_does_not():
    table = evaluate("gpt2", {"b": [1]})
    with pytest.raises(ValueError, match="no GPU was given"):
        _ = table.fits


def test_tensor_parallelism_stays_in_a_node_if_asked():
    table = evaluate("gpt3", {"tensor_parallel": [4, 8, 16]}, gpus_per_node=8)
    assert table.valid.tolist() == [True, True, False]
    assert table.reasons() == {
        "parallelism.tensor_parallel: tensor_parallel = 16 is more than the 8 GPUs of a node. Set at most 8: tensor-parallel ranks exchange activations in every layer.": 1
    }
    assert table.point(2) == {"parallelism.tensor_parallel": 16}


def test_what_cannot_be_is_pruned_with_the_message_of_loading_it():
    table = evaluate("llama-3-8b", {"tensor_parallel": [1, 6]})
    assert table.valid.tolist() == [True, False]
    assert table.reason(0) == ""
    assert table.reason(1).startswith("parallelism.tensor_parallel: tensor_parallel = 6 does not divide")


def test_stages_of_any_number_of_layers_follow_from_one(monkeypatch):
    """Stages of one and of two layers have no layer between their first and their last; of three on all are alike."""
    axes: dict[Any, Any] = {"num_layers": [1, 2, 3, 4, 5, 30], "zero_stage": [0, 3], "b": [1, 2]}
    assert_same("llama-3-8b", evaluate("llama-3-8b", axes, "data_parallel=8"), "data_parallel=8")


@pytest.mark.parametrize("zero_stage", quick_every(2, [2, 3], first=1))
def test_engines_that_count_parameters_layer_by_layer(monkeypatch, zero_stage):
    """DeepSpeed's bucket is full, and it has gathered most, in layers that depend on how large layers are."""
    overrides = ("engine=deepspeed", "data_parallel=8", f"zero_stage={zero_stage}")
    axes: dict[Any, Any] = {"tensor_parallel": [1, 4], "num_layers": [2, 3, 32], "b": [1, 2]}
    assert_same("llama-3-8b", evaluate("llama-3-8b", axes, *overrides), *overrides)


def test_recipes_that_drop_gradients_share_nothing_with_those_that_keep_them(monkeypatch):
    """mixed-16 keeps the gradients that backward makes, mixed-18 adds each to its main gradient and frees it."""
    assert_same("gpt2", evaluate("gpt2", {"recipe": ["mixed-16", "mixed-18", "mixed-20"], "b": [1, 3]}))


def test_what_is_not_modelled_is_pruned_among_what_is(monkeypatch):
    axes: dict[Any, Any] = {"implementation": ["plain", "huggingface"], "b": [1, 2]}
    table = evaluate("mpt-7b", axes)
    assert_same("mpt-7b", table)


@pytest.mark.parametrize("b", [[1, 10_000], [1, 2, 3, 5_000, 10_000, 20_000, 2**31 - 1]])
def test_more_than_a_pebibyte_of_one_gpu_is_reported_not_written(b):
    """Bytes that int64 does not hold are no numbers of a table; some that it would hold are not asked for one by one."""
    axes = {"s": [1024, 10_000_000], "b": b}
    table = evaluate("llama-3-8b", axes, "max_position_embeddings=10000000", gpu="h100-80gb")
    for index in range(len(table)):
        words = assignments(table.point(index))
        peak = memcalc.estimate(
            "llama-3-8b", "max_position_embeddings=10000000", *words, gpu="h100-80gb"
        ).ledger.peak_bytes
        assert table.too_large[index] == (peak > 2**50), words
        assert table.peak_bytes[index] == (0 if peak > 2**50 else peak)
    assert (table.valid != table.too_large).all()
    assert not table.fits[table.too_large].any()
    assert set(table.reasons()) == {
        "It needs more than 1 PiB per GPU, the limit of `memcalc sweep`. Use `memcalc estimate` for this configuration."
    }


def asked_reasons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the configurations with a requested reason from now on."""
    asked: list[int] = []
    ask = Reasons.of

    def reason(self: Reasons, number: int) -> str:
        asked.append(number)
        return ask(self, number)

    monkeypatch.setattr(Reasons, "of", reason)
    return asked


def test_reasons_are_asked_once_for_all_batches_that_break_the_same_rule(monkeypatch):
    asked = asked_reasons(monkeypatch)
    table = evaluate("gpt2", {"tensor_parallel": [1, 5], "s": [1024, 4096, 8192], "b": range(1, 51)})

    reasons = table.reasons()

    # Of either layout two lengths exceed the positions, and heads are not five of the third.
    assert sorted(reasons.values()) == [50, 2 * 2 * 50]
    assert len(asked) == 2 + 1
    assert set(reasons) == {table.reason(number) for number in list(asked)}


@pytest.mark.parametrize(
    ("source", "axes"),
    [
        ("gpt2", {"tensor_parallel": [1, 5], "s": [1024, 4096, 8192], "b": [1, 2, 3]}),
        ("mpt-7b", {"implementation": ["plain", "huggingface"], "tensor_parallel": [1, 2], "b": [1, 2]}),
        ("gpt2", {"global_batch_size": [4, 6], "b": [1, 4]}),  # every configuration for itself
        ("gpt2", {"zero_stage": [0, 9], "b": [1, 2]}),  # cannot be loaded
    ],
)
def test_every_reason_is_that_of_its_own_configuration(source, axes):
    table = evaluate(source, axes, "data_parallel=1")
    assert table.every_reason() == [table.reason(index) for index in range(len(table))]
    assert any(table.every_reason())


def test_words_that_are_the_same_are_asked_for_once(monkeypatch):
    asked = asked_reasons(monkeypatch)
    axes: dict[Any, Any] = {"recompute": ["none", "full"], "s": [1024, 4096, 8192], "b": range(1, 51)}

    reasons = evaluate("gpt2", axes).every_reason()

    assert len(asked) == len({*reasons} - {""}) == 2  # of 4096 and of 8192 tokens, whatever is recomputed


def test_a_source_that_is_none_is_an_error():
    with pytest.raises(InputError, match="no-such-model"):
        evaluate("no-such-model", {"b": [1]})


AXES: dict[Any, Any] = {
    "b": [1, 2, 3],
    "recompute": ["none", "full"],
    "s": [256, 512],
    "optimizer": ["adamw", "sgd"],
}
ROTATIONS = [(*list(AXES)[first:], *list(AXES)[:first]) for first in range(len(AXES))]


@pytest.mark.parametrize(
    "orders",
    [
        # Every axis in every place, and every two in both orders.
        pytest.param([*ROTATIONS, tuple(reversed(AXES))], id="rotations"),
        pytest.param([*permutations(AXES)], id="permutations", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("ledger", quick_every(2, [False, True], first=1))
def test_axes_come_in_any_order(ledger: bool, orders: Iterable[tuple[Any, ...]]):
    """Contexts are estimated one after the other, and their configurations stand where the grid has them."""
    tables = []
    for order in orders:
        table = evaluate("gpt2", {name: AXES[name] for name in order}, ledger=ledger)
        results = {
            tuple(sorted(table.point(number).items(), key=str)): (
                table.phase_bytes[number].tolist(),
                table.component_bytes[number].tolist(),
                None if table.ledger_bytes is None else table.ledger_bytes[number].tolist(),
            )
            for number in range(len(table))
        }
        tables.append(results)
    assert len({repr(rows) for rows in tables[0].values()}) > len(tables[0]) // 2
    assert all(each == tables[0] for each in tables)


def test_masks_go_with_the_last_layer_that_runs_again_with_them():
    """Of layers with windows and without, each with a mask of its own."""
    axes: dict[Any, Any] = {"recompute": ["full", "every-2", [1, 2]], "num_layers": [3, 6], "s": [128, 1024]}
    modules = "implementation=huggingface"
    assert_same("gpt-oss-20b", evaluate("gpt-oss-20b", axes, modules), modules)


def test_what_is_not_modelled_may_depend_on_the_batch():
    """An evaluation of eight sequences holds memory beyond the step where a micro-batch has fewer."""
    limits = (Limit("evaluation", holds_memory=True, sequences=8), Limit("a copy", holds_memory=True, at_least_bytes=1))
    run = memcalc.load("gpt2").with_origin(Origin(limits=limits[:1]))
    table = evaluate(run, {"b": range(1, 13), "s": [64, 128]}, gpu="h100-80gb")
    both = evaluate(run.with_origin(Origin(limits=limits)), {"b": range(1, 13)}, gpu="h100-80gb")

    assert table.fits.tolist() == [b >= 8 for b in range(1, 13) for _ in range(2)]
    assert [terms.unmodelled for terms in table.terms(table.close)] == [("evaluation",)]
    assert both.close.all()
    assert {terms.unmodelled_bytes for terms in both.terms(both.valid)} == {1}


def test_bytes_that_are_not_modelled_count_where_they_are_known():
    copy = memcalc.load("gpt2").with_origin(
        Origin(limits=(Limit("a copy", holds_memory=True, at_least_bytes=14 * 2**30),))
    )
    table = evaluate(copy, {"b": range(1, 13)}, gpu="t4")

    assert not table.fits.any()
    assert table.answers[table.verdict[0]] == "does-not-fit"


def test_an_evaluation_is_a_phase_of_its_own():
    """A batch of an evaluation does not vary with the micro-batch: it is the peak of the smaller ones."""
    axes: dict[Any, Any] = {"evaluation_batch_size": [None, 4, 64], "b": [1, 8, 64], "s": [128, 512]}
    table = evaluate("gpt2", axes, gpu="h100-80gb")

    assert_same("gpt2", table, gpu="h100-80gb")
    assert table.phases[-1] == "evaluation"
    peaks = {tuple(table.point(at).values()): table.phases[table.peak_phase[at]] for at in range(len(table))}
    assert peaks[64, 1, 512] == "evaluation" != peaks[64, 64, 512]


def test_generation_between_steps_is_a_phase_of_its_own() -> None:
    """Its batch varies with the micro-batch and the accumulated ones; next to it there may be an evaluation or none."""
    axes: dict[Any, Any] = {
        "completion_length": [None, 100],
        "evaluation_batch_size": [None, 4],
        "gradient_accumulation_steps": [1, 64],
        "b": [1, 8],
        "s": [128, 512],
    }
    table = evaluate("gpt2", axes, "implementation=huggingface", gpu="h100-80gb")

    assert_same("gpt2", table, "implementation=huggingface", gpu="h100-80gb")
    assert table.phases[-2:] == ("evaluation", "generation")


def test_tables_over_a_reference_model_equal_single_estimates() -> None:
    axes: dict[Any, Any] = {
        "reference_model": [True, False],
        "pairs": [True, False],
        "recompute": ["none", "full"],
        "b": [1, 2, 8],
        "s": [128, 512],
    }
    given = ("implementation=huggingface", "recipe=amp", "loss=tiled")
    assert_same("gpt2", evaluate("gpt2", axes, *given), *given)


def test_tables_over_zeros_sizes_equal_single_estimates() -> None:
    axes: dict[str, Any] = {
        "parallelism.zero_optimization.reduce_bucket_size": [5000, 500_000_000],
        "parallelism.zero_optimization.prefetch_bucket_size": [0, 50_000_000],
        "b": [1, 4],
        "zero_stage": [2, 3],
    }
    model = {"l": 3, "d": 64, "h": 4, "V": 1000, "tie_word_embeddings": False}
    config = {"model": model, "training": {"s": 64}, "parallelism": {"engine": "deepspeed", "data_parallel": 2}}
    assert_same(config, evaluate(config, axes))


def test_tables_over_fsdps_policy_equal_single_estimates() -> None:
    axes: dict[str, Any] = {
        "parallelism.fsdp.param_dtype": ["bf16", None],
        "parallelism.fsdp.wrap": ["layers", "layers-and-ends"],
        "parallelism.fsdp.gradient_sync": ["each", "last"],
        "gradient_accumulation_steps": [1, 3],
        "b": [1, 4],
        "zero_stage": [2, 3],
    }
    model = {"l": 3, "d": 64, "h": 4, "V": 1000, "tie_word_embeddings": False}
    config = {"model": model, "training": {"s": 64}, "parallelism": {"engine": "fsdp2", "data_parallel": 2}}
    assert_same(config, evaluate(config, axes))


def test_tables_over_loops_equal_single_estimates() -> None:
    axes: dict[str, Any] = {
        "loss_upcast": [True, False],
        "logits_dtype": ["compute", "fp32"],
        "zero_grad_before": ["forward", "backward"],
        "recipe": ["pure", "amp", "mixed-20"],
        "gradient_accumulation_steps": [1, 3],
        "b": [1, 4],
    }
    model = {"l": 3, "d": 64, "h": 4, "V": 1000}
    assert_same({"model": model, "training": {"s": 64}}, evaluate({"model": model, "training": {"s": 64}}, axes))


@pytest.mark.long
def test_tables_over_weights_of_another_16_bit_dtype_equal_single_estimates() -> None:
    axes: dict[str, Any] = {
        "weight_dtype": [None, "bf16", "fp16"],
        "implementation": ["plain", "huggingface"],
        "recompute": ["none", "full"],
        "loss": ["materialized", "chunked"],
        "b": [1, 4],
    }
    training = {"s": 64, "recipe": "pure", "autocast": True}
    config = {"preset": "gpt2", "model": {"l": 3, "d": 64, "h": 4, "V": 1000}, "training": training}
    assert_same(config, evaluate(config, axes))


def test_tables_over_modules_in_fp32_equal_single_estimates() -> None:
    axes: dict[str, Any] = {
        "fp32_modules": [[], ["norm"], ["embed_tokens", "lm_head"], ["embed_tokens", "lm_head", "norm"]],
        "recompute": ["none", "full"],
        "optimizer_implementation": ["foreach", "fused"],
        "b": [1, 4],
    }
    training = {"s": 64, "recipe": "pure", "autocast": True, "implementation": "huggingface"}
    config = {"preset": "llama-3.2-1b", "model": {"l": 3, "d": 64, "h": 4, "V": 1000}, "training": training}
    assert_same(config, evaluate(config, axes))


@pytest.mark.long
def test_tables_over_chunks_that_stay_equal_single_estimates() -> None:
    layers = [("input", False, False), ("input", True, True), ("fp32", False, True), ("fp32", True, False)]
    axes: dict[Any, Any] = {
        "logits_until": ["step", "backward", "loss"],
        "chunked_head": [True, False],
        ("norm_dtype", "repeat_kv", "heads_first"): layers,  # every two of them in all combinations
        "gradient_accumulation_steps": [1, 3],
        "b": [1, 4],
    }
    model = {"l": 3, "d": 64, "h": 4, "num_key_value_heads": 2, "V": 1000, "normalization": "rmsnorm"}
    config = {"model": model, "training": {"s": 64, "loss": "chunked", "loss_recompute": False, "recipe": "pure"}}
    assert_same(config, evaluate(config, axes))
