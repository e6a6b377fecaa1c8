"""Conservation and monotonicity over the dimensions of large runs: experts, contexts, schedules, Megatron's engine."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memcalc.api import estimate, load
from memcalc.layout.local_parameters import stage_parameters
from memcalc.layout.stages import stages_of
from memcalc.ledger.component import Component
from memcalc.ledger.result import RankResult
from memcalc.ledger.row import Row
from tests.properties.specs import Config, by_stage, examples, held, totals
from tests.properties.specs import states as all_states

ACTIVATIONS = Component.ACTIVATIONS
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipe-v")


def states(rank: RankResult) -> dict[tuple[Component, str, str], Row]:
    """The copies of parameters in the second step; tables of positions are no parameters."""
    return {key: row for key, row in all_states(rank).items() if key[1] != "buffers"}


@st.composite
def llamas(draw: st.DrawFn, *, implementation: str | None = None, experts: bool = False) -> Config:
    """A small Llama, dense or with experts, in plain modules or Megatron's, with a pipeline's worth of layers."""
    modules = implementation or draw(st.sampled_from(["plain", "megatron"]))
    groups = draw(st.sampled_from([2, 4, 8]))
    model: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 3)) * 8,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": groups,
        "intermediate_size": draw(st.sampled_from([64, 192])),
        "vocab_size": draw(st.integers(1, 500)),
        "position_embedding": "rope",
        "normalization": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "mlp": draw(st.sampled_from(["gelu", "swiglu"])),
        "qk_norm": draw(st.booleans()),
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    }
    for name in ("qkv_bias", "output_bias", "mlp_bias"):
        model[name] = draw(st.booleans())
    if experts:
        model["mlp"] = "swiglu"
        model["moe"] = {
            "num_experts": 8,
            "num_experts_per_token": draw(st.integers(1, 8)),
            "expert_intermediate_size": draw(st.sampled_from([16, 48])),
            "shared_expert_intermediate_size": draw(st.sampled_from([0, 32])),
            "first_dense_layers": draw(st.sampled_from([0, 3])),
        }
    training: dict[str, Any] = {
        "implementation": modules,
        "recipe": "mixed-18",
        "micro_batch_size": draw(st.integers(1, 2)),
        "sequence_length": 64 * draw(st.integers(1, 2)),
        "gradient_accumulation_steps": draw(st.sampled_from([1, 2, 8])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "recompute": draw(st.sampled_from(["none", "full", "selective"])),
    }
    return {"model": model, "training": training, "parallelism": {}}


@examples(40)
@given(llamas(experts=True), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_expert_shards_times_ranks_are_the_whole(config: Config, e: int, width: int) -> None:
    """e·t_e ranks hold the routed experts once, and everything else each for itself."""
    whole = states(estimate(config).headline)
    spread = {"expert_parallel": e, "expert_tensor_parallel": width, "data_parallel": e * width}
    shares = states(estimate(config | {"parallelism": spread}).headline)

    assert shares.keys() == whole.keys()
    for key, share in shares.items():
        _, module, tensor = key
        ranks = 1
        if ".experts." in module:
            ranks = e if module.endswith("down_proj") and tensor.startswith("bias") else e * width
        assert share.count == whole[key].count
        assert prod(share.shape) * ranks == prod(whole[key].shape), key


@examples(30)
@given(llamas(experts=True, implementation="megatron"), st.sampled_from([2, 4, 8]))
def test_the_distributed_optimizer_shards_experts_over_their_own_copies(config: Config, e: int) -> None:
    """8 data-parallel ranks in e expert-parallel groups: 8/e copies of each expert, 8 of everything else."""
    spread = {"engine": "megatron", "zero_stage": 1, "data_parallel": 8, "expert_parallel": e}
    whole = states(estimate(config).headline)
    for (component, module, tensor), share in states(estimate(config | {"parallelism": spread}).headline).items():
        if component not in (Component.MASTER_WEIGHTS, Component.OPTIMIZER_STATE):
            continue
        full = prod(whole[component, module, tensor].shape)
        assert 0 <= 8 * prod(share.shape) - full < 8 * (e if ".experts." in module else 1), (module, tensor)


@examples(40)
@given(llamas(), st.sampled_from([2, 4, 8]), st.sampled_from(["ring", "all-to-all"]))
def test_context_parallel_ranks_keep_together_what_one_keeps(config: Config, c: int, method: str) -> None:
    """Every activation is split along the sequence; attention's output is kept twice: before and after an exchange of
    heads, and by head and by token where PyTorch's ring attention merges it.
    """
    whole = held(estimate(config), "loss_1", ACTIVATIONS)
    spread = {"context_parallel": c, "context_parallel_method": method}
    share = held(estimate(config | {"parallelism": spread}), "loss_1", ACTIVATIONS)

    training, model = config["training"], config["model"]
    twice = 0
    copied = method == "ring" and training["implementation"] == "plain" and training["recompute"] == "none"
    if copied or (
        method == "all-to-all" and training["implementation"] == "megatron" and training["recompute"] != "full"
    ):
        twice = model["num_layers"] * 2 * training["micro_batch_size"] * training["sequence_length"] * 64
        # Selective recomputation makes attention's own output again, so that only the exchanged one is kept.
        twice = 0 if training["recompute"] == "selective" else twice
    assert c * share == whole + twice


@examples(30)
@given(llamas(), st.sampled_from([2, 4]))
def test_context_parallel_ranks_hold_the_same_states_and_share_them_under_zero(config: Config, c: int) -> None:
    alone = states(estimate(config).headline)
    beside = states(estimate(config | {"parallelism": {"context_parallel": c, "engine": "megatron"}}).headline)
    assert {key: row.shape for key, row in alone.items()} == {key: row.shape for key, row in beside.items()}

    shared = config | {"parallelism": {"context_parallel": c, "engine": "megatron", "zero_stage": 1}}
    split = config | {"parallelism": {"data_parallel": c, "engine": "megatron", "zero_stage": 1}}
    both = [{key: row.bytes for key, row in states(estimate(run).headline).items()} for run in (shared, split)]
    assert both[0] == both[1]


@examples(30)
@given(llamas(), st.sampled_from([4, 8]))
def test_more_ranks_than_key_value_heads_hold_copies_of_them(config: Config, t: int) -> None:
    """Each of t ranks has t/h_kv-th of the copies of one head: q splits, k and v do not beyond their heads."""
    model = config["model"] | {"num_key_value_heads": 2, "fused_qkv": False}
    spec = load(config | {"model": model, "parallelism": {"tensor_parallel": t}})
    rows = {row.module.rpartition(".")[2]: row for row in stage_parameters(spec, next(iter(stages_of(spec))))}

    query, key_value = 64 // t, 64 // 8
    assert rows["qkv_proj"].shape[0] == query + 2 * key_value  # whatever t beyond two: one head of 8
    assert rows["o_proj"].shape[-1] * t == 64 or rows["o_proj"].tensor == "bias"


@examples(30)
@given(llamas(), st.sampled_from(SCHEDULES), st.sampled_from([2, 4]))
def test_stages_of_every_schedule_sum_to_the_whole(config: Config, schedule: str, stages: int) -> None:
    """DualPipe holds everything twice; nothing else is held twice."""
    virtual = 2 if schedule == "interleaved" else 1
    spread = {"pipeline_parallel": stages, "schedule": schedule, "virtual_stages": virtual}
    whole = states(estimate(config).headline)
    sums: dict[tuple[Any, ...], int] = {}
    for rank in estimate(config | {"parallelism": spread}).ranks:
        for key, row in states(rank).items():
            sums[key] = sums.get(key, 0) + row.bytes

    times = 2 if schedule == "dualpipe" else 1
    assert sums == {key: times * row.bytes for key, row in whole.items()}


@examples(30)
@given(llamas(), st.sampled_from(SCHEDULES), st.integers(1, 30))
def test_no_phase_falls_with_the_micro_batches(config: Config, schedule: str, further: int) -> None:
    spread = {"pipeline_parallel": 4, "schedule": schedule, "virtual_stages": 2 if schedule == "interleaved" else 1}
    config = config | {"parallelism": spread}
    m = config["training"]["gradient_accumulation_steps"]
    less, more = totals(config), totals(config, f"gradient_accumulation_steps={m + further}")

    assert {key: (less[key], more[key]) for key in less if more[key] < less[key]} == {}


@examples(30)
@given(llamas(), st.sampled_from(["context_parallel", "expert_parallel"]))
def test_no_phase_rises_with_what_splits_the_work(config: Config, dimension: str) -> None:
    """Ranks that share sequences or experts hold less of them, and buffers for what they exchange."""
    if dimension == "expert_parallel":
        config["model"]["moe"] = {"num_experts": 8, "num_experts_per_token": 2, "expert_intermediate_size": 64}
        config["model"]["mlp"] = "swiglu"
    engine = {"engine": "megatron", "data_parallel": 4}
    before, after = (by_stage(estimate(config | {"parallelism": engine | {dimension: n}})) for n in (2, 4))
    less, more = (rank[0].ledger.totals for rank in (after, before))

    assert {phase: (less[phase], more[phase]) for phase in less if less[phase] > more[phase]} == {}


@examples(30)
@given(llamas(implementation="megatron"), st.sampled_from(["b", "s", "l", "V"]))
def test_megatron_needs_no_less_for_more_of_anything(config: Config, symbol: str) -> None:
    training, model = config["training"], config["model"]
    more = {
        "b": training["micro_batch_size"] + 1,
        "s": training["sequence_length"] + 64,
        "l": model["num_layers"] + 8,
        "V": model["vocab_size"] + 129,
    }[symbol]
    config["parallelism"] = {"tensor_parallel": 2, "sequence_parallel": True, "zero_stage": 1, "data_parallel": 4}
    less, larger = totals(config), totals(config, f"{symbol}={more}")

    assert {key: (less[key], larger[key]) for key in less if larger[key] < less[key]} == {}


@examples(20)
@given(st.sampled_from([(8, 2), (8, 4), (64, 8)]), st.sampled_from([2, 3]))
def test_hybrid_sharding_shards_inside_its_groups(ranks: tuple[int, int], stage: int) -> None:
    """N ranks in g groups hold what N/g ranks of one group hold."""
    n, groups = ranks
    fsdp = {"engine": "fsdp2", "zero_stage": stage}
    hybrid = estimate(
        "llama-3.2-1b",
        *(f"{k}={v}" for k, v in fsdp.items()),
        f"data_parallel={n}",
        f"data_parallel_replicate={groups}",
    )
    plain = estimate("llama-3.2-1b", *(f"{k}={v}" for k, v in fsdp.items()), f"data_parallel={n // groups}")

    assert hybrid.ledger.totals == plain.ledger.totals
