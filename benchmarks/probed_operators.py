"""The operators that probe.py looks into, and the run of them on one device: `probed_operators.py cuda|cpu full|tiny`.

Prints a line of JSON for each operator, shape and direction: the most bytes that were alive at once and belong to no
tensor that came out.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from memcalc.errors import MemcalcError

Inputs = tuple[Tensor, ...]


class Probe(NamedTuple):
    """An operator and its inputs."""

    operator: str
    shape: str
    make: Callable[[torch.device], Inputs]
    run: Callable[..., Any]
    backward: bool = True


def probes(*, tiny: bool) -> Iterator[Probe]:
    """Every operator that a transformer's step spends memory in, over a few shapes; tiny ones for a CPU."""
    rows = ((8, 16), (3, 16)) if tiny else ((2048, 4096), (777, 768), (8192, 2048))
    for tokens, width in rows:
        for dtype in (torch.bfloat16, torch.float32):
            yield from _elementwise(tokens, width, dtype)
            yield from _products(tokens, width, dtype)
    for tokens, vocabulary in ((8, 32),) if tiny else ((2048, 50257), (4096, 128256)):
        yield from _vocabulary(tokens, vocabulary, width=16 if tiny else 1024)
    for batch, heads, length, size in ((1, 2, 16, 8),) if tiny else ((1, 12, 1024, 64), (2, 32, 2048, 128)):
        yield from _attention(batch, heads, length, size, tiny=tiny)
    yield from _choices(8 if tiny else 4096)
    yield from _updates(16 if tiny else 1 << 20)
    if not tiny:
        yield from _more_attention()
        yield from _losses(2048, 50257)
        yield from _losses(4096, 128256)
        yield from _experts(4096, 1024, 8)


def _tensor(device: torch.device, *shape: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
    return torch.zeros(shape, device=device, dtype=dtype, requires_grad=grad)


def _words(dtype: torch.dtype, *shape: int) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _elementwise(tokens: int, width: int, dtype: torch.dtype) -> Iterator[Probe]:
    shape = _words(dtype, tokens, width)

    def one(device: torch.device) -> Inputs:
        return (_tensor(device, tokens, width, dtype=dtype),)

    def normed(device: torch.device) -> Inputs:
        weight, bias = (_tensor(device, width, dtype=dtype) for _ in range(2))
        return (*one(device), weight, bias)

    yield Probe("layer_norm", shape, normed, lambda x, w, b: F.layer_norm(x, (width,), w, b))
    yield Probe("rms_norm", shape, normed, lambda x, w, _: F.rms_norm(x, (width,), w))
    yield Probe("gelu", shape, one, F.gelu)
    yield Probe("silu", shape, one, F.silu)
    yield Probe("dropout", shape, one, lambda x: F.dropout(x, 0.1))
    yield Probe("softmax", shape, one, lambda x: F.softmax(x, -1))
    yield Probe("sum to a column", shape, one, lambda x: x.sum(0))
    yield Probe("mean of the last dimension", shape, one, lambda x: x.mean(-1))
    yield Probe("cat", shape, one, lambda x: torch.cat((x, x)))


def _products(tokens: int, width: int, dtype: torch.dtype) -> Iterator[Probe]:
    def make(device: torch.device) -> Inputs:
        return (
            _tensor(device, tokens, width, dtype=dtype),
            _tensor(device, 4 * width, width, dtype=dtype),
            _tensor(device, 4 * width, dtype=dtype),
        )

    shape = _words(dtype, tokens, width, 4 * width)
    yield Probe("linear with bias", shape, make, F.linear)
    yield Probe("linear", shape, make, lambda x, w, _: F.linear(x, w))


def _vocabulary(tokens: int, vocabulary: int, width: int) -> Iterator[Probe]:
    def logits(device: torch.device) -> Inputs:
        return (_tensor(device, tokens, vocabulary, dtype=torch.float32), _ids(device, tokens, vocabulary))

    def table(device: torch.device) -> Inputs:
        return (_ids(device, tokens, vocabulary), _tensor(device, vocabulary, width, dtype=torch.bfloat16))

    yield Probe("cross_entropy", _words(torch.float32, tokens, vocabulary), logits, F.cross_entropy)
    yield Probe("log_softmax", _words(torch.float32, tokens, vocabulary), logits, lambda x, _: F.log_softmax(x, -1))
    yield Probe("embedding", _words(torch.bfloat16, tokens, vocabulary, width), table, F.embedding)


def _ids(device: torch.device, tokens: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (tokens,), device=device)


def _attention(batch: int, heads: int, length: int, size: int, *, tiny: bool) -> Iterator[Probe]:
    kernels = {"math": SDPBackend.MATH}
    if not tiny:
        kernels |= {"flash": SDPBackend.FLASH_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}
    for name, kernel in kernels.items():
        yield _kernel(name, kernel, Heads(batch, heads, length, size))


class Heads(NamedTuple):
    """Shapes of attention: keys and values may have fewer heads, values another width, and be laid out by tokens."""

    batch: int
    heads: int
    length: int
    size: int
    keys: int | None = None
    values: int | None = None
    by_tokens: bool = False
    dtype: torch.dtype = torch.bfloat16

    def words(self) -> str:
        """The shape, and its unusual properties."""
        keys = "" if self.keys is None else f", {self.keys} of keys"
        values = "" if self.values is None else f", values {self.values}"
        return _words(self.dtype, *self[:4]) + keys + values + (", by tokens" if self.by_tokens else "")

    def make(self, device: torch.device) -> Inputs:
        """Queries, keys and values, each of shape [b, heads, s, width]."""
        found = []
        for heads, width in (
            (self.heads, self.size),
            (self.keys or self.heads, self.size),
            (self.keys or self.heads, self.values or self.size),
        ):
            if self.by_tokens:
                whole = _tensor(device, self.batch, self.length, heads, width, dtype=self.dtype, grad=False)
                found.append(whole.transpose(1, 2).requires_grad_())
            else:
                found.append(_tensor(device, self.batch, heads, self.length, width, dtype=self.dtype))
        return tuple(found)


def _kernel(name: str, kernel: SDPBackend | None, heads: Heads) -> Probe:
    """Attention by one kernel; None: by whichever PyTorch takes."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = heads.keys is not None
        if kernel is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return Probe(f"attention, {name}", heads.words(), heads.make, run)


def _more_attention() -> Iterator[Probe]:
    """Kernels' rules by width of heads: shapes that models of today have, as they lie in one."""
    kernels: dict[str, SDPBackend | None] = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "default": None,
    }
    shapes = (
        Heads(2, 16, 2048, 64, by_tokens=True),
        Heads(2, 16, 2048, 96, by_tokens=True),
        Heads(2, 16, 2048, 128, by_tokens=True),
        Heads(2, 16, 2048, 192, by_tokens=True),
        Heads(2, 16, 2048, 256, by_tokens=True),
        Heads(1, 16, 1777, 80, by_tokens=True),
        Heads(2, 32, 2048, 128, keys=8, by_tokens=True),
        Heads(2, 16, 2048, 192, values=128, by_tokens=True),
        Heads(1, 8, 1024, 256, by_tokens=True, dtype=torch.float32),
        Heads(2, 16, 1024, 64, by_tokens=True, dtype=torch.float16),
    )
    for heads in shapes:
        for name, kernel in kernels.items():
            yield _kernel(name, kernel, heads)


def _losses(tokens: int, vocabulary: int) -> Iterator[Probe]:
    """The loss over logits in 16 bits, and the norm of fused kernels."""

    def logits(device: torch.device) -> Inputs:
        return (_tensor(device, tokens, vocabulary, dtype=torch.bfloat16), _ids(device, tokens, vocabulary))

    shape = _words(torch.bfloat16, tokens, vocabulary)
    yield Probe("cross_entropy", shape, logits, F.cross_entropy)
    yield Probe("cross_entropy, cast to fp32", shape, logits, lambda x, y: F.cross_entropy(x.float(), y))


def _experts(tokens: int, width: int, experts: int) -> Iterator[Probe]:
    """Products grouped by expert (torch._grouped_mm), and what sorts tokens to them."""
    if not hasattr(torch, "_grouped_mm"):
        return
    each = tokens // experts

    def make(device: torch.device) -> Inputs:
        ends = torch.arange(each, tokens + 1, each, dtype=torch.int32, device=device)
        rows = _tensor(device, tokens, width, dtype=torch.bfloat16)
        return rows, _tensor(device, experts, width, 4 * width, dtype=torch.bfloat16), ends

    product = torch._grouped_mm  # noqa: SLF001 -- no public name, in torch 2.11
    yield Probe("grouped_mm", _words(torch.bfloat16, tokens, width, experts), make, product)


def _choices(tokens: int) -> Iterator[Probe]:
    def scores(device: torch.device) -> Inputs:
        return (_tensor(device, tokens, 64, dtype=torch.float32),)

    shape = _words(torch.float32, tokens, 64)
    yield Probe("topk 2 of 64", shape, scores, lambda x: x.topk(2)[0])
    yield Probe("sort of rows", shape, scores, lambda x: x.sort(-1)[0])
    yield Probe("cumsum", shape, scores, lambda x: x.cumsum(0))


def _updates(size: int) -> Iterator[Probe]:
    def parameters(device: torch.device) -> Inputs:
        found = tuple(_tensor(device, size, dtype=torch.float32) for _ in range(4))
        for parameter in found:
            parameter.grad = torch.zeros_like(parameter)
        return found

    for name in ("foreach", "fused"):

        def step(*given: Tensor, name: str = name) -> None:
            torch.optim.AdamW(given, **{name: True}).step()  # type: ignore[arg-type] # one of two switches

        yield Probe(f"AdamW, {name}", _words(torch.float32, 4, size), parameters, step, backward=False)


def hidden(events: Any) -> int:
    """The most bytes alive at once that no tensor outside of operators has."""
    from memcalc.events.event import EventType
    from memcalc.ledger.component import Component

    alive: dict[int, int] = {}
    level = highest = 0
    for event in events:
        if event.kind is EventType.ALLOC and (event.dtype == "uint8" or event.component is Component.LIBRARY_WORKSPACE):
            alive[event.storage] = event.bytes
            level += event.bytes
            highest = max(highest, level)
        elif event.kind is EventType.FREE:
            level -= alive.pop(event.storage, 0)
    return highest


def probed(probe: Probe, device: torch.device, recording: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """The lines of one operator: forward and backward, each recorded by itself."""
    inputs = probe.make(device)
    with recording() as recorder:
        recorder.begin_phase("forward_1")
        output = probe.run(*inputs)
    node = getattr(output, "grad_fn", None)  # tells which kernel of attention it was
    yield _line(probe, device, "forward", recorder) | {"node": None if node is None else node.name()}
    if not probe.backward:
        return
    gradient = torch.zeros_like(output)
    with recording() as recorder:
        recorder.begin_phase("backward_1")
        output.backward(gradient)
    yield _line(probe, device, "backward", recorder)


def _line(probe: Probe, device: torch.device, direction: str, recorder: Any) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type
    return {
        "operator": probe.operator,
        "shape": probe.shape,
        "direction": direction,
        "hidden": hidden(recorder.events()),
        "device": name,
        "torch": torch.__version__,
    }


@contextmanager
def on_cuda() -> Iterator[Any]:
    """Records by the allocator's own history, restarted."""
    from memcalc.recorder.history import HistoryRecorder

    torch.cuda.memory._record_memory_history(None)  # noqa: SLF001 -- no public name
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 -- so that each matmul allocates its own
    with HistoryRecorder(torch.device("cuda", 0)) as recorder:
        yield recorder


def fake_lines(card: str, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """The same lines by the rules of a GPU, on fake tensors. A kernel that they do not know has no line."""
    for probe in probes(tiny=tiny):
        # A kernel that PyTorch has not for this shape, or an operator without a rule: the device says what it says.
        with suppress(RuntimeError, MemcalcError):
            yield from _by_rules(probe, card)


def _by_rules(probe: Probe, card: str) -> Iterator[dict[str, Any]]:
    from memcalc.spec.hardware.gpus import find_gpu
    from memcalc.tracing.session import fake_cuda

    with fake_cuda(find_gpu(card)) as session:
        inputs = probe.make(session.device)
        session.recorder.begin_phase("forward_1")
        before = len(session.recorder.events())
        output = probe.run(*inputs)
        yield _line(probe, torch.device("cpu"), "forward", Part(session.recorder.events()[before:]))
        if probe.backward:
            gradient = torch.zeros_like(output)
            session.recorder.begin_phase("backward_1")
            before = len(session.recorder.events())
            output.backward(gradient)
            yield _line(probe, torch.device("cpu"), "backward", Part(session.recorder.events()[before:]))


class Part(NamedTuple):
    """Some events, as a recorder has them."""

    found: Any

    def events(self) -> Any:
        """Those."""
        return self.found


def main(kind: str, size: str) -> None:
    """Probe this process's device."""
    tiny = size == "tiny"
    if kind == "cpu":
        for probe in probes(tiny=tiny):
            for line in _on_cpu(probe):
                print(json.dumps(line), flush=True)
        return
    device = torch.device("cuda", 0)
    for probe in probes(tiny=tiny):
        try:
            for line in probed(probe, device, on_cuda):
                print(json.dumps(line), flush=True)
        except RuntimeError as error:
            print(f"{probe.operator} {probe.shape}: {str(error).splitlines()[0]}", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()


def _on_cpu(probe: Probe) -> Iterator[dict[str, Any]]:
    """By the profiler: what was allocated at the peak in addition to the outputs."""
    device = torch.device("cpu")
    inputs = probe.make(device)
    found: list[Any] = []
    for direction in ("forward", "backward") if probe.backward else ("forward",):
        gradient = torch.zeros_like(found[0]) if found else None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
            found.append(probe.run(*inputs) if gradient is None else found[0].backward(gradient))
        level = highest = 0
        for event in watched.profiler.kineto_results.events():
            if event.name() == "[memory]":
                level += event.nbytes()
                highest = max(highest, level)
        yield {
            "operator": probe.operator,
            "shape": probe.shape,
            "direction": direction,
            "hidden": highest - max(level, 0),
            "device": "cpu",
            "torch": torch.__version__,
        }


if __name__ == "__main__":
    main(*sys.argv[1:])
