"""Tapes of a few operators, compiled: the casts of autocast, and how long they live."""

from __future__ import annotations

from memcalc.ledger.component import Component
from tests.estimation.stories import block, compile_, names, story


def test_autocast_keeps_casts_of_input_and_weight_and_drops_the_biass_with_its_region() -> None:
    """x 4·n·k is not needed itself; its cast 2·n·k and the weight's 2·m·k are saved, the bias's only cached."""
    ops, x = block(parameters="fp32", autocast=True)
    y = ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=True)

    done = compile_(ops, y)

    assert [(done.storages[index].name, done.storages[index].formula) for index in done.kept] == [
        ("fc.weight in bf16 (autocast cache)", "2·m·k"),
        ("fc input in bf16", "2·n·k"),
    ]
    assert names(done, done.region) == ["fc.bias in bf16 (autocast cache)"]
    assert set(done.saved) == {*done.kept, *done.region}
    assert done.storages[done.region[0]].component is Component.TEMPORARIES


def test_casts_of_16_bit_weights_are_not_cached() -> None:
    """ATen autocast_mode.cpp, cached_cast: of fp32 leaves alone. The bias's cast is freed; 2·m·k of the weight's stay.

    Both gradients come in bf16, and leave in fp16.
    """
    ops, x = block(parameters="fp16", autocast=True)
    done = compile_(ops, ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=True))

    assert [(done.storages[index].name, done.storages[index].formula) for index in done.kept] == [
        ("fc.weight in bf16", "2·m·k"),
        ("fc input in bf16", "2·n·k"),
    ]
    assert names(done, done.region) == []
    dtype = {storage.name: storage.dtype for storage in done.storages}
    assert dtype["fc.weight"] == dtype["fc.bias"] == "fp16"
    assert dtype["gradient of fc.weight in bf16"] == "bf16"


def test_sums_of_two_16_bit_dtypes_are_in_fp32() -> None:
    """c10/core/ScalarType.cpp, promoteTypes: the residual of fp16 rows and bf16 products."""
    ops, x = block(parameters="fp16", autocast=True)
    rows = ops.cast(x, "fp16")
    product = ops.linear(rows, "fc", ("k", "k"), ("n", "k"), bias=False)

    assert (rows.dtype, product.dtype) == ("fp16", "bf16")
    assert ops.add(rows, product, "residual").dtype == ops.mul(rows, product, "product").dtype == "fp32"


def test_a_cast_hands_back_a_gradient_in_the_old_dtype() -> None:
    """The matmul's gradients are bf16; the casts behind them make the fp32 ones, and bf16's go one by one."""
    ops, x = block(parameters="fp32", autocast=True)
    done = compile_(ops, ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=False))

    assert story(done, done.backward) == [
        "+gradient of fc output",
        "+gradient of fc.weight in bf16 (autocast cache)",  # mm: of mat2 before self
        "+gradient of fc input in bf16",
        "-fc input in bf16",
        "-fc.weight in bf16 (autocast cache)",
        "-gradient of fc output",
        "+gradient of x",  # the cast that was made last goes back first
        "-gradient of fc input in bf16",
        "+fc.weight",
        "-gradient of fc.weight in bf16 (autocast cache)",
        "-gradient of x",
    ]
    dtype = {storage.name: storage.dtype for storage in done.storages}
    assert dtype["fc.weight"] == dtype["gradient of x"] == "fp32"
    assert dtype["gradient of fc.weight in bf16 (autocast cache)"] == "bf16"


def test_each_use_of_an_activation_is_cast_again() -> None:
    """Only casts of leaves are cached: q and k of the same x each keep a cast of it."""
    ops, x = block(parameters="fp32", autocast=True)
    q = ops.linear(x, "q", ("m", "k"), ("n", "m"), bias=False)
    k = ops.linear(x, "k", ("m", "k"), ("n", "m"), bias=False)
    done = compile_(ops, ops.matmul(q, k, "scores", ("n", "n")))

    assert [name for name in names(done, done.kept) if "input" in name] == ["q input in bf16", "k input in bf16"]


def test_autocast_casts_log_probabilities_for_nll_loss() -> None:
    """F.cross_entropy of bf16 logits: log_softmax keeps 2·n·m in their dtype, nll_loss the fp32 copy that it reads."""
    ops, x = block(autocast=True)
    logits = ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=False)
    loss = ops.cross_entropy(logits, dtype="fp32")

    done = compile_(ops, loss)

    kept = {done.storages[index].name: done.storages[index].formula for index in done.kept}
    assert kept["log-probabilities"] == "2·n·m"
    assert kept["log-probabilities in fp32"] == "4·n·m"


def test_norms_and_softmax_run_in_fp32_under_autocast() -> None:
    ops, x = block(parameters="fp32", autocast=True)
    y = ops.linear(x, "fc", ("m", "k"), ("n", "m"), bias=False)

    assert y.dtype == "bf16"
    assert ops.layer_norm(y, "norm", "m").dtype == ops.softmax(y, "p").dtype == "fp32"
