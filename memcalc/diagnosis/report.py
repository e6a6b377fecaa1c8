"""One out-of-memory report with every figure of its message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memcalc.diagnosis.sizes import PrintedSize

Framework = Literal["pytorch", "paddlepaddle", "tensorflow", "xla", "driver"]

LABELS: dict[Framework, str] = {
    "pytorch": "PyTorch",
    "paddlepaddle": "PaddlePaddle",
    "tensorflow": "TensorFlow",
    "xla": "JAX (XLA)",
    "driver": "the driver",
}


class ProcessMemory(NamedTuple):
    """A process in a message, with its memory on the device."""

    pid: int
    bytes: PrintedSize


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFigures:
    """The figures of one message; None if missing."""

    # bytes requested from the device (PyTorch's native allocator: a whole segment), or from the pool
    asked: PrintedSize | None = None
    capacity: PrintedSize | None = None  # of the device
    free: PrintedSize | None = None  # on the device
    allocated: PrintedSize | None = None  # in live tensors (or blocks) of this process
    reserved: PrintedSize | None = None  # by this process's allocator, `allocated` included
    private: PrintedSize | None = None  # cached in private pools (CUDA graphs), which only they can use
    allowed: PrintedSize | None = None  # maximum that the allocator may reserve
    process: PrintedSize | None = None  # total device memory of this process, according to the driver
    # memory that the framework knows of outside its allocator (MPS: "other allocations")
    elsewhere: PrintedSize | None = None
    peak: PrintedSize | None = None  # peak allocated so far
    exceeded: PrintedSize | None = None  # by how much a program is too large (TPU)
    buffers: tuple[tuple[str, PrintedSize], ...] = ()  # parts of a compiled program, by name (XLA)

    def by_name(self) -> dict[str, PrintedSize]:
        """Return the individual figures in the message."""
        names = (name for name in self.__slots__ if name != "buffers")
        found = ((name, getattr(self, name)) for name in names)
        return {name: figure for name, figure in found if figure is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryReport:
    """One out-of-memory report, however often a log repeats it."""

    framework: Framework  # the framework that wrote the message
    wording: str  # the message format, with the versions that print it
    device_type: str = "gpu"  # "cuda", "hip", "xpu", "npu", "mps", "gpu", "tpu", "cpu"
    device: int | None = None  # index of the device
    figures: MessageFigures = field(default_factory=MessageFigures)  # all figures of the message
    holders: tuple[ProcessMemory, ...] = ()  # other processes on the device, as listed in the message
    tensor: str = ""  # shape and type that did not fit, e.g. "float [64, 2016, 9, 9]".
    operator: str = ""  # the operator that requested it
    # the setting that the message recommends, e.g. "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".
    setting: str = ""
    fatal: bool = True  # False if the text itself reports that the program continued
    line: int = 0  # line number of its first occurrence
    sources: tuple[str, ...] = ()  # the ranks, processes or hosts that logged it, if known
    count: int = 1  # number of occurrences
    phase: str = ""  # of a training step, from the traceback; "" if unknown

    @property
    def content(self) -> tuple[object, ...]:
        """The fields that identify equal reports."""
        return (self.framework, self.wording, self.device_type, self.device, self.figures, self.holders, self.tensor)
