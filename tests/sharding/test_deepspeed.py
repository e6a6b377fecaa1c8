"""What DeepSpeed's ZeRO allocates: by hand for a small model, and beside recorded ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.allocator.pytorch.constants import STREAM_SHIFT
from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.sharding.engine import ROOT
from memcalc.sharding.engines import SAMPLED_RANKS, ranks_to_replay
from memcalc.sharding.parameter_groups import has_weight_decay, parameter_groups
from memcalc.sharding.zero3 import ZeRO3
from memcalc.sharding.zero3_modules import reference_modules
from memcalc.sharding.zero3_order import Order
from memcalc.sharding.zero12 import FlatGroup, WaitingGradient, bucket_slices, reduced_together
from memcalc.simulation.simulated_run import SimulatedRun, run_requests, simulate, unsupported_reason
from memcalc.spec.spec import Spec
from memcalc.spec.zero import ZeroSpec
from memcalc.stream.requests import Requests
from tests.sharding.small_model import RANKS, VOCAB, WIDTH, sizes
from tests.thinning import quick_every
from tools.recorded_errors import recorded_spec

MIB = 2**20
BUCKET = 500_000_000
RECORDS = Path(__file__).parents[2] / "benchmarks" / "recordings" / "reserved"
LAYERS = 2
SMALL = (*sizes(LAYERS), "recipe=mixed-16", "engine=deepspeed")
MATRICES = [3 * WIDTH**2, WIDTH**2, *[4 * WIDTH**2] * 3]  # of a layer: q, k and v in one, o, gate, up, down
LAYER = sum(MATRICES) + 2 * WIDTH
ELEMENTS = LAYERS * LAYER + 2 * VOCAB * WIDTH + WIDTH
LARGE = MIB  # bytes: what is smaller is left out


def small(*words: str) -> Spec:
    return memcalc.load("llama-3.2-1b", *SMALL, *words)


def asked(spec: Spec, phase: str) -> list[tuple[int, int]]:
    """Stream and bytes of a phase's large requests, in order."""
    found: list[tuple[int, int]] = []
    for stretch in run_requests(spec, rank=0).stretches:
        if stretch.phase == phase:
            found += [(each >> STREAM_SHIFT, each % (1 << STREAM_SHIFT)) for each in stretch.script if each > 0]
        elif found:
            break
    return [each for each in found if each[1] > LARGE]


def on_streams(spec: Spec, phase: str) -> list[tuple[int, int]]:
    return [each for each in asked(spec, phase) if each[0]]


# -- stages 1 and 2 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_flattened_and_the_share_has_a_master(stage: int) -> None:
    """The flat weights; the share, in fp32; zeros in the shape of its gradient."""
    share = ELEMENTS // RANKS

    assert asked(small(f"zero_stage={stage}"), "optimizer") == [
        (0, 2 * ELEMENTS),
        (0, 2 * share),
        (0, 4 * share),
        (0, 4 * share),
    ]


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_weights_are_cloned_without_a_cast(stage: int) -> None:
    """stage_1_and_2.py, single_partition_of_fp32_groups; the flattened gradient is the one that is updated with."""
    spec = small(f"zero_stage={stage}", "recipe=fp32", "dtype=fp32", "optimizer_implementation=fused")
    share = 4 * ELEMENTS // RANKS

    assert asked(spec, "optimizer") == [(0, 4 * ELEMENTS), (0, share), (0, share)]
    assert asked(spec, "optimizer_step_1")[-3:] == [(0, share)] * 3  # the gradient, and Adam's moments
    masters = [row for row in memcalc.estimate(spec).ledger.rows if row.component is Component.MASTER_WEIGHTS]
    assert sum(row.bytes for row in masters) == share


@pytest.mark.parametrize("stage", [1, 2])
def test_the_weights_go_when_they_have_been_flattened(stage: int) -> None:
    stretches = [each for each in run_requests(small(f"zero_stage={stage}")).stretches if each.phase == "optimizer"]
    script = next(each.script for each in stretches if each.after_empty_cache)
    parameters = LAYERS * (len(MATRICES) + 2) + 3

    assert sum(change < 0 for change in script[: 1 + parameters]) == parameters


@pytest.mark.parametrize("stage", [1, 2])
def test_all_gradients_go_through_one_bucket(stage: int) -> None:
    """Flattened once more as they are reduced; those of parameters that begin in the first share stay."""
    found = asked(small(f"zero_stage={stage}"), "backward_1")
    assert found.count((0, 2 * BUCKET)) == 1
    assert found[-2:] == [(0, 2 * ELEMENTS), (0, 2 * own(ELEMENTS // RANKS))]


def own(share: int) -> int:
    """Elements of the parameters that begin in the first share."""
    found = 0
    for elements in (VOCAB * WIDTH, *([WIDTH, *MATRICES[:2], WIDTH, *MATRICES[2:]] * LAYERS)):
        if found >= share:
            break
        found += elements
    return found


def test_stage_2_adds_micro_batches_up_in_the_ranks_own_gradients() -> None:
    """Each micro-batch has a bucket and gradients of its own, of which the first one's stay."""
    one = asked(small("zero_stage=2"), "backward_1")
    words = ("zero_stage=2", "gradient_accumulation_steps=2")
    script = [each for each in run_requests(small(*words)).stretches if each.phase == "backward_1"]

    assert len(script) == 2
    assert asked(small(*words), "backward_1") == one


def test_the_step_updates_one_flat_tensor() -> None:
    """In fp32: the gradient, then Adam's moments."""
    share = ELEMENTS // RANKS
    found = asked(small("zero_stage=2", "optimizer_implementation=fused"), "optimizer_step_1")

    assert found[-4:] == [(0, 2 * share), (0, 4 * share), (0, 4 * share), (0, 4 * share)]


def test_slices_of_one_rank_are_flattened_together() -> None:
    """A slice alone is not copied; of what is larger than the bucket slices go together until they exceed it."""
    share = 300_000_000
    groups = [FlatGroup([0, 700_000_000], 0, share, range(share))]

    def sizes(*waiting: WaitingGradient) -> list[list[int]]:
        together = reduced_together(bucket_slices(waiting, groups), 500_000_000, lambda each: each.elements)
        return [[each.elements for each in slices] for slices in together]

    assert sizes(WaitingGradient(0, 0, 10, None), WaitingGradient(0, 10, 20, None)) == [[30]]
    assert sizes(WaitingGradient(0, share - 5, 15, None)) == [[5, 10]]
    assert sizes(WaitingGradient(0, 0, 700_000_000, 1)) == [[share, share], [100_000_000]]


@pytest.mark.parametrize("rank", [None, 19_998])
def test_ranks_with_padding_alone_are_left_out(rank: int | None) -> None:
    """gpt2 on 19,999 ranks: its 124,439,808 parameters are padded to 3,112 * 39,998, or 6,224 elements a rank.

    The last element is on rank 124,439,807 // 6,224 = 19,993; the 5 ranks after it have no gradients.
    """
    words = ("zero_stage=2", "engine=deepspeed", "data_parallel=19999")
    spec = memcalc.load("gpt2", *words, gpu="h100-80gb")

    assert simulate(spec, rank=rank).tops == simulate(spec, rank=19_993).tops
    assert simulate(spec, rank=0).tops != simulate(spec, rank=19_993).tops  # it has the first parameters
    assert memcalc.estimate(spec).verdict == "fits"


def test_with_overlap_gradients_fill_one_bucket_while_another_is_reduced() -> None:
    """Both are allocated at the first gradient; reductions run on a stream of their own."""
    overlap = "zero_optimization.overlap_comm=true"
    alone, both = small("zero_stage=2"), small("zero_stage=2", overlap)
    found = asked(both, "backward_1")

    assert found.count((0, 2 * BUCKET)) == 1 + asked(alone, "backward_1").count((0, 2 * BUCKET)) == 2
    assert [each for _, each in found if each != 2 * BUCKET] == [
        each for _, each in asked(alone, "backward_1") if each != 2 * BUCKET
    ]
    assert on_streams(alone, "backward_1") == []
    assert on_streams(both, "backward_1")[-1] == (2, 2 * own(ELEMENTS // RANKS))
    before, after = (memcalc.estimate(each).headline.ledger.peak_bytes for each in (alone, both))
    assert after - before == pytest.approx(2 * BUCKET, abs=MIB)


def test_parameters_without_weight_decay_are_a_group_of_their_own() -> None:
    """Of the small model these are norms; each group has a flat tensor, a partition and an update."""
    norms = (2 * LAYERS + 1) * WIDTH
    spec = small("zero_stage=2", "optimizer_implementation=fused", "zero_optimization.separate_no_decay=true")
    script = [
        each
        for stretch in run_requests(spec, rank=0).stretches
        if stretch.phase == "optimizer"
        for each in stretch.script
    ]

    assert asked(spec, "optimizer")[0] == (0, 2 * (ELEMENTS - norms))
    assert {2 * norms, norms // 2, norms} <= set(script)  # flat, the rank's part in bf16, and in fp32
    assert asked(spec, "optimizer_step_1")[-1] == (0, 4 * ((ELEMENTS - norms) // RANKS))


@pytest.mark.parametrize(
    ("module", "tensor", "decays"),
    [("layers.*.input_norm", "weight", False), ("layers.*.mlp.up_proj", "bias", False), ("lm_head", "weight", True)],
)
def test_norms_and_biases_have_no_weight_decay(module: str, tensor: str, decays: bool) -> None:
    parameter = LocalParameter(module, tensor, (("d", 8),), 1, "layer")
    both = parameter_groups([parameter], [0], ZeroSpec(separate_no_decay=True))

    assert has_weight_decay(parameter) is decays
    assert both == [[0]]  # a group without parameters is left out


# -- stage 3 -----------------------------------------------------------------------------------------------------------


def test_modules_are_gathered_one_by_one_in_the_first_step() -> None:
    """On the stream of all-gathers; the norm's weight is below a MiB."""
    matrices = [(1, 2 * VOCAB * WIDTH), *[(1, 2 * size) for size in MATRICES] * LAYERS, (1, 2 * VOCAB * WIDTH)]

    assert on_streams(small("zero_stage=3"), "forward_1") == matrices


def test_modules_are_prefetched_from_the_second_step_on() -> None:
    """50 million elements are prefetched at once, which is all but the norms: out of one buffer each is copied."""
    end = (1, 2 * VOCAB * WIDTH)
    norms = (2 * LAYERS + 1) * WIDTH

    copies = [end, *[(1, 2 * size) for size in MATRICES] * LAYERS, end]
    assert on_streams(small("zero_stage=3"), "forward_2") == [(1, 2 * (ELEMENTS - norms)), *copies]


def test_without_overlap_there_is_one_stream() -> None:
    spec = small("zero_stage=3", "zero_optimization.overlap_comm=false")

    assert [on_streams(spec, phase) for phase in ("forward_2", "backward_2")] == [[], []]


def test_an_evaluation_gathers_what_training_would_keep() -> None:
    """Modules are in the known order, so parameters stay gathered for the backward that does not come."""
    spec = small("zero_stage=3", "evaluation_batch_size=1")
    end, norms = (1, 2 * VOCAB * WIDTH), (2 * LAYERS + 1) * WIDTH

    assert unsupported_reason(spec) == ""
    found = on_streams(spec, "evaluation")
    assert found == [(1, 2 * (ELEMENTS - norms)), end, *[(1, 2 * size) for size in MATRICES] * LAYERS, end]


def test_fp32_adapters_are_gathered_into_a_buffer_of_their_own() -> None:
    """All parameters of one fetch share a buffer for each dtype, bf16 before fp32."""
    words = ("zero_stage=3", "finetune=lora", "lora.rank=512", "lora.target_modules=[down_proj]")
    spec = small(*words, "lora.adapter_dtype=fp32")
    adapters = 2 * LAYERS * 512 * (4 * WIDTH + WIDTH) // 2

    assert unsupported_reason(spec) == ""
    found = on_streams(spec, "forward_2")
    assert found[1] == (1, 4 * adapters)
    assert (1, 4 * 512 * 4 * WIDTH) in found  # an adapter, copied out


def test_gradients_are_reduced_on_a_third_stream() -> None:
    found = on_streams(small("zero_stage=3"), "backward_2")

    assert found[-1] == (2, 2 * ELEMENTS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_releases_before_0_19_6_scale_the_gradient_of_the_output(stage: int) -> None:
    """By a copy of all logits in 16 bits, b*s*V elements (DeepSpeed runtime/engine.py)."""
    words, logits = (f"zero_stage={stage}", "s=512"), (0, 2 * 512 * VOCAB)
    counts = [
        asked(small(*words, f"versions.deepspeed={release}"), "backward_2").count(logits)
        for release in ("0.19.0", "0.19.5", "0.19.6")
    ]

    assert counts[0] == counts[1] == counts[2] + 1


def test_the_modules_of_a_layer_in_backward() -> None:
    """What holds others begins before them; the last matrix has begun when a layer runs again, and is not released."""
    spec = small("zero_stage=3", "recompute=full")
    rehearsal = SimulatedRun(spec, Requests())
    modules = reference_modules(rehearsal.ordered, rehearsal.units, tied=False)
    order = Order(modules, stops_inside=True)
    turns = [turn for turn in order.turns(((0,), (1,))) if turn.unit == 1 and turn.backward]
    named = [(next(iter(turn.names)).rpartition(".")[2], turn.again) for turn in turns if turn.names]

    assert named == [
        ("down_proj", False),
        ("input_norm", True),
        ("qkv_proj", True),
        ("o_proj", True),
        ("post_attention_norm", True),
        ("gate_proj", True),
        ("up_proj", True),
        ("down_proj", True),
        ("up_proj", False),
        ("gate_proj", False),
        ("post_attention_norm", False),
        ("o_proj", False),
        ("qkv_proj", False),
        ("input_norm", False),
    ]
    assert [turn.releases for turn in turns if "mlp.down_proj" in turn.names] == [False, False]
    assert {turn.unit for turn in order.turns((0, 1))} == {ROOT, 0, 1}


# -- losses that read the LM head's weight ------------------------------------------------------------------------------

# TRL's SFT computes its loss in the model's own forward.
IN_MODEL = ("implementation=huggingface", "framework=sft", "loss=tiled")
END = 2 * VOCAB * WIDTH  # bytes of the embedding, or of the LM head


def test_a_model_that_reads_the_head_gathers_it_first() -> None:
    """At its first read on the default stream; from the second micro-batch on with the model's own module."""
    spec = small("zero_stage=3", *IN_MODEL)

    assert (1, END) not in on_streams(spec, "loss_1")
    assert asked(spec, "loss_1")[0] == (0, END)
    assert on_streams(spec, "forward_1")[0] == (1, END)  # the embedding
    assert on_streams(spec, "forward_2")[0] == (1, END)  # the LM head, before the buffer with all that is prefetched
    assert (0, END) not in asked(spec, "loss_2")
    assert on_streams(spec, "backward_1")[0] == (1, END)


def test_what_no_hook_frees_is_freed_after_backward() -> None:
    """Then the embedding and the LM head are gathered again for each micro-batch."""
    words = ("zero_stage=3", *IN_MODEL, "gradient_accumulation_steps=3")
    before, since = (small(*words, f"versions.deepspeed={release}") for release in ("0.19.2", "0.19.3"))
    counts = [
        sum(
            size % (1 << STREAM_SHIFT) == END
            for stretch in run_requests(spec, rank=0).stretches
            if stretch.phase == "forward_2"
            for size in stretch.script
            if size > 0
        )
        for spec in (before, since)
    ]

    assert counts == [4, 12]  # of two steady steps with three micro-batches each


@pytest.mark.parametrize(("release", "modules"), [("0.20.0", 1), ("0.21.0", 2)])
def test_lora_calls_the_model_with_its_hooks_since_a_release(release: str, modules: int) -> None:
    """peft tuners/tuners_utils.py, BaseTuner.forward: the model's module counts once more, in forward and backward."""
    words = ("zero_stage=3", "implementation=huggingface", "lora.rank=8")
    alone, wrapped = (
        SimulatedRun(small(*words, *more), Requests()).engine
        for more in ((), ("framework=trainer", f"versions.peft={release}"))
    )
    assert isinstance(alone, ZeRO3)
    assert isinstance(wrapped, ZeRO3)

    assert len(wrapped.turns) - len(alone.turns) == 2 * (modules - 1)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_in_parts_is_reduced_with_its_last_part(stage: int) -> None:
    """Three chunks make three parts; the sum of the first two is a tensor of its own."""
    spec = small(f"zero_stage={stage}", "loss=chunked", "loss_chunks=3")
    found = asked(spec, "backward_1")

    assert found[: found.index((0, 2 * BUCKET))].count((0, END)) == 4


# -- DPO at stage 3 ----------------------------------------------------------------------------------------------------

TABLE = 2 * VOCAB * WIDTH  # bytes of the embedding, and of the LM head
STAY = 2 * (2 * LAYERS + 1) * WIDTH  # bytes of norms, which stay gathered


def gathered(phase: str, *words: str) -> int:
    rows = memcalc.estimate(small("zero_stage=3", "pairs=true", *words)).ledger.rows
    return sum(row.bytes for row in rows if row.tensor == "parameters, gathered" and phase in row.phases)


def test_a_reference_model_has_small_parameters_gathered_in_backward() -> None:
    """All of the policy is gathered, as its backward uses it again; no backward of the reference follows."""
    assert gathered("backward_2", "reference_model=true") == 2 * ELEMENTS + STAY


def test_a_reference_model_that_reads_its_head_keeps_it() -> None:
    words = ("reference_model=true", "implementation=huggingface", "framework=dpo", "loss=chunked")

    assert gathered("backward_2", *words) == 2 * ELEMENTS + TABLE + STAY


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_reference_model_is_whole_where_weights_are_not_sharded(stage: int) -> None:
    """TRL 1.16 models/utils.py, prepare_deepspeed: its engine has stage 0, and moves it to the GPU before the policy."""
    given = (f"zero_stage={stage}", "pairs=true")
    alone, both = (asked(small(*given, f"reference_model={each}"), "model") for each in ("false", "true"))

    assert both == alone * 2


def test_a_reference_model_at_stage_3_is_sharded_after_the_policy() -> None:
    given = ("zero_stage=3", "pairs=true")
    alone, both = (asked(small(*given, f"reference_model={each}"), "model") for each in ("false", "true"))

    assert both == alone * 2


def test_fp32_modules_are_cast_before_they_are_sharded() -> None:
    """partition_parameters.py, zero_wrapper_for_fp_tensor_constructor: each weight in fp32, in 16 bits, its shard."""
    cast = asked(small("zero_stage=3", "zero_optimization.casts_fp32_weights=true"), "model")

    assert cast[:3] == [(0, 4 * VOCAB * WIDTH), (0, 2 * VOCAB * WIDTH), (0, 2 * VOCAB * WIDTH // RANKS)]


def test_a_reference_model_is_gathered_on_a_stream_apart_from_the_policys() -> None:
    """Its order of modules is known from the second micro-batch on, in which all of it is prefetched."""
    spec = small("zero_stage=3", "pairs=true", "reference_model=true")

    assert {stream for stream, _ in on_streams(spec, "forward_2")} == {1}
    assert {stream for stream, _ in on_streams(spec, "loss_2")} == {3}
    assert sum(size for _, size in on_streams(spec, "loss_2")) >= 2 * (ELEMENTS - STAY)


RANK = 8
NARROW = 2 * RANK * WIDTH  # bytes of a matrix of an adapter with the hidden size
# Of a layer: of q, k, v, o, gate, up and down.
INTO = 6 * NARROW + 4 * NARROW
OUT_OF = 4 * NARROW + 2 * 4 * NARROW + NARROW
ITSELF = ("pairs=true", f"lora.rank={RANK}")  # DPO with adapters and no second model
REENTRANT = ("implementation=huggingface", "framework=dpo", "recompute=full", "reentrant_checkpoints=true")


def test_a_policy_that_scores_itself_gathers_one_module_at_a_time() -> None:
    """Its second forward has ended the recorded order of modules: none are prefetched, and none stay."""
    assert gathered("forward_2", *ITSELF) == TABLE


def test_its_second_forward_prefetches_until_an_adapter_is_missing() -> None:
    """One bucket has all parameters, which are copied out of it when the order ends. Both are live, then freed."""
    assert gathered("loss_2", *ITSELF) == 2 * (2 * ELEMENTS + LAYERS * (INTO + OUT_OF))


def test_its_backward_keeps_what_it_gathers() -> None:
    """The second forward has reset the counts by which a module's end in backward is known, except in adapters.

    The embedding, and q, k and v of the first layer have no input that needs a gradient. The peak is before the last
    two adapters of these.
    """
    first = 2 * 3 * WIDTH**2

    assert gathered("backward_2", *ITSELF) == 2 * ELEMENTS - TABLE - first + LAYERS * INTO - 2 * NARROW


def test_a_reentrant_checkpoint_keeps_frozen_parameters_until_backward_has_ended() -> None:
    """The embedding is gathered last, since its output needs a gradient. No adapter is left by then."""
    assert gathered("backward_2", *ITSELF, *REENTRANT) == 2 * ELEMENTS


# -- recorded ranks ----------------------------------------------------------------------------------------------------


def recorded() -> list[dict[str, Any]]:
    """Return the recorded runs of rank 0."""
    lines = (line for path in sorted(RECORDS.glob("*.jsonl")) for line in path.read_text().splitlines())
    records = [json.loads(line) for line in lines]
    return [each for each in records if "engine=deepspeed" in each["case"] and " rank=" not in each["case"]]


EXACT = (
    "llama-3.2-1b b=1 s=2048 attention=flash recipe=mixed-16 engine=deepspeed zero_stage=1 data_parallel=8",
    "gpt2-large b=4 s=1024 attention=flash recipe=mixed-16 dropout=0.1 engine=deepspeed zero_stage=2 data_parallel=64",
    (
        "ernie-4.5-0.3b num_layers=3 b=6 s=917 recipe=mixed-16 attention=flash dropout=0 gradient_accumulation_steps=3 "
        "optimizer=momentum optimizer_implementation=fused implementation=plain engine=deepspeed zero_stage=1 "
        "data_parallel=64"
    ),
    "mistral-7b num_layers=12 b=1 s=512 recipe=mixed-16 engine=deepspeed zero_stage=2 data_parallel=8 recompute=full",
    "llama-3.2-1b b=1 s=2048 attention=flash recipe=mixed-16 engine=deepspeed zero_stage=3 data_parallel=8",
    "llama-3.2-1b b=1 s=128 recipe=mixed-16 engine=deepspeed zero_stage=3 data_parallel=64 recompute=full",
    "qwen3-8b num_layers=6 b=1 s=512 recipe=mixed-16 engine=deepspeed zero_stage=3 data_parallel=2",
    "mixtral-8x7b num_layers=2 b=1 s=512 recipe=mixed-16 engine=deepspeed zero_stage=3 data_parallel=8",
    "gpt2-xl b=1 s=1024 attention=flash recipe=mixed-16 engine=deepspeed zero_stage=3 data_parallel=64 dropout=0.1",
    "llama-3.2-1b b=2 s=1024 recipe=mixed-16 loss=chunked engine=deepspeed zero_stage=2 data_parallel=8",
    "llama-3-8b num_layers=4 b=1 s=2048 recipe=mixed-16 loss=fused engine=deepspeed zero_stage=1 data_parallel=8",
    (
        "mistral-7b num_layers=6 b=1 s=2048 recipe=mixed-16 optimizer=adam-8bit implementation=huggingface "
        "engine=deepspeed zero_stage=3 data_parallel=2 recompute=full"
    ),
    (
        "qwen2.5-7b num_layers=6 b=2 s=1024 recipe=mixed-16 finetune=qlora lora.rank=64 lora.adapter_dtype=compute "
        "implementation=huggingface engine=deepspeed zero_stage=2 data_parallel=8 recompute=full"
    ),
)


@pytest.mark.parametrize("case", EXACT)
def test_a_recorded_rank_reserves_as_replayed(case: str) -> None:
    """Real DeepSpeed on the null CUDA device, one rank of many: byte-exact."""
    record = next(each for each in recorded() if each["case"] == case)
    spec = recorded_spec(record)

    assert simulate(spec, rank=0).reserved_bytes == max(record["reserved"].values())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_loss_in_chunks_is_estimated(stage: int, steps: int) -> None:
    """Its head's gradient is produced chunk by chunk: one gradient, and with earlier micro-batches none."""
    words = (f"zero_stage={stage}", f"gradient_accumulation_steps={steps}", "loss=chunked")

    assert memcalc.estimate(small(*words)).ledger.peak_bytes > 0


OTHERS = "null-h100-80gb-torch-2.13.0-other-ranks.jsonl"


@pytest.mark.parametrize("record", [json.loads(line) for line in (RECORDS / OTHERS).read_text().splitlines()])
def test_other_ranks_reserve_as_replayed(record: dict[str, Any]) -> None:
    """At stage 2 the last rank's own gradients are allocated at the first reduction: it holds most, to the byte.

    At stage 1 what the last one allocates is known, its reserved memory in one of two runs.
    """
    rank = int(record["case"].partition("rank=")[2].split()[0])
    spec = recorded_spec(record)
    found, most = simulate(spec, rank=rank), simulate(spec)

    assert max(whole for whole, _ in found.tops.values()) == pytest.approx(max(record["phases"].values()), abs=2048)
    assert most.reserved_bytes >= max(record["reserved"].values())
    if spec.parallelism.zero_stage == 2:
        assert found.reserved_bytes == max(record["reserved"].values())


STAGE_1 = [
    json.loads(line)
    for path in sorted(RECORDS.glob("null-a100-80gb-torch-2.13.0-stage-1-ranks*.jsonl"))
    for line in path.read_text().splitlines()
]


@pytest.mark.parametrize("record", quick_every(3, STAGE_1))
def test_other_ranks_of_stage_1_reserve_as_replayed(record: dict[str, Any]) -> None:
    """Three are of a run of which the second rank reserves most, five were drawn when it was replayed.

    The last rank of gemma-2-2b over four GPUs, one of these, keeps the gradient of the table until the reduction ends,
    because it is larger than a bucket. It was freed at once before, and 10 % too little was replayed. Six more ranks
    (held-out) were drawn after this correction.
    """
    rank, spec = int(record["case"].partition("rank=")[2]), recorded_spec(record)
    found = simulate(spec, rank=rank)

    assert rank in {*ranks_to_replay(spec)} or spec.parallelism.data_parallel > SAMPLED_RANKS
    assert max(whole for whole, _ in found.tops.values()) == pytest.approx(max(record["phases"].values()), abs=2048)
    assert max(record["reserved"].values()) == found.reserved_bytes


# Eager attention, and checkpoints of every third layer: allocated memory is 1.1 % over the replay, not explained.
EXPERTS_IN_FP32 = "olmoe-1b-7b num_layers=2 b=5 s=512 recipe=fp32 attention=eager recompute=every-3 "


@pytest.mark.long
def test_recorded_ranks() -> None:
    """Six of 194 are not byte-exact; with weights in host memory up to 3.7 % too high.

    The estimate holds a rank's shard of a prefetched parameter longest.
    """
    errors: list[tuple[float, float]] = []
    on_host: list[float] = []
    for record in recorded():
        spec = recorded_spec(record)
        if not unsupported_reason(spec):
            found = simulate(spec, rank=0)
            allocated = max(record["phases"].values()) / max(whole for whole, _ in found.tops.values()) - 1
            reserved = max(record["reserved"].values()) / found.reserved_bytes - 1
            if spec.parallelism.offload == "all":
                on_host += [allocated, reserved]
            elif record["case"].startswith(EXPERTS_IN_FP32):
                assert (allocated, reserved) == (pytest.approx(0.011, abs=0.0002), 0)
            else:
                errors.append((abs(reserved), abs(allocated)))

    assert len(errors) >= 170
    assert sum(reserved == 0 for reserved, _ in errors) >= 0.98 * len(errors)
    assert max(errors)[0] < 0.0004
    assert max(allocated for _, allocated in errors) < 0.0003
    assert -0.037 < min(on_host) <= max(on_host) < 0.0001


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("zero_stage=0", "recipe=pure"), "DeepSpeed and recipe pure in bf16 (its own is mixed-16)"),
        (("zero_stage=2", "recipe=pure"), "DeepSpeed and recipe pure in bf16 (its own is mixed-16)"),
        (("zero_stage=3", "recipe=fp32", "dtype=fp32"), "DeepSpeed and recipe fp32 in fp32"),
        (("zero_stage=2", "optimizer=adafactor"), "DeepSpeed and optimizer adafactor"),
        (("zero_stage=2", "ema=fp32"), "DeepSpeed and an average of the weights"),
        (("zero_stage=3", "qlora.block_size=64", "lora.rank=8"), "ZeRO stage 3 and 4-bit weights"),
        (("zero_stage=2", "loss=vocab-parallel"), "DeepSpeed and a loss that is vocab-parallel"),
        (("zero_stage=3", "framework=grpo"), "ZeRO stage 3 and scores of completions"),
        (("zero_stage=3", "loss=chunked"), "ZeRO stage 3 and a loss that is chunked, outside the model"),
        (("zero_stage=2", "versions.deepspeed=0.18.2"), "DeepSpeed before 0.19"),
        (("zero_stage=3", "recompute=[[0,[1]]]"), "ZeRO stage 3 and nested recomputation"),
    ],
)
def test_what_is_not_replayed_says_why(words: tuple[str, ...], reason: str) -> None:
    assert unsupported_reason(small(*words)) == f"the order of requests is not known with {reason}"


def test_the_ledger_counts_flattened_gradients_before_a_fused_update() -> None:
    """A foreach update has larger temporaries itself."""

    def flattened(implementation: str) -> list[int]:
        rows = memcalc.estimate(small("zero_stage=3", f"optimizer_implementation={implementation}")).ledger.rows
        return [row.bytes for row in rows if row.tensor.startswith("flattened gradients")]

    assert flattened("fused") == [2 * ELEMENTS // RANKS]
    assert flattened("foreach") == []


@pytest.mark.parametrize(
    ("implementation", "width"),
    [
        ("fused", 4 + 2),  # fp32 gradients, and the 16-bit ones that they are cast from
        ("foreach", 4 + 4),  # square roots
        ("for-loop", 4 + 4 + 4),  # a square root and the denominator
    ],
)
def test_a_large_share_is_updated_in_sub_groups(implementation: str, width: int) -> None:
    """Each rank has 4.0 B parameters; the first sub-group ends with the parameter that makes it 1e9 elements."""
    largest = 1_026_060_288
    words = ("zero_stage=3", "engine=deepspeed", "data_parallel=2", "s=512", "recipe=mixed-16")
    spec = memcalc.load("llama-3-8b", *words, f"optimizer_implementation={implementation}")
    counted = memcalc.estimate(spec).ledger.totals

    assert counted["optimizer_step_2"] - counted["zero_grad_2"] == pytest.approx(width * largest, rel=0.001)
    assert counted["optimizer_step_2"] == pytest.approx(simulate(spec).tops["optimizer_step_2"][0], rel=1e-5)
