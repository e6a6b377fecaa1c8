"""A process that compiles nothing does not load PyTorch's compiler, until something asks for more than a decorator."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, torch
from memcalc.step.skip_compiler import without_compiler

def loaded():
    return "torch._dynamo.convert_frame" in sys.modules

assert not loaded()
without_compiler()
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.AdamW([weight])
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
marked = torch._dynamo.disable(len, recursive=False)
assert marked([1, 2]) == 2
assert torch._dynamo.disable(recursive=False)(len) is len
assert not loaded()
assert torch._dynamo.config.suppress_errors is False
from torch._dynamo.source import ConstantSource
assert not loaded()
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
assert not loaded()
assert torch._dynamo.trace_rules.__name__ == "torch._dynamo.trace_rules"
assert loaded()
assert torch._dynamo.reset.__module__ == "torch._dynamo"
import torch._dynamo
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.disable(len) is not len
without_compiler()
assert torch._dynamo.disable(len) is not len
"""


@pytest.mark.long
def test_the_compiler_is_loaded_only_when_it_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


ALONE = """
from memcalc.step.skip_compiler import without_compiler, without_meta_kernels

without_meta_kernels()
import torch
without_compiler()
assert torch._dynamo.reset.__module__ == "torch._dynamo"
"""


@pytest.mark.long
def test_the_compiler_loads_where_meta_kernels_do_not() -> None:
    """As bitsandbytes asks for it: one of its modules and torch._prims, which meta kernels import, are a circle."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
