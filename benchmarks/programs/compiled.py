"""Programs that compile their models: an own loop in the manner of nanoGPT, and transformers' Trainer.

They are drawn as those of `loop` and `trainer` are, with the one line or field that compiles. memcalc sizes a step
without torch.compile, so `benchmarks.programs.compare` shows how far the eager figure is an upper bound.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.programs.environments import HF5
from benchmarks.programs.loop import draw_program as draw_loop
from benchmarks.programs.program import Draw, Family, Program
from benchmarks.programs.trainer import draw_program as draw_trainer

TIMEOUT = 3000  # seconds: the host compiles every graph
_SCALER = '    scaler = torch.amp.GradScaler("cuda"'
_COMPILED = "    model = torch.compile(model)\n"  # nanoGPT, train.py: before DDP wraps it


def draw_compiled_loop(draw: Draw) -> Program:
    """A loop with a script that compiles the model."""
    program = draw_loop(draw)
    before, scaler, after = program.files["train.py"].partition(_SCALER)
    assert scaler
    files = {**program.files, "train.py": before + _COMPILED + scaler + after}
    return replace(program, files=files, timeout=TIMEOUT)


def draw_compiled_trainer(draw: Draw) -> Program:
    """A script around Trainer; its file sets `torch_compile`."""
    program = draw_trainer(draw)
    files = {**program.files, program.sized.file: program.files[program.sized.file] + "torch_compile: true\n"}
    return replace(program, files=files, timeout=TIMEOUT)


FAMILIES = (
    Family("loop-compiled", HF5, draw_compiled_loop),
    Family("trainer-5-compiled", HF5, draw_compiled_trainer),
)
