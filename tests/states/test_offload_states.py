"""States that are all on the host leave nothing of theirs on the device."""

import pytest

from memcalc.layout.stages import stages_of
from memcalc.spec.loading import load
from memcalc.states.model_states import state_peak


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_a_run_with_all_states_on_the_host_has_none_on_the_device(engine):
    spec = load("gpt2", (f"engine={engine}", "zero_stage=3", "data_parallel=8", "offload=all"))
    assert state_peak(spec, stages_of(spec)[0]) == 0
