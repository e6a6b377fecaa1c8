"""The table of parameters: shapes, symbols, splits and where each row belongs."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.layout.parameters import Parameter, buffer_elements, count_parameters, parameter_table
from memcalc.spec.derive import derive_model
from memcalc.spec.model import ModelSpec

SIZES: dict[str, object] = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
MOE = {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 48}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}


def model(**fields: Any) -> ModelSpec:
    return ModelSpec.model_validate(derive_model(SIZES | fields))


def rows(spec: ModelSpec) -> dict[str, Parameter]:
    return {f"{row.module}.{row.tensor}": row for row in parameter_table(spec)}


def test_gpt_block_is_the_papers_12_d2_plus_13_d() -> None:
    """l (12 d^2 + 13 d) + V d + S d + 2 d, the GPT-2 count."""
    spec = model(architecture="gpt2", max_position_embeddings=32)

    assert count_parameters(spec) == 3 * (12 * 64**2 + 13 * 64) + 100 * 64 + 32 * 64 + 2 * 64


def test_llama_block_with_grouped_queries() -> None:
    """Per layer d q + 2 d kv + q d + 3 d F + 2 d; then two tables of V d and the last norm."""
    spec = model(architecture="llama", num_key_value_heads=2, intermediate_size=96)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96 + 2 * 64

    assert count_parameters(spec) == 3 * layer + 2 * 100 * 64 + 64


def test_formula_and_shape_come_from_the_same_axes() -> None:
    """Linear weights are [out, in], symbols and sizes side by side."""
    table = rows(model(architecture="llama", num_key_value_heads=2, intermediate_size=96))

    assert table["embed_tokens.weight"].shape == (("V", 100), ("d", 64))
    assert table["embed_tokens.weight"].formula == "V·d"
    assert table["layers.*.attention.q_proj.weight"].formula == "d·d"
    assert table["layers.*.attention.k_proj.weight"].shape == (("h_kv·d_h", 32), ("d", 64))
    assert table["layers.*.mlp.down_proj.weight"].shape == (("d", 64), ("F", 96))
    assert rows(model(architecture="gpt2"))["layers.*.attention.qkv_proj.weight"].formula == "3·d·d"
    assert rows(model(architecture="gpt2"))["layers.*.mlp.up_proj.weight"].formula == "4·d·d"
    assert rows(model(architecture="opt"))["embed_positions.weight"].formula == "(S+2)·d"


def test_splits_follow_megatron() -> None:
    """Column-parallel biases are split with their outputs, row-parallel ones are whole on every rank."""
    table = rows(model(architecture="gpt2", lm_head_bias=True, tie_word_embeddings=False))

    assert {name: row.split for name, row in table.items()} == {
        "embed_tokens.weight": "vocab",
        "embed_positions.weight": "replicated",
        "layers.*.input_norm.weight": "replicated",
        "layers.*.input_norm.bias": "replicated",
        "layers.*.attention.qkv_proj.weight": "column",
        "layers.*.attention.qkv_proj.bias": "column",
        "layers.*.attention.o_proj.weight": "row",
        "layers.*.attention.o_proj.bias": "replicated",
        "layers.*.post_attention_norm.weight": "replicated",
        "layers.*.post_attention_norm.bias": "replicated",
        "layers.*.mlp.up_proj.weight": "column",
        "layers.*.mlp.up_proj.bias": "column",
        "layers.*.mlp.down_proj.weight": "row",
        "layers.*.mlp.down_proj.bias": "replicated",
        "norm.weight": "replicated",
        "norm.bias": "replicated",
        "lm_head.weight": "vocab",
        "lm_head.bias": "vocab",
    }


def test_where_tells_the_pipeline_stage() -> None:
    """The final norm goes with the head; projections of a narrow embedding lie on either side."""
    table = rows(model(architecture="opt", embedding_size=32))
    where = {name: row.part for name, row in table.items() if row.part != "layer"}

    assert where == {
        "embed_tokens.weight": "embedding",
        "embed_positions.weight": "embedding",
        "project_in.weight": "embedding",
        "norm.weight": "head",
        "norm.bias": "head",
        "project_out.weight": "head",
    }
    assert table["project_in.weight"].shape == (("d", 64), ("d_e", 32))
    assert table["project_out.weight"].shape == (("d_e", 32), ("d", 64))


def test_a_tied_head_is_no_row() -> None:
    """It is the embedding, which counts once: untying adds V d."""
    tied, untied = (model(architecture="llama", tie_word_embeddings=tied) for tied in (True, False))

    assert "lm_head.weight" not in rows(tied)
    assert count_parameters(untied) - count_parameters(tied) == 100 * 64


def test_experts_are_stacked_and_the_router_is_whole() -> None:
    """E x (2 F_e x d) and E x (d x F_e), as transformers stacks them."""
    table = rows(model(architecture="mixtral", moe=MOE))

    assert table["layers.*.mlp.experts.gate_up_proj.weight"].shape == (("E", 8), ("2·F_e", 96), ("d", 64))
    assert table["layers.*.mlp.experts.down_proj.weight"].shape == (("E", 8), ("d", 64), ("F_e", 48))
    assert table["layers.*.mlp.experts.down_proj.weight"].split == "expert"
    assert table["layers.*.mlp.router.weight"].shape == (("E", 8), ("d", 64))
    assert table["layers.*.mlp.router.weight"].split == "replicated"


def test_first_dense_layers_are_rows_of_their_own() -> None:
    """One dense layer and two with experts; with none, or nothing but dense ones, all layers are identical."""
    moe = MOE | {"first_dense_layers": 1, "shared_expert_intermediate_size": 40, "shared_expert_gate": True}
    table = rows(model(architecture="deepseek_v3", moe=moe, mla=MLA))

    assert {row.count for name, row in table.items() if name.startswith("layers.dense.*.")} == {1}
    assert {row.count for name, row in table.items() if name.startswith("layers.moe.*.")} == {2}
    assert "layers.dense.*.mlp.gate_proj.weight" in table
    assert table["layers.moe.*.mlp.shared_experts.up_proj.weight"].shape == (("F_s", 40), ("d", 64))
    assert table["layers.moe.*.mlp.shared_expert_gate.weight"].elements == 64
    for first_dense_layers in (0, 3, 9):
        alike = rows(model(architecture="mixtral", moe=MOE | {"first_dense_layers": first_dense_layers}))
        assert all(row.count == 3 for row in alike.values() if row.part == "layer")


def test_latent_attention() -> None:
    """Down projections are whole, up projections are split by head (h = 4)."""
    table = rows(model(architecture="deepseek_v3", moe=MOE, mla=MLA))
    attention = {
        name.removeprefix("layers.*.attention."): (tuple(size for _, size in row.shape), row.split)
        for name, row in table.items()
        if ".attention." in name
    }

    assert attention == {
        "q_a_proj.weight": ((24, 64), "replicated"),
        "q_a_norm.weight": ((24,), "replicated"),
        "q_b_proj.weight": ((4 * (12 + 8), 24), "column"),
        "kv_a_proj.weight": ((16 + 8, 64), "replicated"),
        "kv_a_norm.weight": ((16,), "replicated"),
        "kv_b_proj.weight": ((4 * (12 + 10), 16), "column"),
        "o_proj.weight": ((64, 4 * 10), "row"),
    }
    direct = rows(model(architecture="deepseek_v3", moe=MOE, mla=MLA | {"q_lora_rank": 0}))
    assert direct["layers.*.attention.q_proj.weight"].shape == (("h·(d_n+d_r)", 80), ("d", 64))


def test_fusing_moves_parameters_but_makes_none() -> None:
    separate, fused = (
        model(architecture="llama", num_key_value_heads=2, qkv_bias=True, fused_qkv=fuse, fused_gate_up=fuse)
        for fuse in (False, True)
    )

    assert count_parameters(separate) == count_parameters(fused)
    assert rows(fused)["layers.*.attention.qkv_proj.weight"].formula == "((h+2·h_kv)·d_h)·d"
    assert rows(fused)["layers.*.mlp.gate_up_proj.weight"].formula == "2·4·d·d"


def test_rotary_tables_are_buffers() -> None:
    """Two tables of head_dim / 2 = 8 frequencies; a quarter of a head of 16 for NeoX; none for learned positions.

    GPT-J has a table of positions x rotary_dim in each of the 3 layers.
    """
    assert buffer_elements(model(architecture="llama")) == 2 * 8
    assert buffer_elements(model(architecture="gpt_neox")) == 2 * 2
    assert buffer_elements(model(architecture="gpt2")) == 0
    assert buffer_elements(model(architecture="gptj", max_position_embeddings=32, rotary_dim=8)) == 3 * 32 * 8
    assert buffer_elements(model(position_embedding="rope")) == 2 * 8


def test_the_table_is_made_once() -> None:
    """The table is cached, because searches read it thousands of times."""
    assert parameter_table(model()) is parameter_table(model())


@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 4),
    width=st.integers(1, 9),
    architecture=st.sampled_from(["gpt2", "llama", "qwen3", "bloom", "phi3", "codegen"]),
)
def test_the_symbols_of_a_formula_never_contradict_its_sizes(
    layers: int, heads: int, width: int, architecture: str
) -> None:
    """The symbols stand for sizes: evaluating a formula with the model's sizes gives the row's elements."""
    spec = model(num_layers=layers, num_attention_heads=heads, hidden_size=heads * width, architecture=architecture)
    symbols = {
        "d": spec.hidden_size,
        "h": spec.num_attention_heads,
        "h_kv": spec.num_key_value_heads,
        "d_h": spec.head_dim,
        "F": spec.intermediate_size,
        "V": spec.vocab_size,
        "S": spec.max_position_embeddings,
    }
    for row in parameter_table(spec):
        assert eval(row.formula.replace("·", "*"), {}, symbols) == row.elements  # our own formulas
        assert row.elements == prod(size for _, size in row.shape)
        assert row.total == row.count * row.elements


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3"])
def test_parameters_of_layers_grow_with_their_number_alone(architecture: str) -> None:
    """Each layer more adds the same."""
    counts = [count_parameters(model(architecture=architecture, num_layers=layers)) for layers in (1, 2, 3)]

    assert counts[2] - counts[1] == counts[1] - counts[0]
