"""Operators run by meta kernels return what PyTorch's fake tensors return, wherever a step uses them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor

import memcalc
from memcalc.tracing import output_cache
from memcalc.tracing.meta_kernels import of_meta_kernel
from memcalc.tracing.operator_outputs import OperatorOutput, OperatorOutputs

of_output = output_cache._of_output  # PyTorch's, before it is watched

SMALL = ("num_layers=1", "vocab_size=640", "sequence_length=128", "micro_batch_size=2")


class Compared:
    """Wrapper of meta kernels that compares their results with those of PyTorch's fake tensors."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.told: OperatorOutputs | None = None

    def kernel(self, operator: Any, args: Any, kwargs: Any, given: Sequence[FakeTensor]) -> OperatorOutputs | None:
        self.told = of_meta_kernel(operator, args, kwargs, given)
        return None

    def output(self, operator: Any, given: list[FakeTensor], output: Any) -> OperatorOutputs | None:
        theirs, ours = of_output(operator, given, output), self.told
        if ours is not None:
            self.asked[str(operator)] += 1
            assert theirs is not None, operator
            assert (ours.container, ours.device) == (theirs.container, theirs.device), operator
            assert list(map(seen, ours.results)) == list(map(seen, theirs.results)), operator
        return theirs


def seen(made: OperatorOutput | int | None) -> Any:
    """An output without the strides of axes of one element, which say nothing."""
    if not isinstance(made, OperatorOutput):
        return made
    strides = tuple(stride for size, stride in zip(made.shape, made.stride, strict=True) if size != 1)
    return made._replace(stride=strides)


def compared(monkeypatch: pytest.MonkeyPatch, config: str, *settings: str, semantics: str = "cuda") -> Counter[str]:
    """How often each operator was compared in a run."""
    comparison = Compared()
    monkeypatch.setattr(output_cache, "of_meta_kernel", comparison.kernel)
    monkeypatch.setattr(output_cache, "_of_output", comparison.output)
    memcalc.trace(memcalc.load(config, *SMALL, *settings), semantics=semantics)
    return comparison.asked


def test_a_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("hidden_size=64", "num_attention_heads=4", "num_key_value_heads=2", "intermediate_size=128")
    asked = compared(monkeypatch, "llama-3-8b.yaml", *small)

    assert sum(asked.values()) > 100
    assert {"memcalc._fused_rms_norm.default", "aten.mul.Tensor", "aten._foreach_lerp_.Scalar"} <= asked.keys()


@pytest.mark.long
@pytest.mark.parametrize("semantics", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("gpt2.yaml", ()),
        ("gpt2.yaml", ("attention=eager", "dropout=0.1", "gradient_clipping=1.0", "optimizer=adafactor")),
        ("gpt2.yaml", ("attention=memory-efficient", "recipe=amp", "recompute=full", "optimizer=sgd")),
        ("llama-3.2-1b.yaml", ("recipe=amp", "optimizer=muon")),
        (
            "llama-3.2-1b.yaml",
            ("recipe=fp32", "attention=eager", "optimizer=adagrad", "optimizer_implementation=for-loop"),
        ),
        ("mixtral-8x7b.yaml", ("hidden_size=256", "intermediate_size=512")),
        ("gemma-2-2b.yaml", ("gradient_accumulation_steps=2",)),
        ("codegen-350m.yaml", ()),
    ],
)
def test_other_kinds(monkeypatch: pytest.MonkeyPatch, config: str, settings: tuple[str, ...], semantics: str) -> None:
    assert sum(compared(monkeypatch, config, *settings, semantics=semantics).values()) > 80


CODE = """
import sys, memcalc
from memcalc.step.skip_compiler import without_compiler
without_compiler()
memcalc.trace(memcalc.load("llama-3.2-1b.yaml", "num_layers=1", "vocab_size=640"))
loaded = [name for name in ("sympy", "torch.distributed.tensor", "torch._dynamo.utils") if name in sys.modules]
assert not loaded, loaded
sharded = ("data_parallel=8", "zero_stage=3", "engine=fsdp2")
memcalc.trace(memcalc.load("llama-3.2-1b.yaml", "num_layers=1", "vocab_size=640", *sharded))
"""


@pytest.mark.long
def test_a_plain_step_loads_nothing_for_symbols() -> None:
    """A second of a command's time; and what does without the compiler can share parameters out."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
