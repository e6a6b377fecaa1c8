"""One out-of-memory report with every figure of its message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memcalc.diagnosis.sizes import Printed

Framework = Literal["pytorch", "paddlepaddle", "tensorflow", "xla", "driver"]

LABELS: dict[Framework, str] = {
    "pytorch": "PyTorch",
    "paddlepaddle": "PaddlePaddle",
    "tensorflow": "TensorFlow",
    "xla": "JAX (XLA)",
    "driver": "the driver",
}


class Holder(NamedTuple):
    """A process in a message, with its memory on the device."""

    pid: int
    bytes: Printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one message; None if missing.

    Args:
        asked: of the device (PyTorch's native allocator: a whole segment), or of the pool.
        capacity: of the device.
        free: on the device.
        allocated: in live tensors (or blocks) of this process.
        reserved: that this process's allocator holds of the device, `allocated` included.
        private: cached in private pools (CUDA graphs), which only they can use.
        allowed: the most that the allocator may hold.
        process: of the device that this process holds in all, as the driver counts it.
        elsewhere: that this process's framework knows of outside its allocator (MPS: "other allocations").
        peak: highest allocated so far.
        exceeded: by how much a program is too large (TPU).
        buffers: what a compiled program is made of, by name (XLA).
    """

    asked: Printed | None = None
    capacity: Printed | None = None
    free: Printed | None = None
    allocated: Printed | None = None
    reserved: Printed | None = None
    private: Printed | None = None
    allowed: Printed | None = None
    process: Printed | None = None
    elsewhere: Printed | None = None
    peak: Printed | None = None
    exceeded: Printed | None = None
    buffers: tuple[tuple[str, Printed], ...] = ()

    def by_name(self) -> dict[str, Printed]:
        """The single figures that the message gave."""
        names = (name for name in self.__slots__ if name != "buffers")
        found = ((name, getattr(self, name)) for name in names)
        return {name: figure for name, figure in found if figure is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One out-of-memory report, however often a log repeats it.

    Args:
        framework: whose message it is.
        wording: which of its messages, with the releases that print it.
        kind: of device: "cuda", "hip", "xpu", "npu", "mps", "gpu", "tpu", "cpu".
        device: its number.
        figures: all that it says.
        holders: other processes on the device, as listed in the message.
        tensor: shape and type that did not fit, e.g. "float [64, 2016, 9, 9]".
        operator: which asked for it.
        setting: what the message itself advises, e.g. "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".
        fatal: False where the text alone says that the program went on.
        line: where the log has it first.
        speakers: the ranks, processes or hosts that said so, as far as the log tells.
        count: how often it stands there.
        phase: of a training step, as far as the traceback tells; "" otherwise.
    """

    framework: Framework
    wording: str
    kind: str = "gpu"
    device: int | None = None
    figures: Figures = field(default_factory=Figures)
    holders: tuple[Holder, ...] = ()
    tensor: str = ""
    operator: str = ""
    setting: str = ""
    fatal: bool = True
    line: int = 0
    speakers: tuple[str, ...] = ()
    count: int = 1
    phase: str = ""

    @property
    def content(self) -> tuple[object, ...]:
        """What makes two reports the same one."""
        return (self.framework, self.wording, self.kind, self.device, self.figures, self.holders, self.tensor)
