"""Out-of-memory errors of drivers and libraries: a code without figures."""

from __future__ import annotations

import re

from memcalc.diagnosis.parsers.cursor import Cursor
from memcalc.diagnosis.report import OutOfMemoryReport

HEADS: tuple[tuple[str, str], ...] = (
    ("runtime", r"(?:CUDA|HIP)(?:driver)?error(?:\(2\),|:)outofmemory|cudaruntimeerr(?:or)?\(2\):outofmemory"),
    ("library", r"(?:CUBLAS|HIPBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_STATUS_ALLOC_FAILED"),
)


def parse(name: str, head: re.Match[str], _: Cursor) -> OutOfMemoryReport | None:
    """Return the report of the message at this head."""
    kind = "hip" if head[0].startswith("HIP") else "cuda"
    if name == "library":
        library = {"CUBLAS": "cuBLAS", "HIPBLAS": "hipBLAS", "CUDNN": "cuDNN"}
        word = head[0].partition("_")[0]
        return OutOfMemoryReport(
            framework="driver", wording=f"{library.get(word, word)} could not allocate", device_type=kind
        )
    return OutOfMemoryReport(framework="driver", wording="out of memory, without figures", device_type=kind)
