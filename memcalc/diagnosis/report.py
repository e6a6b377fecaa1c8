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
    """The figures of one message; None if missing.

    Args:
        asked: bytes requested from the device (PyTorch's native allocator: a whole segment), or from the pool.
        capacity: of the device.
        free: on the device.
        allocated: in live tensors (or blocks) of this process.
        reserved: by this process's allocator, `allocated` included.
        private: cached in private pools (CUDA graphs), which only they can use.
        allowed: maximum that the allocator may reserve.
        process: total device memory of this process, according to the driver.
        elsewhere: memory that the framework knows of outside its allocator (MPS: "other allocations").
        peak: peak allocated so far.
        exceeded: by how much a program is too large (TPU).
        buffers: parts of a compiled program, by name (XLA).
    """

    asked: PrintedSize | None = None
    capacity: PrintedSize | None = None
    free: PrintedSize | None = None
    allocated: PrintedSize | None = None
    reserved: PrintedSize | None = None
    private: PrintedSize | None = None
    allowed: PrintedSize | None = None
    process: PrintedSize | None = None
    elsewhere: PrintedSize | None = None
    peak: PrintedSize | None = None
    exceeded: PrintedSize | None = None
    buffers: tuple[tuple[str, PrintedSize], ...] = ()

    def by_name(self) -> dict[str, PrintedSize]:
        """Return the individual figures in the message."""
        names = (name for name in self.__slots__ if name != "buffers")
        found = ((name, getattr(self, name)) for name in names)
        return {name: figure for name, figure in found if figure is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryReport:
    """One out-of-memory report, however often a log repeats it.

    Args:
        framework: the framework that wrote the message.
        wording: the message format, with the versions that print it.
        device_type: "cuda", "hip", "xpu", "npu", "mps", "gpu", "tpu", "cpu".
        device: index of the device.
        figures: all figures of the message.
        holders: other processes on the device, as listed in the message.
        tensor: shape and type that did not fit, e.g. "float [64, 2016, 9, 9]".
        operator: the operator that requested it.
        setting: the setting that the message recommends, e.g. "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True".
        fatal: False if the text itself reports that the program continued.
        line: line number of its first occurrence.
        sources: the ranks, processes or hosts that logged it, if known.
        count: number of occurrences.
        phase: of a training step, from the traceback; "" if unknown.
    """

    framework: Framework
    wording: str
    device_type: str = "gpu"
    device: int | None = None
    figures: MessageFigures = field(default_factory=MessageFigures)
    holders: tuple[ProcessMemory, ...] = ()
    tensor: str = ""
    operator: str = ""
    setting: str = ""
    fatal: bool = True
    line: int = 0
    sources: tuple[str, ...] = ()
    count: int = 1
    phase: str = ""

    @property
    def content(self) -> tuple[object, ...]:
        """The fields that identify equal reports."""
        return (self.framework, self.wording, self.device_type, self.device, self.figures, self.holders, self.tensor)
