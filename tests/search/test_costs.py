"""The cost of a layout: each term by hand, and the order of published experiments."""

import pytest
import yaml

import memcalc
from memcalc.search.costs import TERMS, Costs, costs_of, work_of
from memcalc.spec.hardware.gpus import all_gpus, find_gpu
from memcalc.spec.hardware.interconnect import FILE, System, system_of

# Round numbers: 10^12 operations, 10^9 bytes inside a node of 8, 10^8 between nodes, a second.
SYSTEM = System("round", 8, "a link", 1e9, 1e8, 1e12, "made up", node_assumed=False, nic_assumed=False)
GPT = {
    "model": {"l": 4, "d": 64, "h": 4, "V": 256, "position_embedding": "none", "qkv_bias": False, "output_bias": False}
    | {"mlp_bias": False, "tie_word_embeddings": False},
    "training": {"b": 2, "s": 128, "recipe": "mixed-16", "attention": "flash"},
}
# l = 4 layers of 12d² and two norms of 2d: 4 · (12 · 64² + 4 · 64) = 4 · 49,408
LAYER = 12 * 64**2 + 4 * 64
# A token's forward: 2 operations a parameter, and 2·s·d of attention (half of 4·s·d, for it is causal).
FORWARD = 2 * LAYER + 2 * 128 * 64
HEAD = 2 * 256 * 64


def costs(*overrides: str) -> Costs:
    return costs_of(memcalc.load(GPT, *overrides), SYSTEM)


def test_the_terms_are_the_documented_ones() -> None:
    assert tuple(TERMS) == Costs._fields


def test_work_counts_every_parameter_once() -> None:
    work = work_of(memcalc.load(GPT).model)

    assert work.layers == 4 * LAYER
    assert work.embedding_and_head == 2 * 256 * 64 + 2 * 64  # embedding, head, final norm
    assert work.layers + work.embedding_and_head == memcalc.estimate(GPT).parameters


def test_compute() -> None:
    """2 · 128 tokens, 3 forwards' worth (backward is two), 10^12 operations a second."""
    assert costs().compute == pytest.approx(3 * (4 * FORWARD + HEAD) * 2 * 128 / 1e12)
    assert costs().total == costs().compute


def test_adapters_leave_out_the_gradients_of_weights() -> None:
    """A backward without them is one forward more, not two; and what adapters exchange is not counted."""
    found = costs("finetune=lora", "data_parallel=2")

    assert found.compute == pytest.approx(costs().compute * 2 / 3)
    assert found.data == 0


def test_recompute() -> None:
    """All layers once more, attention once more, every other layer once more."""
    tokens = 2 * 128 / 1e12

    assert costs("recompute=full").recompute == pytest.approx(4 * FORWARD * tokens)
    assert costs("recompute=every-2").recompute == pytest.approx(2 * FORWARD * tokens)
    assert costs("recompute=[0]").recompute == pytest.approx(FORWARD * tokens)
    assert costs("recompute=[0, 1-2]").recompute == pytest.approx(3 * FORWARD * tokens)
    assert costs("recompute=[[0, [1, 2]], 3]").recompute == pytest.approx(6 * FORWARD * tokens)  # 1 and 2 twice
    assert costs("recompute=selective").recompute == pytest.approx(4 * 2 * 128 * 64 * tokens)


def test_tensor() -> None:
    """4 layers · 4 sums of 2·b·s·d bytes; a ring of 2 passes 2 · 1/2 of them; inside the node. Full: 6 sums."""
    size = 2 * 2 * 128 * 64

    assert costs("tensor_parallel=2").tensor == pytest.approx(4 * 4 * size / 1e9)
    assert costs("tensor_parallel=2", "recompute=full").tensor == pytest.approx(4 * 6 * size / 1e9)
    assert costs("tensor_parallel=2").compute == pytest.approx(costs().compute / 2)


def test_context() -> None:
    """Each of 2 ranks passes 128 of 256 tokens' keys and values on, 2 · 64 elements: once forward, twice backward."""
    assert costs("context_parallel=2").context == pytest.approx(4 * 3 * 128 * 2 * 64 * 2 / 1e9)


def test_pipeline_and_bubble() -> None:
    """2 stages, 4 micro-batches: 2 · 128 · 64 elements of 2 bytes there and back, 4 times; a bubble of 1/4."""
    found = costs("pipeline_parallel=2", "gradient_accumulation_steps=4")

    assert found.pipeline == pytest.approx(2 * 4 * 2 * 128 * 64 * 2 / 1e9)
    assert found.compute == pytest.approx(3 * (2 * FORWARD + HEAD) * 4 * 2 * 128 / 1e12)  # the last stage has the head
    assert found.bubble == pytest.approx(found.compute / 4)


def test_an_interleaved_bubble() -> None:
    """v = 2 chunks a stage: half the bubble, twice the sending."""
    plain = ("pipeline_parallel=2", "gradient_accumulation_steps=4")
    cut = costs(*plain, "schedule=interleaved", "virtual_stages=2")

    assert cut.bubble == pytest.approx(costs(*plain).bubble / 2)
    assert cut.pipeline == pytest.approx(costs(*plain).pipeline * 2)


@pytest.mark.parametrize(("stage", "engine", "factor"), [(0, "ddp", 2), (1, "deepspeed", 2), (3, "fsdp2", 4 * 3)])
def test_data(stage: int, engine: str, factor: int) -> None:
    """P gradients of 2 bytes, weights of 2 bytes, over 4 ranks: 3/4 of 2G, of G + W, of m(2W + G) with m = 4."""
    spread = ("data_parallel=4", f"zero_stage={stage}", f"engine={engine}", "gradient_accumulation_steps=4")
    parameters = 4 * LAYER + 2 * 256 * 64 + 2 * 64

    assert costs(*spread).data == pytest.approx(3 / 4 * factor * 2 * parameters / 1e9)


def test_groups_talk_over_what_lies_between_them() -> None:
    """A ring through whole nodes has the ports of all 8 cards in a node; a group of one GPU a node has one."""
    assert SYSTEM.group_bytes(8, 1) == 1e9
    assert SYSTEM.group_bytes(2, 4) == 1e9
    assert SYSTEM.group_bytes(16, 1) == 8 * 1e8
    assert SYSTEM.group_bytes(4, 8) == 1e8
    assert SYSTEM.group_bytes(8, 4) == 2 * 1e8


def test_every_gpu_stands_in_a_system() -> None:
    """Its rate is that of the table of GPUs, where that has one."""
    for card in all_gpus():
        system = system_of(card)
        assert system.node >= 1
        assert system.link_bytes > system.nic_bytes > 0
        if card.bf16_tflops is not None:
            assert system.flops == card.bf16_tflops * 1e12
        assert system.source


def test_every_system_says_where_its_figures_were_read() -> None:
    for name, row in yaml.safe_load(FILE.read_text())["systems"].items():
        assert row["source"], name
        assert row["read"], name
        assert all(address.startswith(("https://", "http://")) for address in row["read"]), name


def test_user_values_override_the_table() -> None:
    card = find_gpu("l40s")
    known = system_of(card, node=4, nic_gbit=200)

    assumed = "8 GPUs per node and 100 Gbit/s per GPU, defaults: set yours with --node and --nic"
    assert system_of(card).assumed == assumed
    assert system_of(card, node=4).assumed == "100 Gbit/s per GPU, a default: set yours with --nic"
    assert (known.node, known.nic_bytes, known.assumed) == (4, 25e9, "")
    with pytest.raises(memcalc.InputError, match="0 GPUs per node"):
        system_of(card, node=0)
    with pytest.raises(memcalc.InputError, match="-1 Gbit/s"):
        system_of(card, nic_gbit=-1)


def test_the_order_of_korthikanti_et_al() -> None:
    """arXiv 2205.05198, abstract: 530B on 2,240 A100s, 54.2 % of the peak, and 42.1 % with full recomputation.

    A ratio of 1.29: what is recomputed, and the sums that go with it, are all of it. 105 layers, hidden 20480, 128 heads,
    tensor 8, pipeline 35 with 3 chunks a stage, so 8 replicas. The abstract does not name the batch; 2,240 sequences are
    an assumption that hardly matters (1.300 with half of them, 1.309 with twice as many).
    """
    system = system_of(find_gpu("a100-80gb"))
    model = {"model": {"l": 105, "d": 20480, "h": 128, "V": 51200}}
    training = {"training": {"recipe": "mixed-18", "s": 2048, "attention": "eager", "global_batch_size": 2240}}
    split = {"tensor_parallel": 8, "pipeline_parallel": 35, "data_parallel": 8}
    schedule = {"schedule": "interleaved", "virtual_stages": 3}
    run = {**model, **training, "parallelism": split | schedule}
    full = costs_of(memcalc.load(run, "recompute=full"), system).total
    selective = costs_of(memcalc.load(run, "recompute=selective", "sequence_parallel=true"), system).total

    assert full / selective == pytest.approx(54.2 / 42.1, rel=0.02)


def test_the_order_of_narayanan_et_al() -> None:
    """arXiv 2104.04473, figure 13: 162.2B over 64 A100s, 8 ways of tensor x pipeline: 8 x 8 is fastest, 2 x 32 slowest but one.

    32 layers, hidden 20480, 128 heads, batch 32: the best has tensor parallelism inside the node and no more.
    """
    system = system_of(find_gpu("a100-80gb"))
    model = {"model": {"l": 32, "d": 20480, "h": 128, "V": 51200}, "training": {"recipe": "mixed-18", "s": 2048}}
    seconds = {
        t: costs_of(
            memcalc.load(model, f"tensor_parallel={t}", f"pipeline_parallel={64 // t}", "global_batch_size=32"), system
        ).total
        for t in (2, 4, 8, 16, 32)
    }

    assert min(seconds, key=seconds.__getitem__) == 8
    assert max(seconds, key=seconds.__getitem__) in (2, 32)


def test_the_total_is_the_same_in_every_version_of_python() -> None:
    """Rounded once. Added one after the other, eight tenths are 0.7999999999999999, as `sum` has it before 3.12."""
    assert Costs(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1).total == 0.8
