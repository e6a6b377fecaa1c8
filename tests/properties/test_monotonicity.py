"""More of anything that is larger never needs less; more sharding, and more recomputation, never need more."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memcalc.api import estimate, load
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from tests.properties.specs import POSITIONS, SPLITTABLE, TWO_GROUPS, Config, by_stage, configs, examples, held, totals

# bitsandbytes keeps states below 4096 elements in fp32, so a smaller tensor or share can hold more: 4095 elements are
# 4·4095 = 16380 bytes, 4096 are 4096 + 4·16 = 4160. (test_optimizer_theory.py says so too.)
# So does torchao below 4096 elements, and where 128 does not divide; and a paged tensor leaves PyTorch's memory.
STEADY = tuple(name for name in SPLITTABLE if not name.endswith("bit"))


def assert_no_phase_falls(less: dict[tuple[int, str], int], more: dict[tuple[int, str], int]) -> None:
    """Every phase of every pipeline stage, hence the peak."""
    assert less.keys() <= more.keys()
    fallen = {key: (total, more[key]) for key, total in less.items() if more[key] < total}
    assert not fallen


@examples(60)
@given(configs(adapters=True), st.integers(1, 4))
def test_no_phase_falls_with_the_micro_batch(config: Config, further: int) -> None:
    b = config["training"]["micro_batch_size"] + further

    assert_no_phase_falls(totals(config), totals(config, f"b={b}"))


@examples(60)
@given(configs(adapters=True), st.integers(1, 8))
def test_no_phase_falls_with_the_sequence(config: Config, further: int) -> None:
    """In steps of 8, which sequence parallelism can split."""
    s = config["training"]["sequence_length"] + 8 * further
    assert s <= POSITIONS

    assert_no_phase_falls(totals(config), totals(config, f"s={s}"))


@examples(60)
@given(configs(adapters=True), st.integers(1, 3))
def test_no_phase_falls_with_the_layers(config: Config, further: int) -> None:
    """A further layer goes to one of the stages; the others keep as many.

    On a pipeline layers move to other stages, so only layers that are all identical are asked about there.
    """
    if config["parallelism"]["pipeline_parallel"] > 1:
        if config["training"]["recompute"] not in ("none", "selective"):
            config["training"]["recompute"] = "full"
        config["model"].get("moe", {}).update(first_dense_layers=0, expert_interval=1, dense_layers=[])
    layers = config["model"]["num_layers"] + further

    assert_no_phase_falls(totals(config), totals(config, f"l={layers}"))


@examples(60)
@given(configs(optimizers=STEADY, adapters=True), st.integers(1, 100))
def test_no_phase_falls_with_the_vocabulary(config: Config, further: int) -> None:
    V = config["model"]["vocab_size"] + further  # noqa: N806 -- the papers' symbol

    assert_no_phase_falls(totals(config), totals(config, f"V={V}"))


@examples(60)
@given(configs(optimizers=STEADY, adapters=True, latent=False), st.booleans())
def test_no_phase_falls_with_the_hidden_size(config: Config, wider_heads: bool) -> None:
    """d doubles, and with it the heads: their number or their width.

    A narrow embedding stays narrow: as wide as d it would need no projections.
    """
    model = config["model"]
    names = ["head_dim"] if wider_heads else ["num_attention_heads", "num_key_value_heads"]
    names += ["embedding_size"] if model["embedding_size"] else []
    changes = [f"{name}={2 * model[name]}" for name in ("hidden_size", *names)]

    assert_no_phase_falls(totals(config), totals(config, *changes))


@examples(60)
@given(configs(pipeline=False))
def test_recomputing_more_never_keeps_more(config: Config) -> None:
    """Saved activations: full <= every second layer <= every fourth <= none, each of which names fewer layers."""
    plans = ("full", "every-2", "every-4", "none")
    kept = [held(estimate(config, f"recompute={plan}"), "loss_1", Component.ACTIVATIONS) for plan in plans]

    assert kept == sorted(kept)


@examples(60)
@given(configs(pipeline=False))
def test_selective_recomputation_never_keeps_more(config: Config) -> None:
    """What the attention core keeps goes; its inputs q, k and v stay, which the core keeps too.

    Under autocast with normed queries and keys the core keeps 2-byte casts of these where the plan keeps them in fp32,
    which can be more than what it drops; so these are not asked.
    """
    if config["training"]["recipe"] == "amp":
        config["model"]["qk_norm"] = False
    selective, none = (
        held(estimate(config, f"recompute={plan}"), "loss_1", Component.ACTIVATIONS) for plan in ("selective", "none")
    )

    assert selective <= none


@examples(60)
@given(configs(optimizers=STEADY, pipeline=False), st.integers(2, 6), st.sampled_from(["deepspeed", "fsdp2"]))
def test_a_higher_zero_stage_never_holds_more_model_states(config: Config, ranks: int, engine: str) -> None:
    """Weights, masters, gradients and optimizer states, whenever they are complete: before the first step and in steps.

    In between DeepSpeed's stages 1 and 2 hold no gradients at all, where stage 3 has a buffer for its share; they keep
    those of the step until the update of the last group of parameters, here the one without weight decay. With fp32
    sums of gradients stage 1 holds all of them, and stage 3 copies those of its share in the step.
    """
    assume(engine != "deepspeed" or config["training"]["recipe"] != "mixed-20")
    config["parallelism"] |= {"engine": engine, "data_parallel": ranks, **(TWO_GROUPS if engine == "deepspeed" else {})}
    stages = (0, 1, 2, 3) if engine == "deepspeed" else (2, 3)
    kinds = (Component.WEIGHTS, Component.MASTER_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE)
    results = [estimate(config, f"zero_stage={stage}") for stage in stages]
    for phase in ("model", "optimizer_step_1", "optimizer_step_2"):
        sizes = [held(result, phase, *kinds) for result in results]
        assert sizes == sorted(sizes, reverse=True)


@examples(60)
@given(configs(optimizers=STEADY), st.integers(2, 6), st.integers(1, 10))
def test_more_data_parallel_ranks_never_hold_more(config: Config, ranks: int, further: int) -> None:
    """Shares shrink and buffers stay as they are: no phase of any stage grows with N, once there is a group at all.

    But FSDP2 gathers and reduces rows that more ranks do not divide with what fills them up: in up to three buffers of
    what was gathered and two of fp32 gradients, each of whole blocks. And DeepSpeed's update looks at the pieces of
    gradients that fall into a rank's share one by one: where a share ends decides what it copies. Of whole gradients
    that its stage 2 sums up, shares and the rest are blocks of their own.
    """
    fewer, more = totals(config, f"data_parallel={ranks}"), totals(config, f"data_parallel={ranks + further}")
    allowed = {
        stage: 5 * (4 * elements + 512) for stage, elements in filled(config, ranks + further).items() if elements
    }
    if config["parallelism"]["engine"] == "deepspeed" and config["training"]["gradient_accumulation_steps"] > 1:
        allowed = {stage: 512 * (count + 1) for stage, count in tensors(config).items()}

    assert_no_phase_falls(more, {key: total + allowed.get(key[0], 0) for key, total in fewer.items()})


def filled(config: Config, ranks: int) -> dict[int, int]:
    """Elements of each stage that FSDP2 adds, so that every rank has as many rows."""
    spec = load(config, f"data_parallel={ranks}")
    if spec.parallelism.engine != "fsdp2":
        return {}
    return {
        stage.index: sum(-each.shape[0] % ranks * (each.elements // each.shape[0]) * each.count for each in parameters)
        for stage in stages_of(spec)
        for parameters in (stage_parameters(spec, stage),)
    }


def tensors(config: Config) -> dict[int, int]:
    """Parameters of each stage, as tensors."""
    spec = load(config)
    return {stage.index: sum(held.count for held in stage_parameters(spec, stage)) for stage in stages_of(spec)}


@examples(40)
@given(configs(), st.integers(1, 3))
def test_accumulating_more_never_holds_less(config: Config, further: int) -> None:
    """More micro-batches keep gradients from one to the next, and fill a pipeline."""
    steps = config["training"]["gradient_accumulation_steps"]
    changes = f"gradient_accumulation_steps={steps + further}"
    before, after = by_stage(estimate(config)), by_stage(estimate(config, changes))
    for stage, rank in after.items():
        for phase in ("forward_1", "loss_1", "forward_2", "loss_2", "optimizer_step_2"):
            assert rank.ledger.totals[phase] >= before[stage].ledger.totals[phase]


@pytest.mark.parametrize("preset", ["gpt2", "llama-3-8b", "qwen2.5-7b", "mixtral-8x7b"])
@pytest.mark.parametrize(
    ("symbol", "sizes"), [("b", (1, 2, 3, 4, 8, 12)), ("s", (128, 256, 512, 1000, 1024)), ("V", (1000, 50257, 128256))]
)
def test_no_phase_of_a_real_model_falls_as_it_grows(preset: str, symbol: str, sizes: tuple[int, ...]) -> None:
    """At sizes where kernels' workspaces and the allocator's rests come in, which the random runs leave out."""
    runs = [estimate(preset, f"{symbol}={size}").ledger.totals for size in sizes]
    for less, more in pairwise(runs):
        assert all(more[phase] >= total for phase, total in less.items())
