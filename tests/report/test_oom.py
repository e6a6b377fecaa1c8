"""The screens of `oom`: whole, at two widths, and what must hold on any of them."""

import io
import re
from collections.abc import Callable
from functools import cache

import pytest
from rich.console import Console

from memcalc.diagnosis.diagnosis import Diagnosis, diagnose
from memcalc.report.color_screen import ColorScreen
from memcalc.report.screen import Screen
from memcalc.report.screens.oom import draw_diagnosis
from memcalc.spec.loading import load
from memcalc.suggestions.run_overrides import written_out
from tests.records import pin_records

Golden = Callable[[str, str], None]

FRAGMENTED = """\
step 41: loss 2.31
Traceback (most recent call last):
  File "/venv/torch/autograd/__init__.py", line 200, in backward
    Variable._execution_engine.run_backward(
RuntimeError: CUDA out of memory. Tried to allocate 1.24 GiB (GPU 0; 15.78 GiB total capacity; 10.34 GiB already \
allocated; 435.50 MiB free; 14.21 GiB reserved in total by PyTorch)
"""
FULL = """\
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.63 GiB. GPU 0 has a total capacity of 79.11 \
GiB of which 1.61 GiB is free. Process 77 has 0.50 GiB memory in use. Including non-PyTorch memory, this process has \
77.00 GiB memory in use. Of the allocated memory 73.16 GiB is allocated by PyTorch, with 0.25 GiB allocated in private \
pools (e.g., CUDA Graphs), and 2.48 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is \
large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.63 GiB. GPU 1 has a total capacity of 79.11 \
GiB of which 1.61 GiB is free. Including non-PyTorch memory, this process has 0 bytes memory in use. Of the allocated \
memory 73.16 GiB is allocated by PyTorch, and 2.48 GiB is reserved by PyTorch but unallocated.
"""
COMPILED = """\
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.95G of 15.48G \
hbm. Exceeded hbm capacity by 6.47G.
"""
RUN = ("gpt2-large", ["b=8", "recipe=amp", "training.attention=eager", "training.zero_grad=zero"])
TOO_LARGE = ("llama-2-7b", ["b=4", "recipe=mixed-16", "data_parallel=8", "zero_stage=1", "hardware.gpu=h100-80gb"])


CASES = {
    "fragmented": (FRAGMENTED, None),
    "fragmented_with_config": (FRAGMENTED, RUN),
    "full": (FULL, None),
    "full_with_config": (FULL, TOO_LARGE),
    "compiled": (COMPILED, None),
}


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever test asks for a diagnosis first, it rests on the same records."""
    pin_records(monkeypatch)


@cache
def diagnosis_of(name: str) -> Diagnosis:
    """The diagnosis of a case, made when the first test asks for it."""
    text, run = CASES[name]
    return diagnose("error.log", io.BytesIO(text.encode()), None if run is None else written_out(load(*run)))


def screen(diagnosis: Diagnosis, width: int = 80, **options) -> str:
    file = io.StringIO()
    draw_diagnosis(Screen(file, width), diagnosis, options.get("unit", "GiB"))
    return file.getvalue()


# Long: changes of a run on eight GPUs are replayed for ten seconds; those of a run on one are quick.
SCREENS = [pytest.param(name, marks=pytest.mark.long if name == "full_with_config" else ()) for name in CASES]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", SCREENS)
def test_screens(name: str, width: int, golden: Golden) -> None:
    text = screen(diagnosis_of(name), width)

    golden(f"oom_{name}_{width}", text)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "None" not in text


@pytest.mark.parametrize("name", ["fragmented", "full"])
def test_the_parts_sum_to_the_capacity(name: str) -> None:
    text = screen(diagnosis_of(name), 120, unit="bytes")
    table = text[text.index("Memory at the failure") : text.index("Remedies")]
    parts = [int(size.replace(",", "")) for size in re.findall(r"^  [Apsxou.]  \D+([\d,]+)", table, re.MULTILINE)]
    capacity = re.search(r"capacity +([\d,]+)", table)

    assert capacity is not None
    assert sum(parts) == int(capacity[1].replace(",", ""))


def test_the_verdict_has_the_figures() -> None:
    assert "FRAGMENTATION: 3.87 GiB is cached but split" in screen(diagnosis_of("fragmented"), 200)
    assert "REAL NEED: 2.63 GiB requested, 1.61 GiB available: 1.02 GiB short." in screen(diagnosis_of("full"), 200)
    assert "LARGER THAN THE DEVICE: 21.95 GiB does not fit into 15.48 GiB" in screen(diagnosis_of("compiled"), 200)


@pytest.mark.parametrize("name", SCREENS)
def test_color_changes_no_letter(name: str) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard", highlight=False)
    draw_diagnosis(ColorScreen(console), diagnosis_of(name), "GiB")

    assert file.getvalue() != screen(diagnosis_of(name))
    assert re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()) == screen(diagnosis_of(name))
