"""Adapters: they are counted alike by the table of parameters and by backward, and only they have states."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from memcalc.api import estimate, load
from memcalc.architectures.catalogue import GradientPolicy, Part, program
from memcalc.architectures.structure import block_structure
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.peft_parameters import trainable_parameters
from memcalc.layout.stages import LayerModules, layer_modules, recomputed_layers, stages_of
from memcalc.layout.symbols import symbol_values
from memcalc.ledger.component import Component
from memcalc.spec.recipes import DTYPE_BYTES
from tests.properties.specs import Config, configs, examples, held

tuned = configs(adapters=True, data=False, optimizers=("adamw",)).filter(lambda config: "lora" in config["training"])


@examples(60)
@given(tuned)
def test_backward_makes_one_gradient_for_every_parameter_that_trains(config: Config) -> None:
    """What the blocks' backward passes leave behind, against the table of parameters."""
    spec = load(config)
    values = symbol_values(spec, None)
    structure = block_structure(spec)
    kept = GradientPolicy(kept=True, main_dtype=None)
    stage = next(iter(stages_of(spec)))
    recomputed = recomputed_layers(spec, stage)
    parts: list[tuple[Part, bool, bool]] = []
    for layer in range(stage.first, stage.stop):
        modules = layer_modules(spec, layer)
        parts.append(("expert layer" if modules.experts else "dense layer", layer in recomputed, modules.detached))
    parts += [("embedding", False, False), ("head", False, False)]
    made = 0
    for part, again, detached in parts:
        block = program(structure.of_layers(LayerModules(detached=detached)), part, again, kept)
        sizes = block.sizes(values)
        made += sum(sizes[i] for i in block.left if block.storages[i].component is Component.GRADIENTS)
    rows = [row for row in stage_parameters(spec, stage) if row.trains]

    assert made == sum(DTYPE_BYTES[row.dtype] * row.count * row.elements for row in rows)
    assert trainable_parameters(spec) == sum(row.count * row.elements for row in rows)


@examples(60)
@given(tuned)
def test_only_what_trains_has_gradients_masters_and_states(config: Config) -> None:
    result = estimate(config)
    states = (Component.GRADIENTS, Component.MASTER_WEIGHTS, Component.OPTIMIZER_STATE)
    rows = [row for row in result.ledger.live_rows("zero_grad_2") if row.component in states]

    assert rows
    assert all(".lora_" in row.module or row.module.endswith(".saved") for row in rows)
    for component in states:
        copies = {row.tensor for row in rows if row.component is component and "step" not in row.tensor}
        for copy in copies:
            alike = [row for row in rows if row.component is component and row.tensor == copy]
            if copy.startswith("weight"):
                assert sum(row.count * prod(row.shape) for row in alike) <= result.trainable_parameters


@examples(60)
@given(tuned, st.integers(1, 8))
def test_no_phase_falls_with_the_rank(config: Config, further: int) -> None:
    rank = config["training"]["lora"]["rank"] + further
    before, after = estimate(config).ledger.totals, estimate(config, f"lora.rank={rank}").ledger.totals

    assert all(after[phase] >= before[phase] for phase in before)


@examples(60)
@given(tuned)
def test_a_base_in_4_bits_holds_less_than_one_in_16(config: Config) -> None:
    """From 32 elements a block on: half a byte, 4 bytes of 32 for a scale; tables of 1088 bytes are a matrix each."""
    plain = config["training"] | {"qlora": None, "finetune": "lora"}
    bits = config["training"] | {"qlora": {"double_quantization": False}, "finetune": "qlora"}
    whole, quarter = (
        [
            row
            for row in estimate(config | {"training": t}).ledger.live_rows("model")
            if row.component is Component.WEIGHTS
        ]
        for t in (plain, bits)
    )
    tables = sum(row.bytes for row in quarter if row.tensor.endswith("table of 4 bits"))

    assert sum(row.bytes for row in quarter) - tables <= sum(row.bytes for row in whole)


@examples(60)
@given(tuned)
def test_recomputing_more_never_keeps_more(config: Config) -> None:
    kept = [
        held(estimate(config, f"recompute={plan}", "lora.input_require_grads=true"), "loss_1", Component.ACTIVATIONS)
        for plan in ("full", "every-2", "every-4", "none")
    ]

    assert kept == sorted(kept)
