"""Layers that share a checkpoint segment: estimates beside traces of the same step, byte for byte."""

import pytest

import memcalc
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result

# Small vocabularies, so that the peak lies among the layers.
SMALL = ("recipe=pure", "b=2", "s=256", "V=1000", "l=6")
PHASES = ("forward_2", "loss_2", "backward_2")


def bytes_of(result: Result, phase: str) -> int:
    """Allocated bytes as they were requested; how blocks are cut is the allocator's business."""
    components = result.ledger.components(phase)
    return sum(amount for component, amount in components.items() if component is not Component.BLOCK_ROUNDING)


def difference(config: str, *overrides: str) -> list[float]:
    """Estimate less trace in each phase, as a share of the trace."""
    pytest.importorskip("torch")
    estimate = memcalc.estimate(config, *overrides, gpu="a100-80gb")
    trace = memcalc.trace(config, *overrides, gpu="a100-80gb", steps=2).result
    return [bytes_of(estimate, phase) / bytes_of(trace, phase) - 1 for phase in PHASES]


@pytest.mark.parametrize("recompute", ["[0-2, 3-5]", "[[[0, 1], 2], 4]"])
def test_a_plan_is_estimated_as_it_runs(recompute: str) -> None:
    _, loss, backward = difference("gpt2", f"recompute={recompute}", *SMALL)

    assert abs(loss) < 1e-5
    assert abs(backward) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["pure", "amp", "mixed-20"])
@pytest.mark.parametrize("recompute", ["[0-5]", "[[[[0], 1], 2], 3]", "[1, 3-4]"])
def test_plans_under_every_recipe(recompute: str, recipe: str) -> None:
    """Under autocast a segment is estimated up to one 16-bit hidden state too high, and never too low."""
    overrides = (f"recompute={recompute}", f"recipe={recipe}", *SMALL[1:])
    pytest.importorskip("torch")
    estimate = memcalc.estimate("gpt2", *overrides, gpu="a100-80gb")
    trace = memcalc.trace("gpt2", *overrides, gpu="a100-80gb", steps=2).result
    loss, backward = (bytes_of(estimate, phase) - bytes_of(trace, phase) for phase in PHASES[1:])
    hidden_state = 2 * 2 * 256 * 768

    assert abs(loss) < 4096
    assert -4096 < backward < hidden_state + 4096


@pytest.mark.long
def test_transformers_layers_are_joined() -> None:
    pytest.importorskip("transformers")
    _, loss, backward = difference("gpt2", "recompute=[0-1, 2-3, [[4], 5]]", "implementation=huggingface", *SMALL)

    assert abs(loss) < 1e-4
    assert abs(backward) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full", "[0-2, 3-5]", "[[[0, 1], 2], 4]", "[[[[0], 1], 2], 3]"])
def test_transformers_llama_where_its_norms_are_the_peak(recompute: str) -> None:
    """Its norm saves its input in fp32 alone, and squares it by pow: the segment's own input waits in its checkpoint."""
    pytest.importorskip("transformers")
    _, loss, backward = difference("llama-3.2-1b", f"recompute={recompute}", "implementation=huggingface", *SMALL)

    assert abs(loss) < 1e-5
    assert abs(backward) < 3e-5


@pytest.mark.parametrize("recompute", ["none", "full", "[1, 4]"])
def test_segments_of_one_layer_are_what_they_were(recompute: str) -> None:
    """One by one in two ways: along identical layers, and layer by layer."""
    plans = {"none": "[]", "full": "[[[0]],[[1]],[[2]],[[3]],[[4]],[[5]]]", "[1, 4]": "[[[1]],4]"}
    usual = memcalc.estimate("gpt2", f"recompute={recompute}", *SMALL).ledger
    # A list in a list of one layer runs it once more, and holds the same.
    other = memcalc.estimate("gpt2", f"recompute={plans[recompute]}", *SMALL).ledger

    assert usual.totals == other.totals
