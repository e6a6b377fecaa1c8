"""Libraries around the step on fake tensors: PEFT's adapters, bitsandbytes' optimizers, modules that convert themselves."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import memcalc
from memcalc.errors import InputError
from memcalc.events import EventType
from memcalc.ledger.component import Component

TINY = ("l=2", "b=1", "s=32", "V=512", "recipe=pure")


@pytest.mark.parametrize("implementation", ["plain", pytest.param("huggingface", marks=pytest.mark.long)])
def test_adapters_hold_what_the_estimate_says(implementation: str) -> None:
    run = ("llama-3.2-1b", *TINY, "lora.rank=8", f"implementation={implementation}")

    traced = memcalc.trace(*run, gpu="h100-80gb", steps=2).result
    estimated = memcalc.estimate(*run, gpu="h100-80gb")

    assert traced.trainable_parameters == estimated.trainable_parameters
    held, said = (found.ledger.components("optimizer_step_2") for found in (traced, estimated))
    for component in (Component.WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE):
        assert held[component] == said[component]


@pytest.mark.parametrize("semantics", ["cuda", "cpu"])
def test_a_number_that_an_operator_reads_out_of_a_tensor_is_counted(semantics: Literal["cuda", "cpu"]) -> None:
    """LAMB hands bitsandbytes' kernel the norm of each parameter as a tensor."""
    pytest.importorskip("bitsandbytes")

    run = ("gpt2", *TINY, "optimizer=lamb")

    traced = memcalc.trace(*run, gpu="a100-40gb", steps=2, semantics=semantics)

    assert any("read values from the device" in note for note in traced.notes)
    held, said = (found.ledger.components("backward_2") for found in (traced, memcalc.estimate(*run)))
    assert held[Component.OPTIMIZER_STATE] == said[Component.OPTIMIZER_STATE]


class Halving(nn.Module):
    """Converts its own layer in forward, as quantizing code does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.to(torch.bfloat16)
        y: Tensor = self.layer(x.to(torch.bfloat16))
        return y.float()


def test_a_module_that_converts_itself_keeps_its_parameters() -> None:
    """512 x 512 elements: a MiB in fp32 before, half of it afterwards."""
    traced = memcalc.trace(Halving(), torch.zeros(4, 512), steps=1)

    assert traced.ledger.components("model")[Component.WEIGHTS] == 4 * 512 * 512
    assert traced.ledger.components("backward_1")[Component.WEIGHTS] == 2 * 512 * 512


class Copying(nn.Module):
    """Trains a copy of its layer, as PEFT does with modules that are to be saved whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False).requires_grad_(False)
        self.copies = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        if not self.copies:
            self.copies.append(copy.deepcopy(self.layer).requires_grad_())
        y: Tensor = self.copies[0](x) + self.layer(x)
        return y


def test_a_copy_of_a_layer_is_one_more_and_no_other() -> None:
    """A MiB each: the layer, its copy, the copy's gradient; products read them where they lie."""
    traced = memcalc.trace(Copying(), torch.zeros(4, 512), steps=1)

    made = [event for event in traced.events if event.kind is EventType.ALLOC and event.bytes == 4 * 512 * 512]
    assert [event.operator for event in made] == ["aten.empty_strided", "aten.clone", "aten.mm"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("qlora.block_size=64",), "finetune = qlora needs bitsandbytes' kernels"),
        (("optimizer=adam-8bit", "optimizer_options.paged=true"), "paged = true needs bitsandbytes' kernels"),
    ],
)
def test_what_only_kernels_can_do_is_refused(overrides: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        memcalc.trace("llama-3.2-1b", *TINY, *overrides)
