"""Settings of other programs' modules that memcalc's own step rejects."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.step.unsupported import refuse_modules

PROGRAMS = {
    "norm_dtype": ("norm_dtype=fp32",),
    "heads_first": ("heads_first=true",),
    "repeat_kv": ("repeat_kv=true",),
    "loss_recompute": ("loss=chunked", "loss_recompute=false"),
    "fake_quantization": ("fake_quantization=int8-int4",),
}


@pytest.mark.parametrize("field", PROGRAMS)
def test_modules_that_the_step_does_not_have_are_rejected_by_their_field(field: str) -> None:
    with pytest.raises(InputError, match=f"{field} = .* which the step does not run") as found:
        refuse_modules(memcalc.load("llama-3.2-1b", *PROGRAMS[field]))

    assert found.value.location == f"training.{field}"
    refuse_modules(memcalc.load("llama-3.2-1b"))
