"""Batches of different lengths: their orders, their replays, and the verdict that holds in all of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import memcalc
from benchmarks.programs.compare import settings, write_files
from memcalc.importers.loading import load
from memcalc.layout.stages import Stage, stages_of
from memcalc.report.screens.verdict import error_bars, verdict
from memcalc.simulation.batch_lengths import EIGHTHS, BatchLength, orders_of
from memcalc.simulation.simulated_run import run_requests
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.spec import Spec
from memcalc.stream.requests import Replay
from memcalc.verdict import needs
from memcalc.verdict.judge import judge, size
from memcalc.verdict.needs import gets_through, need_of

ROOT = Path(__file__).parents[2]
GIB = 2**30
SMALL = ("b=4", "s=256", "num_layers=2")
VARIES = "variable_lengths=true"


def recorded_program(family: str, seed: str, number: int, tmp_path: Path) -> tuple[Spec, int]:
    """A recorded program's spec, and the reserved memory of its dry run."""
    lines = (ROOT / "benchmarks" / "recordings" / "programs" / seed / f"{family}.jsonl").read_text().splitlines()
    record = next(each for each in map(json.loads, lines) if each["number"] == number)
    write_files(record, str(tmp_path))
    spec = load(tmp_path / record["sized"]["file"], settings(record, named=True), gpu=record["card"])
    return spec, max(rank["reserved_bytes"] for rank in record["ranks"])


def test_the_orders_end_with_or_contain_the_longest_batch() -> None:
    spec = memcalc.load("gpt2", *SMALL, VARIES)

    assert orders_of(spec) == tuple(tuple(BatchLength(32 * each) for each in eighths) for eighths in EIGHTHS)  # 256 / 8
    assert all(BatchLength(256) in lengths and lengths[0].tokens < 256 for lengths in orders_of(spec))


LABELED = ("implementation=huggingface", VARIES, "loss=tiled")


def test_padded_batches_of_one_length_differ_in_their_labels() -> None:
    """Of 255 tokens with a label 3/8, 5/8, 7/8 and all. One sequence alone is not padded."""
    spec = memcalc.load("llama-3.2-1b", "b=4", "s=256", *LABELED)
    alone = spec.with_training(micro_batch_size=1)

    assert orders_of(spec) == (*orders_of(alone), tuple(BatchLength(256, each) for each in (95, 159, 223, 255)))
    assert orders_of(spec) == orders_of(alone.with_training(pairs=True))
    assert orders_of(alone) == orders_of(spec.with_training(completion_length=128))


def test_given_labels_shrink_with_the_batch() -> None:
    spec = memcalc.load("llama-3.2-1b", "b=4", "s=256", *LABELED, "labeled_tokens=100")

    assert orders_of(spec)[0] == (
        BatchLength(32, 12),
        BatchLength(256, 100),
        BatchLength(192, 75),
        BatchLength(256, 100),
    )
    assert orders_of(spec)[-1] == tuple(BatchLength(256, each) for each in (37, 62, 87, 100))


def test_labels_decide_the_tile_of_logits() -> None:
    """TRL's tiles have at most 32,768 columns in bf16: 4 sequences of 100 labels are 4 * 100 * 32,768 * 2 bytes."""
    spec = memcalc.load("llama-3.2-1b", "b=4", "s=256", *LABELED, "labeled_tokens=100", "recipe=pure")
    loss = next(each for each in run_requests(spec).stretches if each.phase == "loss_1")

    assert 4 * 100 * 32_768 * 2 in loss.script


@pytest.mark.parametrize(
    "words",
    [
        SMALL,
        (*SMALL, VARIES, "parallelism.pipeline_parallel=2", "gradient_accumulation_steps=2"),
    ],
    ids=["one length", "a pipeline"],
)
def test_runs_without_orders(words: tuple[str, ...]) -> None:
    assert orders_of(memcalc.load("gpt2", *words)) == ()


def test_lengths_are_multiples_of_the_ranks_that_split_them() -> None:
    spec = memcalc.load("gpt2", "s=96", VARIES, "parallelism.tensor_parallel=4")

    assert orders_of(spec)[0] == tuple(map(BatchLength, (12, 96, 72, 96)))  # 96 / 8 = 12, a multiple of 4


def test_each_micro_batch_has_its_own_length() -> None:
    """Token ids are int64: 8 bytes for each of b * s tokens; the first request of a forward is the embedding's output.

    gpt2 in bf16: b * s * 768 * 2 bytes, here for 4 sequences of 32, 256, 192 and 256 tokens.
    """
    spec = memcalc.load("gpt2", *SMALL, VARIES)
    order = orders_of(spec)[0]
    forwards = [each for each in run_requests(spec, lengths=order).stretches if each.phase.startswith("forward")]

    assert len(forwards) == len(order) == 4
    assert [each.script[0] for each in forwards] == [4 * length.tokens * 768 * 2 for length in order]


def test_micro_batches_of_a_step_take_the_lengths_in_turn() -> None:
    spec = memcalc.load("gpt2", *SMALL, VARIES, "gradient_accumulation_steps=2")
    order = orders_of(spec)[0]
    forwards = [
        each
        for each in run_requests(spec, lengths=order).stretches
        if each.phase.startswith("forward") and any(change > 0 for change in each.script)
    ]

    first = [next(change for change in each.script if change > 0) for each in forwards]
    assert first == [4 * length * 768 * 2 for length in (32, 256, 192, 256, 32, 256)]  # three steps of two


def test_lengths_that_are_all_the_longest_change_nothing() -> None:
    spec = memcalc.load("gpt2", *SMALL, VARIES)
    found = [
        [(each.phase, each.script) for each in run_requests(spec, stages_of(spec)[0], None, lengths).stretches]
        for lengths in ((), (BatchLength(256),) * 3)
    ]

    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "seed", "number"),
    [
        ("trainer-5", "held-out", 2),  # +10.1% beyond the replay of its longest batches
        pytest.param("litgpt", "held-out", 3, marks=pytest.mark.long),  # +7.7%
        ("torchtune", "development", 7),  # +12.4%
        ("accelerate-fsdp2", "held-out", 4),  # +15.0%
    ],
)
def test_what_programs_reserved_is_between_the_orders(family: str, seed: str, number: int, tmp_path: Path) -> None:
    """Dry runs of programs with data of two lengths in turn; the errors are docs/reports/programs.md's.

    Trainer's is the one at the end of its interval, which is rounded.
    """
    spec, reserved = recorded_program(family, seed, number, tmp_path)
    need = need_of(spec, find_gpu(str(spec.hardware.gpu)))

    assert spec.training.variable_lengths
    assert 1.07 * need.reserved_bytes < reserved <= 1.01 * need.most_reserved_bytes
    assert reserved + need.outside_bytes < need.high_bytes + 2**20


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (10_200, (True, False, "unknown")),
        # within the errors of recorded programs below 9,898 MiB
        pytest.param(9_700, (False, False, "unknown"), marks=pytest.mark.long),
        pytest.param(11_900, (True, True, "fits"), marks=pytest.mark.long),
    ],
)
def test_a_run_fits_only_if_it_does_in_every_order(mib: int, expected: tuple[bool, bool, str], tmp_path: Path) -> None:
    """The Llama-3.2-1B program above needs 10,340 MiB: its snapshot replayed on smaller and smaller devices.

    Its longest batches alone need 9,898 MiB. A GPU with memory between the two must not be said to fit.
    """
    spec, _ = recorded_program("trainer-5", "held-out", 2, tmp_path)
    outside = need_of(spec, find_gpu("a100-80gb")).outside_bytes
    gpu = f"a100-80gb:{mib + outside // 2**20}MiB"
    varied = spec.model_copy(update={"hardware": spec.hardware.model_copy(update={"gpu": gpu})})
    equal = varied.model_copy(update={"training": varied.training.model_copy(update={"variable_lengths": False})})
    judgement = judge(varied)

    assert (judge(equal).expected, judgement.expected, judgement.answer) == expected


@pytest.mark.parametrize(
    ("finishes", "answer"),
    [
        (lambda _lengths: True, "fits"),
        (lambda lengths: lengths == (), "unknown"),  # batches of one length alone
        (lambda lengths: lengths != (), "unknown"),  # all orders but these
        (lambda _lengths: False, "does-not-fit"),
    ],
)
def test_the_answer_is_that_on_which_all_orders_agree(
    finishes: Callable[[tuple[BatchLength, ...]], bool], answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders that finish reserve 1 GiB; the others need 2 GiB more than the GPU of 8 GiB has, which is found to 1%."""
    spec = memcalc.load("gpt2", *SMALL, VARIES, gpu="a100-80gb:8GiB")
    card = find_gpu("a100-80gb:8GiB")

    def replayed(
        _spec: Spec, _stage: Stage, _rank: int | None, room: int | None, lengths: tuple[BatchLength, ...] = ()
    ) -> Replay | None:
        if finishes(lengths):
            return Replay({}, GIB)
        return Replay({}, 12 * GIB) if room is None or room >= 10 * GIB else None

    monkeypatch.setattr(needs, "_replay_on", replayed)
    need = need_of(spec, card)

    assert need.on_gpu == answer
    assert need.replay_finishes is (answer == "fits")
    least, most = need.orders or (0, 0)
    assert (least, most == pytest.approx(10 * GIB, rel=0.02)) == {
        "fits": (GIB, False),
        "unknown": (GIB, True),
        "does-not-fit": (12 * GIB, False),
    }[answer]


def test_expandable_segments_do_not_fragment() -> None:
    """The lengths then cost a few percent at most, on a GPU that has room for all of them."""
    words = ("recipe=pure", "optimizer_implementation=fused", "b=8", VARIES, "alloc_conf=expandable_segments:True")
    need = need_of(memcalc.load("gpt2", *words, gpu="a100-80gb"), find_gpu("a100-80gb"))

    assert need.reserved_bytes <= max(need.reserved_bytes, need.most_reserved_bytes) <= 1.05 * need.reserved_bytes


def test_the_search_and_the_verdict_agree() -> None:
    """`fit` asks whether all replays finish, `check` for the verdict."""
    card = find_gpu("a100-80gb")
    for batch in (8, 16, 24, 32, 40, 48):
        spec = memcalc.load("gpt2", f"b={batch}", VARIES, "recipe=pure", gpu="a100-80gb")
        assert judge(spec).expected is gets_through(spec, card)


def test_the_screen_says_what_decides(tmp_path: Path) -> None:
    spec, _ = recorded_program("trainer-5", "held-out", 2, tmp_path)
    outside = need_of(spec, find_gpu("a100-80gb")).outside_bytes
    gpu = f"a100-80gb:{10_200 + outside // 2**20}MiB"
    result = size(spec.model_copy(update={"hardware": spec.hardware.model_copy(update={"gpu": gpu})}))

    assert verdict(result, "GiB").endswith("Batches of different lengths fragment memory: their order decides.")
    assert "in several orders of batch lengths, 95% of" in error_bars(result, "GiB")
