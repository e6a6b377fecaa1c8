"""A result built by hand, so that the tests of the reports depend on no estimator."""

from dataclasses import replace

import pytest

from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger, Rows
from memcalc.ledger.result import DeviceMemory, OutsideMemory, RankResult, Result, Textbook, known
from memcalc.ledger.row import Row
from memcalc.ledger.row_drafts import phase_names
from memcalc.ledger.verdict import Answer, Interval, RecordedErrors, Verdict
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.limits import Limit
from memcalc.spec.loading import load

PHASES = phase_names(2)
GIB = 2**30

# b=2, s=1024, l=4, d=2048: 2·b·s·d = 2 · 2 · 1024 · 2048 = 8,388,608 bytes = 8 MiB, times four layers.
TINY = {
    "name": "tiny",
    "model": {"l": 4, "d": 2048, "h": 16, "V": 32000, "max_position_embeddings": 1024},
    "training": {"b": 2, "s": 1024, "attention": "eager"},
}


def rows() -> list[Row]:
    starts = ("backward", "optimizer_step", "zero_grad_2")
    trained = tuple(phase for phase in PHASES if phase.startswith(starts))
    saved = ("forward_1", "loss_1", "backward_1", "forward_2", "loss_2", "backward_2")
    stepped = PHASES[PHASES.index("optimizer_step_1") :]
    paper = "arXiv 2205.05198, section 4.1"
    return [
        Row(
            Component.WEIGHTS, "embed_tokens", "weight", (32000, 2048), "bf16", 1, 131_072_000, PHASES, "2·V·d", "ZeRO"
        ),
        Row(Component.WEIGHTS, "layers.*.mlp", "weight", (2048, 2048), "bf16", 4, 33_554_432, PHASES, "2·d²", "ZeRO"),
        Row(Component.OPTIMIZER_STATE, "all", "exp_avg", (), "fp32", 1, 6 * GIB, stepped, "4·P", "AdamW"),
        Row(Component.GRADIENTS, "all", "grad", (), "bf16", 1, 3 * GIB, trained, "2·P", "ZeRO"),
        Row(
            Component.ACTIVATIONS,
            "layers.*.norm",
            "input",
            (2, 1024, 2048),
            "bf16",
            4,
            33_554_432,
            saved,
            "2·b·s·d",
            paper,
        ),
    ]


@pytest.fixture
def result() -> Result:
    """No card named."""
    ledger = Ledger([Rows(rows())], PHASES)
    headline = RankResult({"pipeline_stage": 0}, ledger, known(DeviceMemory(None, None, OutsideMemory(0, 0, 0))))
    return Result(
        source="estimate",
        device=None,
        spec=load(TINY),
        parameters=267_000_000,
        trainable_parameters=267_000_000,
        buffer_elements=0,
        textbook=Textbook(266_973_184, 5_339_463_680, 771_751_936, 20),
        ranks=(headline,),
        confidence="formula",
        gpu=None,
        limits=tuple(Limit(what, holds_memory=False) for what in ("fragmentation", "kernels that PyTorch compiles")),
        notes=("dropout = 0: attention saves no mask",),
    )


def with_card(result: Result, name: str) -> Result:
    """The same on a GPU: a tenth more reserved, half a GiB of context."""
    reserved = result.ledger.peak_bytes * 11 // 10
    outside = OutsideMemory(reserved - result.ledger.peak_bytes, GIB // 2, 0)
    device, usable = reserved + outside.device_context, find_gpu(name).usable_bytes
    headline = replace(result.headline, memory=known(DeviceMemory(reserved, device, outside)))
    # 1 % on both sides, by thirty recorded runs.
    errors = RecordedErrors("one GPU", 30, 0.001, -0.02, -0.01, 0.01, replayed=True)
    interval = Interval(device - reserved // 100, device + reserved // 100, errors)
    answer: Answer = "fits" if interval.high_bytes <= usable else "does-not-fit"
    verdict = Verdict(answer, device, device, usable, interval, expected=answer == "fits")
    return replace(result, ranks=(headline,), gpu=find_gpu(name), judgement=verdict)


@pytest.fixture
def fitting(result: Result) -> Result:
    """Return an estimate on a GPU that the run fits."""
    return with_card(result, "h100-80gb")


@pytest.fixture
def too_large(result: Result) -> Result:
    """Return an estimate on the smallest GPU, which has less memory than the weights need."""
    big = Row(Component.MASTER_WEIGHTS, "all", "master", (), "fp32", 1, 12 * GIB, PHASES, "4·P", "ZeRO")
    ledger = Ledger([Rows([*rows(), big])], PHASES)
    return with_card(replace(result, ranks=(replace(result.headline, ledger=ledger),)), "t4")


@pytest.fixture
def two_stages(fitting: Result) -> Result:
    """Two pipeline stages; the first needs more."""
    small = Ledger([Rows(row for row in rows() if row.component is not Component.ACTIVATIONS)], PHASES)
    second = replace(fitting.headline, rank={"pipeline_stage": 1}, ledger=small)
    return replace(fitting, ranks=(fitting.headline, second))
