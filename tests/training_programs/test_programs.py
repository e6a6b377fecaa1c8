"""The programs that frameworks run: drawn by seed, each sized from its user's own file, each record complete."""

from __future__ import annotations

import json

import pytest

from benchmarks.programs.compare import settings, sized
from benchmarks.programs.program import Draw
from benchmarks.programs.record import RECORDINGS, described, read_records, without_places
from benchmarks.programs.registry import FAMILIES
from memcalc.catalogue.shipped import find_shipped
from memcalc.nullcuda.result import WHOLE
from tests.thinning import quick_every

# Programs as they are drawn now; `earlier` has those of other choices.
RECORDS = {path: read_records(path) for path in sorted(RECORDINGS.glob("*/*.jsonl")) if path.parent.name != "earlier"}
LONG = pytest.mark.long


def test_a_deck_deals_each_choice_equally_often():
    dealt = [Draw("seed", number).of("model", ("a", "b", "c", "d")) for number in range(8)]
    assert {choice: dealt.count(choice) for choice in dealt} == dict.fromkeys("abcd", 2)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_programs_are_drawn_by_seed(family):
    drawn = [described(family.program("development", number)) for number in range(8)]
    assert drawn == [described(family.program("development", number)) for number in range(8)]
    assert drawn != [described(family.program("held-out", number)) for number in range(8)]


def test_the_framework_is_named_where_it_is_asked_for():
    program = described(next(iter(FAMILIES.values())).program("development", 0))
    assert settings(program | {"versions": {}}, named=False) == tuple(program["sized"]["settings"])


@pytest.mark.parametrize("path", quick_every(3, RECORDS), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recorded_programs_are_those_that_are_drawn(path):
    """Nobody chose them, and nobody mended one after it ran."""
    for record in RECORDS[path]:
        program = FAMILIES[record["family"]].program(record["seed"], record["number"])
        if record["good"]:
            drawn = json.loads(json.dumps(described(program)))
            assert {key: record[key] for key in drawn} == drawn


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_records_are_complete(path):
    records = RECORDS[path]
    assert without_places(records) == records
    assert [record["number"] for record in records] == sorted({record["number"] for record in records})
    for record in records:
        assert (record["family"], record["seed"]) == (path.stem, path.parent.name)
        assert record["sized"]["file"] in record["files"]
        assert record["versions"]["torch"]
        if record["good"]:
            assert len(record["ranks"]) >= 1
            assert all(0 < rank["allocated_bytes"] <= rank["reserved_bytes"] for rank in record["ranks"])
        else:
            assert record["outcome"] not in WHOLE or record["verdict"] is None


# Percent, reserved: the largest error in families with requests replayed in the program's own order.
RESERVED = {
    "loop": 0.2,
    "lightning": 0.1,
    "axolotl-lora": 0.1,
    "trainer-5-ddp": 0.4,
    "accelerate-ddp": 0.1,
    "trainer-5-fsdp": 0.1,
    "trainer-5-context": 0.3,
    "accelerate-fsdp2": 0.4,
    "trl-sft-fsdp": 0.3,
    "trainer-5-zero": 0.2,
    "trainer-5-offload": 0.3,
    "trainer-5-one-rank": 0.7,
    "trl-sft-zero": 0.1,
    "trl-dpo-zero": 0.5,
    "trl-grpo-zero": 0.1,
    "deepspeed": 0.1,
    "deepspeed-stage0": 0.1,
    "deepspeed-pipeline": 0.1,
    "trainer-5-stage0": 0.1,
    "accelerate-deepspeed": 0.3,
    "torchtitan-pipeline": 0.8,  # without FSDP; with FSDP2 within 0.2
}
# torchtitan's checkpoints by operator without FSDP, which are counted without them.
# Texts of unlike lengths; releases of DeepSpeed before 0.19, which are not replayed; causes.md has those of the others.
UNLIKE = {
    ("torchtitan-pipeline", "held-out", 2),
    ("accelerate-ddp", "development", 3),
    ("accelerate-ddp", "development", 4),
    ("accelerate-ddp", "held-out", 4),
    ("accelerate-ddp", "held-out", 6),
    ("trainer-5-fsdp", "development", 0),
    ("trainer-5-fsdp", "development", 6),
    ("trainer-5-fsdp", "held-out", 3),
    ("accelerate-fsdp2", "development", 2),
    *(("accelerate-fsdp2", "held-out", number) for number in (0, 3, 4, 6)),
    ("trl-sft-fsdp", "development", 1),
    ("trl-sft-fsdp", "development", 3),
    ("trl-sft-fsdp", "development", 6),
    ("trl-sft-fsdp", "held-out", 0),
    ("trl-sft-fsdp", "held-out", 4),  # 0.7% too low, of texts of one length: not explained
    ("trl-sft-fsdp", "held-out", 7),
    ("deepspeed", "development", 1),
    ("deepspeed", "development", 5),
    ("accelerate-deepspeed", "development", 0),
    ("accelerate-deepspeed", "development", 1),
    ("trainer-5-zero", "development", 1),
    ("trainer-5-zero", "development", 4),
    ("trainer-5-offload", "development", 1),
    ("trainer-5-offload", "development", 4),
    ("trainer-5-one-rank", "held-out", 3),
    ("trainer-5-stage0", "held-out", 2),
    ("trl-sft-zero", "development", 5),
    ("trl-sft-zero", "held-out", 7),
    ("trl-dpo-zero", "development", 0),
    ("trl-dpo-zero", "held-out", 0),
    ("trl-dpo-zero", "development", 2),
    ("trl-dpo-zero", "development", 37),
    ("trl-dpo-zero", "development", 40),
    ("trl-sft-zero", "development", 7),
}


def test_what_an_evaluation_under_fsdp_reserves():
    """Units that no backward reshards stay unsharded from one batch to the next."""
    record = next(r for r in RECORDS[RECORDINGS / "development" / "trainer-5-fsdp.jsonl"] if r["number"] == 2)
    line = sized(record, named=True)

    assert abs(line.reserved_error) <= 0.1


# Percent, allocated: the most that an estimate may be over, and under, in the families with programs estimated on
# their own terms.
BARS = {
    "trainer-5": (0.1, 0.1),
    "axolotl": (0.5, 0.1),
    "axolotl-lora": (0.1, 0.1),
    "axolotl-dpo": (2.1, 0.1),
    "axolotl-qat": (0.4, 0.1),
    "litgpt": (0.6, 0.3),
    "litgpt-head": (0.4, 1.3),
    "loop": (0.1, 0.3),
    "trainer-5-ddp": (0.2, 0.3),
    "accelerate-ddp": (0.3, 0.3),
    "torchtitan": (0.1, 0.1),
    "torchtitan-pipeline": (0.2, 0.1),
    "accelerate-fsdp2": (0.6, 0.2),
    "trainer-5-fsdp": (0.2, 0.2),
    "trainer-5-fsdp1-lora": (0.1, 0.1),
    "torchtune": (0.2, 1.3),
    "torchtune-dpo": (0.1, 0.2),
    "torchtune-dpo-fsdp": (0.4, 0.2),
    "torchtune-qat": (0.3, 0.3),
    "torchtune-dora": (0.1, 2.4),  # a 4-bit base with checkpoints (causes.md); the others are exact
    "torchtune-kd": (0.2, 0.2),
    "torchtune-kd-fsdp": (0.4, 0.1),
    "megatron": (0.1, 0.1),
    "trainer-5-deepspeed": (0.1, 0.1),
    "trainer-5-zero": (0.2, 0.1),
    "trainer-5-offload": (0.2, 0.1),
    "trl-sft-zero": (0.9, 0.4),
    "deepspeed": (0.4, 0.2),
    "deepspeed-stage0": (0.1, 0.1),
    "deepspeed-pipeline": (0.1, 0.2),
    "trainer-5-stage0": (0.1, 0.1),
    "trl-dpo-zero": (1.9, 0.5),
    "trl-grpo-zero": (0.1, 0.1),
    "accelerate-deepspeed": (0.1, 0.1),
    "trl-reward": (1.8, 0.2),
    "trl-qlora": (0.9, 0.1),
    "trl-dpo": (0.5, 0.1),
    "trl-dpo-1.14": (0.1, 0.1),
    "trl-grpo": (4.2, 0.2),  # over where completions end before their longest length, which the data decide
    "trl-sft-fsdp": (0.9, 0.3),
    "trl-qlora-fsdp": (1.9, 1.0),
    "trl-qlora-fsdp1": (8.8, 0.6),  # LayerNorm above a 4-bit base (causes.md); the others are within 0.05
}
# Two loops over two GPUs, and a run with weights in host memory (causes.md); four that depend on their data: one is
# padded, and three have sequences shorter than the file's longest. One of torchtitan's pipelines, as in UNLIKE.
BEYOND = {
    ("torchtitan-pipeline", "held-out", 2),
    ("axolotl", "held-out", 3),
    ("accelerate-deepspeed", "held-out", 6),
    ("trainer-5-offload", "development", 1),
    ("loop", "development", 0),
    ("loop", "development", 4),
    ("torchtune", "held-out", 7),
    ("litgpt-head", "held-out", 1),
}


CLAIMED = list(dict.fromkeys([*BARS, *RESERVED]))
COMPARED = CLAIMED[::3]  # by the quick tests, which read the user's file of every second one of the others
READ = [name for name in FAMILIES if name not in COMPARED][::2]


@pytest.mark.parametrize(
    ("number", "replay", "name"),
    [
        pytest.param(number, replay, name, marks=LONG if number or replay or name not in READ else ())
        for number, replay in ((0, False), (0, True), (1, True))
        for name in FAMILIES
    ],
)
def test_estimate_reads_the_file_of_each_program(number, replay, name):
    """The quick tests read those of half of the families that they do not compare, without a replay if there are records."""
    program = FAMILIES[name].program("development", number)
    record = {**described(program), "number": number, "versions": {}, "ranks": []}
    line = sized(record, named=False, replay=replay or name not in CLAIMED)
    assert not line.problem
    assert line.allocated > 0
    assert all(find_shipped(model) is not None for model in program.models)


def claimed(family, seed):
    """Recorded programs that ran, each with whether its allocated and its reserved memory are compared."""
    for record in RECORDS.get(RECORDINGS / seed / f"{family}.jsonl", []):
        program = family, seed, record["number"]
        allocated = family in BARS and program not in BEYOND
        reserved = family in RESERVED and program not in UNLIKE
        if record["good"] and (allocated or reserved):
            yield record, allocated, reserved


# Numbers of programs that take a fraction of the time of their family's last one, which the quick tests size.
QUICKER = {"trainer-5-fsdp1-lora": 3, "trl-dpo-zero": 3, "trl-dpo-1.14": 0}


@pytest.mark.parametrize(
    ("seed", "every", "family"),
    [
        pytest.param(seed, every, family, marks=LONG if every or family not in COMPARED else ())
        for seed, every in (("development", False), ("development", True), ("held-out", True))
        for family in CLAIMED
    ],
)
def test_estimates_are_those_of_the_dry_runs(family, seed, every):
    """Of one program of the family, or of all."""
    programs = [*claimed(family, seed)]
    last = QUICKER.get(family, programs[-1][0]["number"] if programs else None)
    for record, allocated, reserved in programs:
        if not every and record["number"] != last:
            continue
        line = sized(record, named=True)
        assert not line.problem
        if allocated:
            over, under = BARS[family]
            assert -under <= line.allocated_error <= over, (family, seed, record["number"])
        if reserved:
            assert abs(line.reserved_error) <= RESERVED[family], (family, seed, record["number"])
