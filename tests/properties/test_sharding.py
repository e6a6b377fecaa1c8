"""Conservation: what ranks hold together is the whole, and padding is all that they hold beyond it."""

from __future__ import annotations

from math import prod

from hypothesis import assume, given
from hypothesis import strategies as st

from memcalc.api import estimate, load
from memcalc.architectures.catalogue import GradientPolicy, Part, program
from memcalc.architectures.structure import block_structure
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import layer_modules, recomputed_layers, stages_of
from memcalc.layout.symbols import symbol_values
from memcalc.ledger.component import Component
from memcalc.ledger.row import Row
from tests.properties.specs import SPLITTABLE, TWO_GROUPS, WHOLE, Config, by_stage, configs, examples, held, states

# Optimizers with states of the parameter's own shape.
ELEMENTWISE = tuple(name for name in SPLITTABLE if name not in ("adafactor", "adafactor-hf", "adam-4bit"))

# ZeRO (arXiv 1910.02054) section 5: stage 1 shards optimizer states and masters, 2 gradients too, 3 weights too.
SHARDED_FROM = {
    Component.OPTIMIZER_STATE: 1,
    Component.MASTER_WEIGHTS: 1,
    Component.GRADIENTS: 2,
    Component.WEIGHTS: 3,
}


def sharded_from(row: Row, training: Config, engine: str) -> int:
    """The ZeRO stage from which a row is a share.

    Gradients in fp32 that are made for the step are of its share. DeepSpeed's stage 1 frees gradients as stage 2 does;
    FSDP2 holds shards of weights always. An average in the weights' dtype goes with these.
    """
    in_16_bit = training["recipe"] == "mixed-18" and training["gradient_dtype"] not in (None, "fp32")
    made_in_step = row.tensor.endswith("gradient in fp32") and (training["recipe"] == "mixed-16" or in_16_bit)
    if made_in_step or (engine == "deepspeed" and row.component is Component.GRADIENTS):
        return 1
    as_weights = row.tensor.endswith("average") and training["ema"] == "weights"
    if row.component is Component.WEIGHTS or as_weights:
        return 2 if engine == "fsdp2" else 3
    return SHARDED_FROM[row.component]


Rows = dict[tuple[Component, str, str], Row]


def placed(rows: Rows) -> Rows:
    """The rows with the table's gradient as large as the table's rows on the rank.

    DTensor leaves it whole, until FSDP2 cuts it: test_tensor_parallel.py has that.
    """
    found = dict(rows)
    for (component, module, tensor), row in rows.items():
        if component is Component.GRADIENTS and module == "embed_tokens":
            shape = rows[Component.WEIGHTS, module, "weight"].shape
            assert row.shape[1:] == shape[1:]
            found[component, module, tensor] = row._replace(shape=shape)
    return found


@examples(80)
@given(configs(optimizers=(*ELEMENTWISE, "adafactor")), st.integers(2, 7))
def test_zero_shards_times_ranks_are_the_whole(config: Config, ranks: int) -> None:
    """N shares hold a tensor exactly where it divides, else less than N rows (FSDP2) or N elements (flat) more.

    FSDP2 pads axis 0 to a multiple of N: N·ceil(rows/N) - rows < N. DeepSpeed cuts a flat stretch: the same of elements.
    What the stage does not shard is whole on every rank.
    """
    engine, stage = config["parallelism"]["engine"], config["parallelism"]["zero_stage"]
    if engine == "deepspeed" and stage in (1, 2):  # else the step has no 16-bit gradients
        config["parallelism"] |= TWO_GROUPS
    whole = by_stage(estimate(config, "data_parallel=1"))
    shares = by_stage(estimate(config, f"data_parallel={ranks}"))

    assert shares.keys() == whole.keys()
    for pipeline_stage, rank in shares.items():
        before, after = states(whole[pipeline_stage]), states(rank)
        before = placed(before) if engine == "fsdp2" else before
        if config["training"]["optimizer"].endswith("8bit"):  # scales follow from the shares: one for each 256 elements
            before = {key: row for key, row in before.items() if not key[2].endswith(("scales", "map"))}
            after = {key: row for key, row in after.items() if not key[2].endswith(("scales", "map"))}
        if engine == "deepspeed" and stage in (1, 2) and config["training"]["recipe"] in ("fp32", "amp"):
            # They update a flat copy of fp32 weights (stage_1_and_2.py, single_partition_of_fp32_groups).
            assert any(key[0] is Component.MASTER_WEIGHTS for key in after)
        assert after.keys() == before.keys()
        for key, share in after.items():
            full = before[key]
            assert share.count == full.count
            if stage < sharded_from(full, config["training"], engine) or full.tensor.endswith(WHOLE):
                assert share.shape == full.shape
            elif engine == "fsdp2":
                assert share.shape[1:] == full.shape[1:]
                assert 0 <= ranks * share.shape[0] - full.shape[0] < ranks
            else:
                assert len(share.shape) == 1
                assert 0 <= ranks * share.shape[0] - prod(full.shape) < ranks


@examples(40)
@given(configs(optimizers=("adam-8bit",)), st.integers(1, 7))
def test_eight_bit_states_have_a_scale_for_each_block_of_256(config: Config, ranks: int) -> None:
    """Below 4096 elements on the rank a state is fp32, as tables can be; else n bytes and ceil(n / 256) fp32 scales."""
    tables = ("embed_tokens", "embed_positions") if config["training"]["optimizer_options"]["embeddings_32bit"] else ()
    for rank in estimate(config, f"data_parallel={ranks}").ranks:
        rows = states(rank)
        for (component, module, tensor), row in rows.items():
            if component is not Component.OPTIMIZER_STATE or tensor.endswith(("scales", "map", "average")):
                continue
            elements = prod(row.shape)
            scales = rows.get((component, module, f"{tensor} scales"))
            wide = elements < 4096 or module in tables
            assert row.dtype == ("fp32" if wide else "uint8")
            assert (scales and (scales.shape, scales.dtype)) == (None if wide else ((-(-elements // 256),), "fp32"))


def is_replicated(module: str, tensor: str, qk_norm_width: str = "head") -> bool:
    """What every tensor-parallel rank holds whole (Shoeybi et al., arXiv 1909.08053, section 3).

    Norms but for those that give each head its own weights, the router, learned positions, the projections of a narrow embedding, the gate of a shared expert, latent
    attention's way down, and the bias of a row-parallel matrix, which is added after the sum over ranks.
    """
    name = module.rsplit(".", 1)[-1]
    whole = ("router", "embed_positions", "project_in", "project_out", "shared_expert_gate", "q_a_proj", "kv_a_proj")
    row_parallel = ("o_proj", "down_proj")
    if name in ("q_norm", "k_norm") and qk_norm_width != "head":
        return False
    return name.endswith("norm") or name in whole or (name in row_parallel and tensor.startswith("bias"))


@examples(80)
@given(configs(optimizers=ELEMENTWISE), st.sampled_from([2, 4]))
def test_tensor_parallel_shards_times_ranks_are_the_whole(config: Config, ranks: int) -> None:
    """t shares of a split matrix are the matrix; of a vocabulary that does not divide, less than t rows more.

    Heads and widths must divide (the loader refuses what does not), so only the vocabulary is ever padded.
    """
    config["model"] |= {"num_key_value_heads": 4, "num_attention_heads": 8, "intermediate_size": 24}
    config["parallelism"] |= {"data_parallel": 1}
    whole = by_stage(estimate(config, "tensor_parallel=1"))
    shares = by_stage(estimate(config, f"tensor_parallel={ranks}"))

    for pipeline_stage, rank in shares.items():
        before, after = states(whole[pipeline_stage]), placed(states(rank))
        plain = {key: row for key, row in after.items() if not key[2].endswith(("scales", "map"))}
        assert plain.keys() == {key for key in before if not key[2].endswith(("scales", "map"))}
        for (component, module, tensor), share in plain.items():
            full = before[component, module, tensor]
            row_elements = prod(full.shape[1:])
            if is_replicated(module, tensor, config["model"]["qk_norm_width"]) or tensor.endswith(WHOLE):
                assert share.shape == full.shape
            elif module == "embed_tokens" and tensor.endswith("weight momentum"):
                continue  # SGD's is a copy of the gradient, which DTensor makes whole (tests/estimation)
            elif module in ("embed_tokens", "lm_head"):
                padding = ranks * prod(share.shape) - prod(full.shape)
                assert 0 <= padding < ranks * row_elements
                assert padding % row_elements == 0
            else:
                assert ranks * prod(share.shape) == prod(full.shape)


@examples(80)
@given(configs())
def test_pipeline_stages_sum_to_the_whole(config: Config) -> None:
    """The stages hold each tensor once, and the tied embedding table twice: the first stage and the last one read it.

    With p > 1 and a tied head: sum = whole + V·d_e (V/t·d_e on a tensor-parallel rank). DTensor, which holds the whole
    gradient of an untied table, holds that of a tied one too once its head is on another stage: not asked here.
    """
    config["parallelism"] |= {"data_parallel": 1, "zero_stage": 0, "engine": "deepspeed"}
    stages = config["parallelism"]["pipeline_parallel"]
    whole = states(estimate(config, "pipeline_parallel=1").headline)
    sums: dict[tuple[str, str, str], int] = {}
    for rank in estimate(config).ranks:
        for (component, module, tensor), row in states(rank).items():
            key = (component.value, module, tensor)
            sums[key] = sums.get(key, 0) + row.bytes
    expected = {(component.value, module, tensor): row.bytes for (component, module, tensor), row in whole.items()}
    sums, expected = ({key: n for key, n in table.items() if key[1] != "optimizer"} for table in (sums, expected))
    if stages > 1 and config["model"]["tie_word_embeddings"]:
        copies = [key for key in expected if key[1] == "embed_tokens"]
        expected |= {
            (component, "lm_head", tensor): expected[component, module, tensor] for component, module, tensor in copies
        }

    assert sums == expected


@examples(60)
@given(configs(pipeline=False, data=False))
def test_a_tied_table_counts_once(config: Config) -> None:
    """On one stage, tying takes away exactly one table of V x d_e from every copy of the parameters."""
    tied, untied = (states(estimate(config, f"tie_word_embeddings={flag}").headline) for flag in ("true", "false"))

    heads = {key: row for key, row in untied.items() if key[1] == "lm_head" and key[2].startswith("weight")}
    assert heads
    assert untied.keys() - tied.keys() == heads.keys()
    for (component, _, tensor), row in heads.items():
        assert row.bytes == tied[component, "embed_tokens", tensor].bytes


@examples(60)
@given(configs(data=False))
def test_backward_makes_one_gradient_for_every_parameter(config: Config) -> None:
    """What the blocks' backward passes leave behind is as large as the parameters of the stage.

    Both sides come from different places: the operators of the blocks, and the table of parameters.
    """
    assert_gradients_are_the_parameters(config)


def test_backward_makes_gradients_of_the_biases_of_experts() -> None:
    """With mlp_bias, E experts of width F_e have E·(F_e + d) biases beside their matrices."""
    moe = {"num_experts": 2, "num_experts_per_token": 1, "expert_intermediate_size": 8}
    model = {"l": 1, "d": 16, "h": 4, "V": 10, "mlp_bias": True, "moe": moe}

    assert_gradients_are_the_parameters({"model": model, "training": {"recipe": "pure"}})


def assert_gradients_are_the_parameters(config: Config) -> None:
    spec = load(config)
    values = symbol_values(spec, None)
    structure = block_structure(spec)
    kept = GradientPolicy(kept=True, main_dtype=None)
    item = 4 if spec.training.recipe in ("amp", "fp32") or spec.training.dtype == "fp32" else 2
    for stage in stages_of(spec):
        recomputed = recomputed_layers(spec, stage)
        parts: list[tuple[Part, bool]] = [
            ("expert layer" if layer_modules(spec, layer).experts else "dense layer", layer in recomputed)
            for layer in range(stage.first, stage.stop)
        ]
        if stage.has_embedding:
            parts.append(("embedding", False))
        if stage.has_head:
            parts.append(("head", False))
        made = 0
        for part, again in parts:
            block = program(structure, part, again, kept)
            sizes = block.sizes(values)
            left = [i for i in block.left if block.storages[i].component is Component.GRADIENTS]
            made += sum(sizes[i] for i in left)

        shapes = [(row.count, row.gradient or row.axes) for row in stage_parameters(spec, stage)]
        assert made == item * sum(count * prod(size for _, size in axes) for count, axes in shapes)


@examples(60)
@given(configs(experts=False, latent=False, pipeline=False, data=False), st.sampled_from([2, 4]))
def test_activations_over_tensor_and_sequence_parallel_ranks_are_the_unsplit_ones(config: Config, ranks: int) -> None:
    """t ranks with sequence parallelism keep together what one keeps, statistics of norms included.

    Korthikanti et al. (arXiv 2205.05198) table 2: sbh/t·(34 + 5as/h).
    """
    assume(config["model"]["qk_norm_width"] != "all-heads")  # its statistics, one a token, are whole on each rank
    config["model"] |= {"num_key_value_heads": 4, "num_attention_heads": 8, "intermediate_size": 24}
    whole = estimate(config, "tensor_parallel=1")
    split = estimate(config, f"tensor_parallel={ranks}", "sequence_parallel=true", "engine=deepspeed", "zero_stage=0")

    assert ranks * held(split, "loss_1", Component.ACTIVATIONS) == held(whole, "loss_1", Component.ACTIVATIONS)


@examples(40)
@given(configs(pipeline=False, data=False), st.sampled_from([2, 4]))
def test_tensor_parallelism_alone_keeps_some_activations_whole(config: Config, ranks: int) -> None:
    """Without sequence parallelism, with experts and with latents, some inputs are whole on each rank: t shares hold
    at least the whole, and one share at most that.
    """
    config["model"] |= {"num_key_value_heads": 4, "num_attention_heads": 8, "intermediate_size": 24}
    whole = held(estimate(config, "tensor_parallel=1"), "loss_1", Component.ACTIVATIONS)
    share = held(estimate(config, f"tensor_parallel={ranks}"), "loss_1", Component.ACTIVATIONS)

    assert share <= whole <= ranks * share
