"""What optimizers remember, and what their updates hold meanwhile, on runs of any size; P parameters."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memcalc.api import estimate, load
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from tests.properties.specs import Config, by_stage, changes_of, configs, examples, gpt, gpts, held


@examples(30)
@given(gpts(), st.sampled_from(["adam", "adamw"]))
def test_fused_removes_the_list_of_foreach(case: tuple[Config, int, dict[str, int]], optimizer: str) -> None:
    """foreach makes one fp32 list of all parameters in the step, 4P bytes; fused makes none.

    Fused Adam keeps its step counters on the device instead: 4 bytes per tensor, from the first step on.
    """
    config, parameters, _ = case
    foreach, fused = (
        estimate(config, f"optimizer={optimizer}", f"optimizer_implementation={how}") for how in ("foreach", "fused")
    )
    spec = foreach.spec
    (stage,) = stages_of(spec)
    tensors = sum(row.count for row in stage_parameters(spec, stage))
    counters = {Component.OPTIMIZER_STATE: 4 * tensors}

    for phase in ("optimizer_step_1", "optimizer_step_2"):
        assert changes_of(foreach, fused, phase) == counters | {Component.TEMPORARIES: -4 * parameters}
    for phase in ("model", "optimizer", "forward_1", "loss_1", "backward_1"):
        assert changes_of(foreach, fused, phase) == {}
    for phase in ("zero_grad_2", "forward_2"):
        assert changes_of(foreach, fused, phase) == counters


@examples(40)
@given(configs(optimizers=("adam", "adamw", "nadam"), data=False))
def test_a_loop_over_parameters_needs_two_buffers_of_the_largest(config: Config) -> None:
    """for-loop updates one parameter at a time: a temporary and a denominator, while the last one's is still there.

    Of a tensor between two as large, that is three times its size; decayed gradients, of which one is held, are off.
    Tensors of one block are all as large as each other: of a model of such, any one may be at the peak.
    """
    config["training"] |= {"optimizer_options": {"weight_decay": 0.0}, "optimizer_implementation": "for-loop"}
    config["training"] |= {"gradient_clipping": None}  # it has more blocks for tensors this small
    config["parallelism"] |= {"engine": "ddp", "zero_stage": 0}  # DeepSpeed updates flat tensors
    loop = by_stage(estimate(config))
    spec = load(config)
    pure = spec.training.recipe == "pure" and spec.training.dtype != "fp32"
    for stage in stages_of(spec):
        largest = (2 if pure else 4) * max(row.elements for row in stage_parameters(spec, stage))
        assume(largest > 512)
        temporaries = loop[stage.index].ledger.components("optimizer_step_2")[Component.TEMPORARIES]
        assert 2 * largest <= temporaries <= 3 * largest


@examples(40)
@given(configs(), st.sampled_from(["sgd", "momentum", "adam", "adamw", "lion"]))
def test_an_optimizer_remembers_so_many_bytes_a_parameter(config: Config, optimizer: str) -> None:
    """SGD nothing, momentum and Lion one number for each element that a rank updates, Adam two; fp32 but in `pure`.

    For an embedding that DTensor shards and that gets a full gradient, SGD's momentum is a copy of that gradient.
    """
    config["training"] |= {"optimizer": optimizer, "optimizer_implementation": "foreach", "optimizer_options": {}}
    config["training"] |= {"ema": "none"}
    copies = {"sgd": 0, "momentum": 1, "lion": 1, "adam": 2, "adamw": 2}[optimizer]
    pure = config["training"]["recipe"] == "pure" and config["training"]["dtype"] != "fp32"
    spec = load(config)
    whole = any(each.gradient for stage in stages_of(spec) for each in stage_parameters(spec, stage))
    assume(optimizer != "momentum" or not whole)
    for rank in estimate(config).ranks:
        masters = [r for r in rank.ledger.rows if r.component is Component.OPTIMIZER_STATE]
        elements = sum(row.count * prod(row.shape) for row in masters)
        shards = [r for r in rank.ledger.rows if r.tensor.endswith("weight master") or r.tensor.endswith("bias master")]
        if config["training"]["recipe"].startswith("mixed"):  # the masters are what the optimizer updates
            assert elements == copies * sum(row.count * prod(row.shape) for row in shards)
        assert sum(row.bytes for row in masters) == (2 if pure else 4) * elements


def test_an_optimizer_state_appears_at_the_first_step_and_stays() -> None:
    """torch.optim makes states lazily: none in the first forward and backward, 8P ever after under Adam."""
    config, parameters = gpt(2, 64, 4, 128, s=64)
    ledger = estimate(config).ledger
    state = Component.OPTIMIZER_STATE
    first = ledger.phases.index("optimizer_step_1")

    assert [ledger.components(phase).get(state, 0) for phase in ledger.phases[:first]] == [0] * first
    assert {ledger.components(phase)[state] for phase in ledger.phases[first:]} == {8 * parameters}


def test_adafactor_remembers_rows_and_columns() -> None:
    """4·(rows + columns) for a matrix, 4n for a vector (arXiv 1804.04235); one GPT layer of d = 64, V = 128.

    Table 128 + 64; q, k, v 192 + 64; projection 64 + 64; MLP 256 + 64 twice. Vectors: three norms of 2·64, biases of
    192, 64, 256 and 64. Together 1216 + 960 numbers.
    """
    config, _ = gpt(1, 64, 4, 128, s=64, optimizer="adafactor")
    matrices = (128 + 64) + (192 + 64) + (64 + 64) + 2 * (256 + 64)
    vectors = 3 * 2 * 64 + 192 + 64 + 256 + 64
    assert (matrices, vectors) == (1216, 960)

    assert held(estimate(config), "optimizer_step_1", Component.OPTIMIZER_STATE) == 4 * (matrices + vectors)


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        (63, 2 * 4 * 63 * 65),  # 4095 elements: fp32
        (64, 2 * (64 * 65 + 4 * 17)),  # 4160: one byte each, and ceil(4160 / 256) = 17 scales
    ],
)
def test_eight_bit_states_below_4096_elements_stay_fp32(vocabulary: int, expected: int) -> None:
    """bitsandbytes' min_8bit_size: so a larger tensor can hold less."""
    config = {
        "model": {"l": 1, "d": 65, "h": 5, "V": vocabulary, "position_embedding": "none"},
        "training": {"optimizer": "adam-8bit", "s": 8},
    }
    rows = [row for row in estimate(config).ledger.rows if row.module == "embed_tokens"]

    assert sum(row.bytes for row in rows if row.component is Component.OPTIMIZER_STATE) == expected
