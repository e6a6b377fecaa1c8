"""Random runs that a user could mean: every choice of the configuration, at sizes small enough to try hundreds.

Sizes are kept below two thresholds of CUDA, so that what a formula promises can be asked exactly: no tensor is larger
than 1 MiB (larger blocks keep rests that depend on the allocator's free lists), and b·s is at most 512 (sums over more
tokens are staged in buffers with sizes that jump with the launch geometry).
"""

from __future__ import annotations

import os
from math import ceil
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from memcalc.api import estimate
from memcalc.ledger.component import Component
from memcalc.ledger.result import RankResult, Result
from memcalc.ledger.row import Row
from memcalc.ledger.textbook import parameters
from memcalc.spec.optimizers import OPTIMIZERS

Config = dict[str, Any]

MODEL_STATES = (Component.WEIGHTS, Component.MASTER_WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER_STATE)

# Optimizers that do not ask for whole matrices, so that they go with every spread over ranks.
SPLITTABLE = tuple(name for name in OPTIMIZERS if name not in ("muon", "galore"))

# States that are one number per tensor, or one table for all: the same on every rank.
# DeepSpeed's groups of parameters with and without weight decay: 16-bit gradients are there until the last one's update.
TWO_GROUPS = {"zero_optimization": {"separate_no_decay": True}}
WHOLE = ("step counter", "eta", "mu", "update norm", "map")

POSITIONS = 128  # learned positions of every model here


EXPLORE = int(os.environ.get("MEMCALC_EXPLORE", "0"))
SHARE = float(os.environ.get("MEMCALC_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """A number of examples, the same ones in every run; MEMCALC_EXPLORE=10 draws ten times as many new ones.

    MEMCALC_EXAMPLES=0.0625 takes a sixteenth of them, as the quick tests do (tests/conftest.py).
    """
    return settings(max_examples=EXPLORE * count or ceil(SHARE * count))


@st.composite
def configs(
    draw: st.DrawFn,
    *,
    layers: int = 6,
    experts: bool = True,
    latent: bool = True,
    tensor: bool = True,
    pipeline: bool = True,
    data: bool = True,
    adapters: bool = False,
    optimizers: tuple[str, ...] = SPLITTABLE,
) -> Config:
    """A configuration that loads, of so many layers at most. The keywords leave out whole dimensions.

    `adapters`: every other one is fine-tuned with adapters, which know no model parallelism and no sharding.
    """
    model = draw(_models(layers, experts=experts, latent=latent))
    tuned = adapters and draw(st.booleans())
    whole = not tuned
    parallelism = draw(_spreads(model, tensor=tensor and whole, pipeline=pipeline and whole, data=data))
    if parallelism["tensor_parallel"] > 1 or parallelism["zero_stage"]:  # these two want whole matrices
        optimizers = tuple(name for name in optimizers if name not in ("muon", "galore"))
    training = draw(_trainings(model, optimizers))
    if tuned:
        parallelism |= {"engine": "ddp", "zero_stage": 0}
        training |= {**draw(_adapters(model, training["recipe"])), "ema": "none"}
    return {"model": model, "training": training, "parallelism": parallelism}


@st.composite
def _models(draw: st.DrawFn, layers: int, *, experts: bool, latent: bool) -> Config:
    flag = st.booleans()
    groups = draw(st.sampled_from([4, 1, 2, 8]))
    heads = groups * draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([4, 8, 12]))
    parallel_block = draw(flag)
    norms_per_layer = draw(st.sampled_from([2, 4, 1] if parallel_block else [2, 4]))
    model: Config = {
        "num_layers": draw(st.integers(1, layers)),
        "hidden_size": draw(st.sampled_from([heads * head_dim, 48, 20, 7])),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "intermediate_size": draw(st.sampled_from([None, 24, 96, 200])),
        "vocab_size": draw(st.integers(1, 300)),
        "max_position_embeddings": POSITIONS,
        "position_embedding": draw(st.sampled_from(["learned", "rope", "alibi", "none"])),
        "normalization": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "norms_per_layer": norms_per_layer,
        "norm_placement": draw(st.sampled_from(["before", "after"])) if norms_per_layer == 2 else "before",
        "qk_norm_width": draw(st.sampled_from(["head", "each-head", "all-heads"])),
        "parallel_block": parallel_block,
        "mlp": draw(st.sampled_from(["gelu", "relu", "relu2", "swiglu", "geglu"])),
        "embedding_size": draw(st.sampled_from([None, None, 16])),
    }
    for name in ("final_norm", "embedding_norm", "qkv_bias", "output_bias", "mlp_bias", "lm_head_bias", "qk_norm"):
        model[name] = draw(flag)
    for name in ("norm_weight", "norm_bias", "qk_norm_weight"):
        model[name] = draw(st.sampled_from([True, True, False]))
    for name in ("tie_word_embeddings", "fused_qkv", "fused_gate_up"):
        model[name] = draw(flag)
    if experts and draw(flag):
        model["moe"] = draw(_experts(model["num_layers"]))
    if latent and draw(st.sampled_from([False, False, True])):
        model["head_dim"] = None
        model["mla"] = {
            "q_lora_rank": draw(st.sampled_from([0, 12])),
            "kv_lora_rank": draw(st.sampled_from([8, 20])),
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": draw(st.sampled_from([8, 12])),
        }
    return model


@st.composite
def _experts(draw: st.DrawFn, layers: int) -> Config:
    count = draw(st.integers(1, 6))
    return {
        "num_experts": count,
        "num_experts_per_token": draw(st.integers(1, count)),
        "expert_intermediate_size": draw(st.sampled_from([8, 24, 64])),
        "shared_expert_intermediate_size": draw(st.sampled_from([0, 16])),
        "shared_expert_gate": draw(st.booleans()),
        "first_dense_layers": draw(st.integers(0, layers)),
        "expert_interval": draw(st.sampled_from([1, 1, 2, 3])),
        "dense_layers": draw(st.lists(st.integers(0, layers - 1), max_size=2)),
        "expert_bias": draw(st.sampled_from([None, False, True])),
        "router_bias": draw(st.booleans()),
        "router_correction_bias": draw(st.booleans()),
    }


@st.composite
def _spreads(draw: st.DrawFn, model: Config, *, tensor: bool, pipeline: bool, data: bool) -> Config:
    engine, stage = draw(
        st.sampled_from([("ddp", 0), *(("deepspeed", n) for n in range(4)), ("fsdp2", 2), ("fsdp2", 3)])
    )
    ranks = [t for t in (1, 2, 4, 8) if model["num_key_value_heads"] % t == 0]
    split = draw(st.sampled_from(ranks)) if tensor else 1
    return {
        "engine": engine,
        "zero_stage": stage,
        "data_parallel": draw(st.integers(1, 5)) if data else 1,
        "tensor_parallel": split if (model["intermediate_size"] or 4 * model["hidden_size"]) % split == 0 else 1,
        "pipeline_parallel": draw(st.integers(1, model["num_layers"])) if pipeline and stage < 2 else 1,
        "sequence_parallel": draw(st.booleans()),
    }


@st.composite
def _trainings(draw: st.DrawFn, model: Config, optimizers: tuple[str, ...]) -> Config:
    recipe = draw(st.sampled_from(["mixed-20", "mixed-18", "mixed-16", "amp", "pure", "fp32"]))
    dtypes = {"fp32": ["fp32"], "pure": ["bf16", "fp16", "fp32"]}.get(recipe, ["bf16", "fp16"])
    layers = st.lists(st.integers(0, model["num_layers"] - 1), max_size=4)
    alibi = model["position_embedding"] == "alibi"  # no fused kernel adds ALiBi's bias
    dtype = draw(st.sampled_from(dtypes))
    optimizer = draw(st.sampled_from(optimizers))
    options = draw(_options(optimizer, masters=recipe.startswith("mixed")))
    paged = options.get("paged", False)
    return {
        "micro_batch_size": draw(st.integers(1, 4)),
        "sequence_length": 8 * draw(st.integers(1, 8)),
        "gradient_accumulation_steps": draw(st.sampled_from([1, 1, 2, 3])),
        "recipe": recipe,
        "dtype": dtype,
        "optimizer": optimizer,
        "optimizer_options": options,
        "optimizer_implementation": draw(
            st.sampled_from(("for-loop",) if paged else OPTIMIZERS[optimizer].implementations)
        ),
        "gradient_dtype": draw(st.sampled_from([None, "fp32", dtype])) if recipe == "mixed-18" else None,
        "gradient_clipping": draw(st.sampled_from([None, 1.0])),
        "ema": draw(st.sampled_from(["none", "none", "weights", "fp32"])),
        "zero_grad": draw(st.sampled_from(["set_to_none", "zero"])),
        "recompute": draw(st.sampled_from(["none", "selective", "full", "every-2", "every-3"]) | layers),
        "attention": "eager" if alibi else draw(st.sampled_from(["eager", "flash", "memory-efficient"])),
        "dropout": draw(st.sampled_from([None, 0.0, 0.1])),
        "logits_until": draw(st.sampled_from(["backward", "loss"])),
    }


@st.composite
def _adapters(draw: st.DrawFn, model: Config, recipe: str) -> Config:
    flag = st.booleans()
    lora: Config = {
        "rank": draw(st.integers(1, 16)),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "target_modules": draw(st.sampled_from(["all-linear", "attention", ["o_proj"]])),
        "adapter_dtype": draw(st.sampled_from([None, "compute"])),
        "base_dtype": draw(st.sampled_from([None, "compute"])) if recipe != "fp32" else None,
        "input_require_grads": draw(st.sampled_from([None, True, False])),
    }
    if not model["tie_word_embeddings"]:
        lora["modules_to_save"] = draw(st.sampled_from([[], ["lm_head"], ["embed_tokens", "lm_head"]]))
    qlora = {
        "quantization": draw(st.sampled_from(["nf4", "fp4"])),
        "double_quantization": draw(flag),
        "block_size": draw(st.sampled_from([32, 64, 256])),
        "quantize_lm_head": draw(flag),
    }
    return {"lora": lora, "qlora": draw(st.sampled_from([None, qlora]))}


@st.composite
def _options(draw: st.DrawFn, optimizer: str, *, masters: bool) -> Config:
    """Options of an optimizer that go together."""
    values: dict[str, list[object]] = {
        "amsgrad": [False, True],
        "centered": [False, True],
        "momentum": [None, 0.9],
        "nesterov": [None, True, False],
        "weight_decay": [None, 0.0, 0.1],
        "rank": [None, 3, 8],
        "paged": [False, True],
        "embeddings_32bit": [False] if masters else [False, True],
    }
    drawn = {name: draw(st.sampled_from(values[name])) for name in OPTIMIZERS[optimizer].options}
    if drawn.get("amsgrad"):
        drawn["paged"] = False
    return drawn


def by_stage(result: Result) -> dict[int, RankResult]:
    """The ranks by their pipeline stage."""
    return {rank.rank["pipeline_stage"]: rank for rank in result.ranks}


def states(rank: RankResult, phase: str = "optimizer_step_2") -> dict[tuple[Component, str, str], Row]:
    """The rows of weights, masters, gradients and optimizer states in a phase."""
    rows = [row for row in rank.ledger.rows if phase in row.phases and row.component in MODEL_STATES]
    table = {(row.component, row.module, row.tensor): row for row in rows}
    assert len(table) == len(rows), "a copy of a parameter has one row"
    return table


def held(result: Result, phase: str, *components: Component) -> int:
    """Bytes of some components at the peak of a phase, on the headline rank."""
    return sum(result.ledger.components(phase).get(component, 0) for component in components)


def gpt(l: int, d: int, h: int, V: int, **training: Any) -> tuple[Config, int]:  # noqa: E741, N803 -- the papers' symbols
    """The papers' GPT and its number of parameters: l(12d² + 13d) + Vd, the final norm's 2d, no positions."""
    model = {"l": l, "d": d, "h": h, "V": V, "position_embedding": "none"}
    return {"model": model, "training": training}, parameters(l, d, V) + 2 * d


def totals(config: Config, *overrides: str) -> dict[tuple[int, str], int]:
    """Allocated bytes by pipeline stage and phase."""
    ranks = by_stage(estimate(config, *overrides))
    return {(stage, phase): total for stage, rank in ranks.items() for phase, total in rank.ledger.totals.items()}


@st.composite
def gpts(draw: st.DrawFn, /, **training: object) -> tuple[Config, int, dict[str, int]]:
    """The papers' GPT at random sizes, its parameter count, and the sizes by their symbols."""
    sizes = {name: draw(st.integers(1, 6)) for name in ("l", "h", "b")}
    sizes |= {
        "d": sizes["h"] * draw(st.sampled_from([4, 8, 16])),
        "s": 8 * draw(st.integers(1, 8)),
        "V": 8 * draw(st.integers(1, 40)),
    }
    config, parameters = gpt(sizes["l"], sizes["d"], sizes["h"], sizes["V"], b=sizes["b"], s=sizes["s"], **training)
    return config, parameters, sizes


def changes_of(before: Result, after: Result, phase: str) -> dict[Component, int]:
    """What each component gained in a phase; block rounding left out."""
    old, new = before.ledger.components(phase), after.ledger.components(phase)
    gained = {component: new.get(component, 0) - old.get(component, 0) for component in Component}
    return {c: gain for c, gain in gained.items() if gain and c is not Component.BLOCK_ROUNDING}
