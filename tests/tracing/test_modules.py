"""Somebody's own module, traced: as it runs, and without touching it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memcalc
from memcalc.errors import InputError
from memcalc.events import EventType
from memcalc.ledger.component import Component
from memcalc.recorder.observer import RecordingObserver
from memcalc.step.module_run import ModuleRun, ModuleStep, default_loss
from memcalc.tracing.session import fake_cpu, real_cpu


def block(*shape: int, item: int = 4) -> int:
    """The bytes of a tensor, rounded up to blocks of 512."""
    size = item
    for extent in shape:
        size *= extent
    return -(-size // 512) * 512


class Tied(nn.Module):
    """An embedding that is the head, too, a frozen part, a buffer, and a list among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: list[Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        """The sum of what the tokens of each list become."""
        x = sum((self.embedding(each) for each in tokens), torch.tensor(0.0, device=tokens[0].device))
        logits = self.head(self.norm(self.frozen(x) * scale))
        return {"logits": logits, "loss": logits.logsumexp(-1).mean()}


def test_a_linear_layer_and_adam_hold_what_an_a100_printed() -> None:
    """Linear(256, 250), batch 100: the weights, twice as much for Adam's moments, gradients, and the input."""
    model = nn.Linear(256, 250)
    traced = memcalc.trace(model, torch.randn(100, 256), optimizer=torch.optim.Adam, steps=2, gpu="a100-40gb")
    weights = block(250, 256) + block(250)
    workspace = (2 * 4096 + 8 * 16) * 2**10  # cuBLAS's, of each of two threads

    held = traced.ledger.components("optimizer_step_2")
    assert held[Component.WEIGHTS] == 250 * 256 * 4 + 250 * 4
    assert held[Component.OPTIMIZER_STATE] == 2 * held[Component.WEIGHTS]
    assert held[Component.GRADIENTS] == held[Component.WEIGHTS]
    assert held[Component.INPUTS] == 100 * 256 * 4
    assert held[Component.LIBRARY_WORKSPACE] == 2 * workspace
    assert traced.replay is not None
    assert traced.replay.allocated[-1] == 4 * weights + block(100, 256) + 2 * workspace
    assert traced.fits is True
    assert traced.recording.trainable == 250 * 256 + 250


def test_the_module_stays_as_it_is() -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memcalc.trace(model, ([torch.zeros(8, dtype=torch.long)],), optimizer=torch.optim.AdamW, steps=1)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" and p.grad is None for p in model.parameters())
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("zero_grad", ["set_to_none", "zero"])
@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam, torch.optim.SGD])
def test_fake_and_real_cpu_record_the_same_events(zero_grad: Any, optimizer: Any) -> None:
    tokens = [torch.randint(64, (8,)), torch.randint(64, (8,))]
    step = ModuleStep(
        Tied(),
        {"tokens": tokens, "scale": 2.0},
        optimizer=optimizer,
        zero_grad=zero_grad,
        gradient_accumulation_steps=2,
    )

    def events(session: Any) -> list[Any]:
        with session() as device:
            run = ModuleRun(step, device.device)
            run.execute(2, RecordingObserver(run, device.recorder))
            return [event._replace(time_us=None) for event in device.recorder.events()]

    real = events(real_cpu)
    assert events(fake_cpu) == real
    assert len(real) > 50


def test_a_module_on_the_meta_device_is_as_good() -> None:
    def peak(device: str) -> int:
        with torch.device(device):
            model, x = nn.Linear(64, 64), torch.zeros(8, 64)
        return memcalc.trace(model, x, steps=1).ledger.peak_bytes

    assert peak("meta") == peak("cpu")


def test_autocast_keeps_casts_of_the_weights() -> None:
    """bf16 copies of weight and bias join the input's cast and the output as activations."""
    model, x = nn.Linear(64, 64), torch.zeros(8, 64)
    traced = memcalc.trace(model, x, steps=1, autocast=torch.bfloat16, loss=lambda y: y.float().sum())
    casts = [event for event in traced.events if event.kind is EventType.ALLOC and event.dtype == "bf16"]

    assert {event.shape for event in casts} >= {(64, 64), (64,), (8, 64)}


def test_phases_are_those_of_every_step() -> None:
    phases = [
        e.phase for e in memcalc.trace(nn.Linear(4, 4), torch.zeros(2, 4), steps=2).events if e.kind is EventType.PHASE
    ]

    assert phases == ["model", "input"] + [
        f"{phase}_{step}" for step in (1, 2) for phase in ("zero_grad", "forward", "loss", "backward")
    ]


def test_the_loss_that_an_output_has_or_its_sum() -> None:
    one = torch.ones(())

    assert default_loss({"loss": one, "logits": torch.ones(3)}) is one
    assert default_loss(one) is one
    assert default_loss((torch.ones(2, dtype=torch.long), torch.ones(3))) == 3
    with pytest.raises(InputError, match="no floating-point tensor"):
        default_loss(torch.ones(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("model", "arguments", "options", "words"),
    [
        (nn.Linear(4, 4).requires_grad_(requires_grad=False), (torch.zeros(2, 4),), {}, "nothing that is trained"),
        (nn.LazyLinear(4), (torch.zeros(2, 4),), {}, "weight has no shape"),
        (nn.Linear(4, 4), (), {}, "0 inputs"),
        (nn.Linear(4, 4), (torch.zeros(2, 4),), {"device": "null"}, "device = 'null'"),
        (nn.Linear(4, 4), (torch.zeros(2, 4),), {"semantics": "tpu"}, "semantics = 'tpu'"),
        ("gpt2", (), {"optimizer": torch.optim.SGD}, "a type is not a value of a field"),
    ],
)
def test_what_cannot_be_traced_is_said(model: Any, arguments: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        memcalc.trace(model, *arguments, **options)


def test_a_module_that_cannot_be_copied_is_said() -> None:
    model = nn.Linear(4, 4)
    model.computed = model.weight * 2

    with pytest.raises(InputError, match="cannot be copied"):
        memcalc.trace(model, torch.zeros(2, 4))


def test_lora_by_peft_trains_its_adapters_alone() -> None:
    """Two adapters of rank 8 on a 64 x 64 layer: 8 x 64 and 64 x 8 elements, their gradients, and nothing else's."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["0"]))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    traced = memcalc.trace(adapted, torch.zeros(4, 64), optimizer=torch.optim.AdamW, steps=1)

    assert traced.recording.trainable == sum(p.numel() for p in trained) == 2 * 8 * 64
    held = traced.ledger.components("optimizer_step_1")
    assert held[Component.GRADIENTS] == 4 * 2 * 8 * 64
    assert held[Component.OPTIMIZER_STATE] == 2 * held[Component.GRADIENTS]
