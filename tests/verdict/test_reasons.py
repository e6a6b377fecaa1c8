"""What decides the peak, and the cheapest change that makes a run fit."""

import memcalc
from memcalc.ledger.component import Component
from memcalc.report.screens.verdict import because
from memcalc.verdict.reasons import Reason, Remedy, reason_of

GIB = 2**30


def reason(preset: str, *words: str, gpu: str) -> Reason:
    return reason_of(memcalc.estimate(preset, *words, gpu=gpu).replayed)


ON_A_T4 = ("dtype=fp16", "attention=memory-efficient")  # it lacks flash attention


def test_the_foreach_update_holds_one_more_copy_of_the_gradients() -> None:
    """GPT-2 XL in fp16 on a T4: 1,557,611,200 parameters of 2 bytes are 2.90 GiB."""
    found = reason("gpt2-xl", *ON_A_T4, "recipe=pure", "s=512", gpu="t4")

    assert found.phase == "optimizer_step_1"
    assert found.largest[0][0] is Component.OPTIMIZER_STATE
    assert abs(found.lists / GIB - 2.90) < 0.01
    assert found.remedy is not None
    assert found.remedy.overrides == ("training.optimizer_implementation=fused",)
    text = because(found, "GiB")
    assert "The peak is in optimizer_step_1: mostly optimizer state (5.8" in text
    assert "The optimizer's foreach update allocates 2.90 GiB of temporaries." in text
    assert "Cheapest change that fits: --set optimizer_implementation=fused (13.27 GiB)." in text


def test_the_change_makes_the_run_fit() -> None:
    found = reason("gpt2-xl", *ON_A_T4, "recipe=pure", "s=512", gpu="t4")

    assert found.remedy is not None
    changed = memcalc.estimate("gpt2-xl", *ON_A_T4, "recipe=pure", "s=512", *found.remedy.overrides, gpu="t4")
    assert changed.fits
    assert changed.headline.device_bytes == found.remedy.device_bytes


def test_fragmentation_is_named_where_it_alone_is_why() -> None:
    found = reason("qwen2.5-0.5b", "recipe=pure", "recompute=full", "b=16", gpu="a100-80gb")

    assert found.fragmented > 15 * GIB
    assert found.remedy is not None
    assert found.remedy.overrides == ("training.alloc_conf=expandable_segments:True",)
    assert "The peak itself fits; fragmentation adds" in because(found, "GiB")


def test_a_run_that_fits_needs_no_change() -> None:
    found = reason("gpt2", gpu="h100-80gb")

    assert (found.remedy, found.fragmented) == (None, 0)


def test_offload_says_what_the_host_holds() -> None:
    """4 GiB of a rank are 32 GiB of a node of eight."""
    remedy = Remedy(("parallelism.offload=optimizer",), 20 * GIB, "offload optimizer states", 4 * GIB, 32 * GIB)
    found = Reason("optimizer_step_2", ((Component.WEIGHTS, GIB), (Component.GRADIENTS, GIB)), 0, 0, remedy)

    assert because(found, "GiB").endswith(
        "Cheapest change that fits: --set offload=optimizer (20.00 GiB, 4.00 GiB of host memory per rank, 32.00 GiB "
        "per node; offload optimizer states)."
    )
