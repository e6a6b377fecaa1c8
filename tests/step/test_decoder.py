"""The reference decoder: its parameters, and what autograd keeps of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.layout.parameters import count_parameters
from memcalc.ledger.component import Component
from memcalc.spec.loading import load
from memcalc.step.causal_lm import build, default_dtype, loss
from memcalc.step.dtypes import compute_dtype
from memcalc.step.reference.decoder import Decoder, Layer
from memcalc.step.reference.positions import prepare

TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 32}
MOE = {"num_experts": 4, "num_experts_per_token": 2, "expert_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "untied with biases": {"tie_word_embeddings": False, "lm_head_bias": True},
    "tied with a bias": {"lm_head_bias": True},
    "llama": {"architecture": "llama", "num_key_value_heads": 2, "intermediate_size": 96},
    "qwen3": {"architecture": "qwen3", "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96},
    "codegen": {"architecture": "codegen"},
    "neox": {"architecture": "gpt_neox"},
    "bloom": {"architecture": "bloom"},
    "narrow embedding": {"architecture": "opt", "embedding_size": 32},
    "no positions, geglu": {"position_embedding": "none", "mlp": "geglu", "final_norm": False},
    "experts": {"architecture": "llama", "intermediate_size": 96, "moe": MOE},
    "experts and dense": {
        "architecture": "llama",
        "intermediate_size": 96,
        "moe": MOE
        | {
            "shared_expert_intermediate_size": 40,
            "shared_expert_gate": True,
            "first_dense_layers": 1,
            "router_correction_bias": True,
        },
    },
    "experts with biases in each second layer": {
        "architecture": "qwen2_moe",
        "intermediate_size": 96,
        "moe": MOE | {"expert_interval": 2, "expert_bias": True, "router_bias": True},
    },
    "norms before and after": {"architecture": "gemma2", "head_dim": 16, "num_key_value_heads": 2},
    "norms after, one over all heads": {"architecture": "olmo2", "num_key_value_heads": 2},
    "norms without parameters, relu2": {"architecture": "nanochat"},
    "a norm for each head, without bias": {"architecture": "cohere", "num_key_value_heads": 2, "qk_norm": True},
    "a norm of heads without weight": {"architecture": "llama", "qk_norm": True, "qk_norm_weight": False},
}


def spec(model: dict[str, Any] | None = None, **training: Any) -> Any:
    return load(
        {
            "model": TINY | (model or {}),
            "training": {"sequence_length": 32, "recipe": "pure", "dropout": 0.0} | training,
        }
    )


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_estimate_counts(name: str) -> None:
    given = spec(MODELS[name], attention="eager")
    with torch.device("meta"):
        decoder = Decoder(given)

    assert sum(p.numel() for p in decoder.parameters()) == count_parameters(given.model)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("gpt2", 124_439_808), ("codegen-350m", 356_712_448), ("llama-3.2-1b", 1_235_814_400)],
)
def test_presets_have_the_parameters_of_the_real_models(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        decoder = Decoder(load(preset))

    assert sum(p.numel() for p in decoder.parameters()) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_trains(name: str) -> None:
    """A loss near ln V at first, and a gradient for every parameter, in eager and, but for ALiBi, fused attention."""
    for attention in ("eager",) if name == "bloom" else ("eager", "flash", "memory-efficient"):
        model = build(spec(MODELS[name], attention=attention, dtype="fp32", recipe="fp32"), torch.device("cpu"))
        tokens = torch.randint(96, (2, 32))
        found = model.loss(model.logits(tokens), tokens)
        found.backward()

        assert torch.isfinite(found)
        assert all(p.grad is not None for p in model.module.parameters())


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen3", "codegen"])
def test_attention_kernels_agree(name: str) -> None:
    """Eager and fused attention of one model give the same logits."""
    torch.manual_seed(0)
    eager = build(spec(MODELS[name], attention="eager", dtype="fp32", recipe="fp32"), torch.device("cpu"))
    fused = build(spec(MODELS[name], attention="flash", dtype="fp32", recipe="fp32"), torch.device("cpu"))
    fused.module.load_state_dict(eager.module.state_dict())
    tokens = torch.randint(96, (2, 32))

    torch.testing.assert_close(eager.logits(tokens), fused.logits(tokens), rtol=1e-4, atol=1e-5)


def test_later_tokens_change_nothing_before_them() -> None:
    model = build(spec(attention="eager", dtype="fp32", recipe="fp32"), torch.device("cpu"))
    tokens = torch.randint(96, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 96

    torch.testing.assert_close(model.logits(tokens)[0, :20], model.logits(changed)[0, :20])


def saved_bytes(given: Any, batch: int) -> int:
    """What autograd keeps of one layer, each storage once; parameters and what all layers share left out."""
    s, d = given.training.sequence_length, given.model.hidden_size
    with default_dtype(torch.bfloat16):
        layer = Layer(given.model, given.training, 0)
        x = torch.randn(batch, s, d, requires_grad=True)
    tables = prepare(given.model, given.training.attention, s, compute_dtype(given.training), torch.device("cpu"))
    shared = [tensor for tensor in (tables.mask, tables.bias, tables.cos, tables.sin) if tensor is not None]
    known = {tensor.untyped_storage().data_ptr() for tensor in [*layer.parameters(), *shared]}
    found: dict[int, int] = {}
    kept = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, tables)
    return sum(found.values())


@pytest.mark.parametrize("b", [1, 2])
def test_eager_gpt_layer_keeps_what_the_paper_counts(b: int) -> None:
    """34bsd + 5bs^2h without dropout's masks and outputs is 32bsd + 2bs^2h.

    The CPU's LayerNorm keeps its two statistics in bf16: 2 norms x 2 x 2 bytes per token.
    """
    s, d, h = 32, 64, 4

    assert saved_bytes(spec(attention="eager"), b) == 32 * b * s * d + 2 * b * s * s * h + 8 * b * s


EXPERTS = {"mlp": "swiglu", "moe": MOE | {"num_experts_per_token": 1}}
GPT = {"qk_norm": True, "position_embedding": "none"}


@pytest.mark.parametrize(
    ("model", "changes", "more", "statistics"),
    [
        # What a bias adds to, and its sum, no gradient needs; the matrix keeps its input with and without one.
        (EXPERTS | {"mlp_bias": False}, {"mlp_bias": True}, 0, 0),
        (EXPERTS, {"moe": MOE | {"num_experts_per_token": 1, "router_bias": True}}, 0, 0),
        # Two norms more keep their inputs, 2bsd each, and two statistics each.
        ({}, {"norms_per_layer": 4}, 2 * 2 * 64, 4),
        # Before, norms keep the residual stream, and matrices what comes out of the norms; after, norms keep what comes
        # out of the matrices, and these the residual stream: four tensors of 2bsd each way.
        ({}, {"norm_placement": "after"}, 0, 0),
        # relu keeps its output, the down projection keeps that squared: 2 · 4bsd more.
        ({"mlp": "relu"}, {"mlp": "relu2"}, 2 * 4 * 64, 0),
        # One norm over all 4 heads has two statistics for q and two for k, where each head had its own.
        (GPT, {"qk_norm_width": "all-heads"}, 0, 4 - 4 * 4),
        # The product with the heads' own weights keeps what it multiplies: 2bsd for q and for k.
        (GPT, {"qk_norm_width": "each-head"}, 2 * 2 * 64, 0),
        (GPT, {"qk_norm_weight": False}, 0, 0),
        (GPT, {"norm_bias": False}, 0, 0),
    ],
)
def test_layouts_keep_what_the_estimate_says(
    model: dict[str, Any], changes: dict[str, Any], more: int, statistics: int
) -> None:
    """Bytes a token and layer that a change of the layout adds. Statistics have 2 bytes on the CPU, 4 on CUDA."""
    s = 32
    before, after = (spec(fields, attention="eager") for fields in (model, model | changes))

    assert saved_bytes(after, 1) - saved_bytes(before, 1) == s * (more + 2 * statistics)
    kept = [estimate(run).ledger.components("loss_1")[Component.ACTIVATIONS] for run in (before, after)]
    assert kept[1] - kept[0] == 2 * s * (more + 4 * statistics)  # of two layers


def test_dropout_keeps_a_mask_and_an_output() -> None:
    """Masks of a byte, and the output of attention's: 2 x bsd + (1 + 2)bs^2h more."""
    s, d, h = 32, 64, 4
    more = saved_bytes(spec(attention="eager", dropout=0.1), 1) - saved_bytes(spec(attention="eager"), 1)

    assert more == 2 * s * d + 3 * s * s * h


def test_selective_recompute_drops_the_quadratic_term() -> None:
    """Of attention's core only q, k, v and the output stay: 32bsd and the statistics."""
    s, d = 32, 64

    assert saved_bytes(spec(attention="eager", recompute="selective"), 1) == 32 * s * d + 8 * s


def test_rotated_attention_keeps_no_more_than_unrotated() -> None:
    """q and k are rotated copies and v is copied too, so the fused output is freed."""
    rope = saved_bytes(spec({"position_embedding": "rope"}, attention="eager"), 1)

    assert rope == saved_bytes(spec(attention="eager"), 1)


def test_loss_is_cross_entropy_in_fp32() -> None:
    logits = torch.zeros(1, 4, 96, dtype=torch.bfloat16)

    assert loss(logits, torch.zeros(1, 4, dtype=torch.long)).item() == pytest.approx(4.5643, abs=1e-4)  # ln 96


@pytest.mark.parametrize(
    ("model", "training", "words"),
    [
        (
            {
                "mla": {
                    "q_lora_rank": 8,
                    "kv_lora_rank": 8,
                    "qk_nope_head_dim": 8,
                    "qk_rope_head_dim": 8,
                    "v_head_dim": 8,
                }
            },
            {},
            "latent attention",
        ),
        ({"architecture": "bloom"}, {"attention": "flash"}, "ALiBi"),
    ],
)
def test_what_the_decoder_does_not_know_is_refused(model: dict[str, Any], training: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Decoder(spec(model, **training))
