"""What people paste: a message alone, cut off, wrapped, quoted, or as loggers, launchers and web pages show it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from memcalc.api import oom
from memcalc.errors import InputError

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB of "
    "which 1.02 GiB is free. Process 1234 has 22.60 GiB memory in use. Of the allocated memory 20.11 GiB is allocated by "
    "PyTorch, and 2.01 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def wrapped(width: int, before: str = "", after: str = "") -> Callable[[str], str]:
    return lambda text: "\n".join(f"{before}{line}{after}" for line in textwrap.wrap(text, width))


def behind(before: str, after: str = "") -> Callable[[str], str]:
    return lambda text: f"{before}{text}{after}"


# The shape, and who is named as the speaker.
SHAPES: dict[str, tuple[Callable[[str], str], tuple[str, ...]]] = {
    "alone": (lambda text: text, ()),
    "without the exception's name": (lambda text: text.partition(": ")[2], ()),
    "wrapped": (wrapped(60), ()),
    "wrapped narrowly": (wrapped(40), ()),
    "broken within words": (lambda text: "\n".join(text[at : at + 80] for at in range(0, len(text), 80)), ()),
    "lines of DOS": (lambda text: wrapped(60)(text).replace("\n", "\r\n"), ()),
    "a logger's time": (behind("2026-01-02 03:04:05,678 - trainer - ERROR - "), ()),
    "times on wrapped lines": (wrapped(70, "2026-01-02 03:04:05 | "), ()),
    "GitHub Actions": (behind("Run\tStep\t2026-01-02T03:04:05.1234567Z "), ()),
    "torchrun": (behind("[rank3]: "), ("rank 3",)),
    "torchrun, wrapped": (wrapped(60, "[rank1]: "), ("rank 1",)),
    "DeepSpeed": (behind("worker-1: [rank7]: "), ("worker-1, rank 7",)),
    "mpirun": (behind("[1,3]<stderr>: "), ("rank 3",)),
    "srun": (behind("3: "), ("task 3",)),
    "Ray, in color": (behind("\x1b[36m(RayTrainWorker pid=12, ip=10.2.3.4)\x1b[0m "), ("process 12",)),
    "color within": (lambda text: "\x1b[31m\x1b[1m" + text.replace("CUDA", "\x1b[0mCUDA") + "\x1b[0m", ()),
    "Kubernetes' JSON": (behind('{"log":"', '\\n","stream":"stderr"}'), ()),
    "Docker Compose": (behind("train-1  | "), ()),
    "a quotation": (wrapped(60, "> "), ()),
    "Markdown": (behind("```\n", "\n```"), ()),
    "pytest": (behind("E       "), ()),
    "a box": (lambda text: "\n".join(f"│ {line:70} │" for line in textwrap.wrap(text, 70)), ()),
    "a question": (behind('Hi, I get this error: "', '" What should I do?'), ()),
    "a progress bar": (behind("  3%|▎         | 3/100 [00:12<06:40,  4.13s/it]"), ()),
    "a web page": (lambda text: text.replace(" ", "\u00a0"), ()),
    "a Python literal": (lambda text: f"    raise OutOfMemoryError({text.partition(': ')[2]!r})", ()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_message_is_read_in_whatever_shape_it_comes(shape: str, tmp_path: Path) -> None:
    change, speakers = SHAPES[shape]
    plain, pasted = tmp_path / "plain.log", tmp_path / "pasted.log"
    plain.write_text(MESSAGE)
    pasted.write_text(change(MESSAGE))

    expected, found = oom(plain).finding.report, oom(pasted).finding.report

    assert found.figures == expected.figures
    assert found.device == expected.device
    assert found.sources == speakers


@pytest.mark.parametrize(("letters", "figures"), [(300, 5), (150, 3), (110, 1)])
def test_a_message_that_is_cut_off_keeps_its_figures(letters: int, figures: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.log"
    path.write_text(MESSAGE[:letters])

    found = oom(path).finding.report.figures.by_name()

    assert sum(figure is not None for figure in found.values()) == figures


def test_a_message_without_any_figure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.log"
    path.write_text(MESSAGE[:66])

    with pytest.raises(InputError, match="no out-of-memory message"):
        oom(path)
