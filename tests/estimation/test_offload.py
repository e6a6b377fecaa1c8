"""The optimizer on the host (ZeRO-Offload): what leaves the device, what the host holds, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

import memcalc
from memcalc.documents.result import document
from memcalc.documents.schema import documents
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.ledger.textbook import deepspeed_gpu_bytes, deepspeed_host_bytes
from memcalc.workspaces.pinned import pinned_block
from tools.offload import OffloadedRun, zero_runs

P = 6_738_415_616  # parameters of Llama-2-7B; each of its tensors divides by 8
LARGEST = 32000 * 4096  # the embedding
RUN = ("implementation=huggingface", "recipe=mixed-16", "engine=deepspeed", "data_parallel=8")


def sized(*overrides: str, offload: str = "optimizer") -> Any:
    return memcalc.estimate("llama-2-7b", *RUN, f"offload={offload}", *overrides, gpu="a100-80gb")


def host_of(result: Any) -> Ledger:
    host: Ledger | None = result.headline.host
    assert host is not None
    return host


def test_the_host_of_stage_2() -> None:
    """fp32 masters 4P/N, their gradients 4P/N, two moments 8P/N, updated weights in 16 bits 2P/N.

    Gradients pass through a 16-bit buffer as large as the largest matrix.
    """
    host = host_of(sized("zero_stage=2"))

    assert host.components("optimizer_step_2") == {
        Component.MASTER_WEIGHTS: 4 * P // 8,
        Component.GRADIENTS: 4 * P // 8,
        Component.OPTIMIZER_STATE: 8 * P // 8,
        Component.COMMUNICATION_BUFFERS: 2 * P // 8 + 2 * LARGEST,
    }
    # DeepSpeed's own count for a node of 8: 16 bytes per parameter, half as much again for buffers it does not name;
    # its 4 bytes per GPU and parameter at start-up, 32, are more.
    assert deepspeed_host_bytes(P, 8, 2, offload="optimizer") == 32 * P * 3 // 2
    assert 8 * (host.peak_bytes - 2 * LARGEST) == 18 * P


def test_the_host_of_stage_2_with_accumulation() -> None:
    """Micro-batches are summed there in 16 bit: 2P/N more."""
    once, twice = sized("zero_stage=2"), sized("zero_stage=2", "gradient_accumulation_steps=2")

    assert host_of(twice).peak_bytes - host_of(once).peak_bytes == 2 * P // 8


def test_the_host_of_stage_3() -> None:
    """As stage 2, with all gradients in 16 bit (2P/N) in place of the buffer."""
    host = host_of(sized("zero_stage=3"))

    assert host.peak_bytes == (4 + 4 + 8 + 2) * P // 8


@pytest.mark.parametrize("run", zero_runs(), ids=lambda run: run.run.case)
def test_recorded_runs(run: OffloadedRun) -> None:
    """DeepSpeed 0.19.6 on the null device; the remaining error is unsplit block remainders. Pinned memory is byte-exact."""
    assert -0.004 <= run.run.error <= 0.0005
    assert run.pinned_measured == run.pinned_estimated


@pytest.mark.parametrize(("without", "offload"), [("none", "parameters"), ("optimizer", "all")])
def test_parameters_on_the_host(without: str, offload: str) -> None:
    """The rank's 16-bit weights, 2P/N, go from the device to one pinned block of the host; the step stays."""
    before, after = sized("zero_stage=3", offload=without), sized("zero_stage=3", offload=offload)

    assert Component.WEIGHTS in before.ledger.components("zero_grad_2")
    held = {part: size for part, size in after.ledger.components("zero_grad_2").items() if "rounding" not in part.value}
    assert held.get(Component.WEIGHTS, 0) == 512  # two rotary tables, 64 x 4
    assert host_of(after).components("zero_grad_2")[Component.WEIGHTS] == 2 * P // 8
    host = 0 if without == "none" else host_of(before).peak_bytes
    assert host_of(after).peak_bytes - host == pinned_block(2 * P // 8) == 2**31
    for part in (Component.MASTER_WEIGHTS, Component.OPTIMIZER_STATE):
        assert (part in held) == (offload == "parameters")


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_device_is_rid_of(stage: int) -> None:
    """Between steps: masters and moments; at stage 2 the passage of gradients comes, at stage 3 their buffer goes."""
    stays, leaves = (sized(f"zero_stage={stage}", offload=offload).ledger for offload in ("none", "optimizer"))
    rounding = [ledger.components("zero_grad_2").get(Component.BLOCK_ROUNDING, 0) for ledger in (stays, leaves)]

    less = stays.totals["zero_grad_2"] - rounding[0] - leaves.totals["zero_grad_2"] + rounding[1]

    assert less == 12 * P // 8 + (2 * P // 8 if stage == 3 else -2 * LARGEST)
    for phase in ("input", "zero_grad_2", "optimizer_step_2"):
        there = leaves.components(phase)
        assert not {Component.MASTER_WEIGHTS, Component.OPTIMIZER_STATE, Component.GRADIENTS} & there.keys()


def test_the_device_of_stage_2_is_deepspeed_s_own_count() -> None:
    """2 bytes per parameter, and nothing more in the step. Beside: two rotary tables, 64 x 4."""
    ledger = sized("zero_stage=2").ledger

    assert (
        ledger.components("zero_grad_2")[Component.WEIGHTS] == deepspeed_gpu_bytes(P, 8, 2, offload="optimizer") + 512
    )
    for stage in (2, 3):
        assert Component.TEMPORARIES not in sized(f"zero_stage={stage}").ledger.components("optimizer_step_2")


def test_the_document_has_the_host_apart() -> None:
    found = document(sized("zero_stage=2"))
    documents()["estimate"].validate_json(json.dumps(found))

    host = found["host"]
    assert host["bytes"] == sum(host["components"].values()) == 18 * P // 8 + 2 * LARGEST
    alive = [row["bytes"] for row in host["ledger"] if host["phase"] in row["phases"]]
    assert sum(alive) == host["bytes"]
    assert sum(found["components"].values()) == found["peak"]["allocated_bytes"]
    assert "host" not in document(sized("zero_stage=2", offload="none"))


def test_it_says_what_is_left_out() -> None:
    assert any("offload" in line for line in sized("zero_stage=2").not_modelled)
    assert not any("offload" in line for line in sized("zero_stage=2", offload="none").not_modelled)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("zero_stage=1",),
            (
                "parallelism.offload: offload = optimizer needs engine = deepspeed with zero_stage = 2 or 3, not "
                "deepspeed with zero_stage = 1. Set engine: deepspeed and zero_stage: 2 or 3, or offload: none."
            ),
        ),
        (
            ("engine=fsdp2", "zero_stage=3"),
            (
                "parallelism.offload: engine = fsdp2 does not support offload = optimizer: CPUOffloadPolicy offloads "
                "parameters, gradients and states. Set offload: all, or engine: deepspeed."
            ),
        ),
        (
            ("zero_stage=2", "offload=all"),
            (
                "parallelism.offload: offload = all needs engine = deepspeed with zero_stage = 3, or fsdp2, not "
                "deepspeed with zero_stage = 2. Set engine: deepspeed and zero_stage: 3, or offload: none."
            ),
        ),
        (
            ("zero_stage=2", "optimizer=adam-8bit"),
            (
                "training.optimizer: optimizer = adam-8bit has no CPU kernel, and offload runs the optimizer on the "
                "CPU. Set optimizer to one of adam, adamw, adagrad, lion."
            ),
        ),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as refused:
        sized(*overrides)

    assert message in str(refused.value)
