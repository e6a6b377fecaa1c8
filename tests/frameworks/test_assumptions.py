"""What a file leaves open is asked; the candidate with the largest peak is taken, and what it moves is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memcalc
from memcalc.frameworks.releases import RELEASES
from memcalc.report.screens.verdict import assumed, error_bars, verdict
from memcalc.spec.origin import Assumption
from memcalc.spec.programs import number
from memcalc.verdict.judge import size
from memcalc.verdict.other_candidates import other_candidates

FILE = """\
model_name_or_path: meta-llama/Llama-3.2-1B
per_device_train_batch_size: 2
max_seq_length: 2048
bf16: true
"""
GIB = 2**30
SETTLED = ("framework=sft", "versions.trl=v1.16.0", "versions.transformers=v5.23.0", "padding_mask=none")


def spec_of(folder: Path, text: str, *settings: str) -> memcalc.Spec:
    path = folder / "run.yaml"
    path.write_text(text)
    return memcalc.load(path, *settings)


def peak(spec: memcalc.Spec) -> int:
    return memcalc.estimate(spec).ledger.peak_bytes


def test_the_largest_candidate_is_taken(tmp_path: Path) -> None:
    """No settled run of the file needs more than the one that is counted; one of them needs as much."""
    counted = spec_of(tmp_path, FILE)
    settled = [
        peak(spec_of(tmp_path, FILE, f"framework={program}", f"versions.transformers=v{one}", f"versions.trl=v{other}", f"padding_mask={mask}"))
        for program in ("trainer", "sft")
        for one in RELEASES["transformers"].candidates
        for other in RELEASES["trl"].candidates
        for mask in ("none", "boolean" if number(one) >= number("4.53") else "additive")
    ]  # fmt: skip

    assert peak(counted) == max(settled)
    assert min(settled) < 0.7 * max(settled)


def test_each_assumption_says_what_it_moves(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FILE)
    found = {each.field: each for each in spec.origin.assumptions}

    assert set(found) == {"training.framework", "training.versions.transformers", "training.padding_mask"}
    release = found["training.versions.transformers"]
    assert (release.taken, release.otherwise) == ("4.48.3", "5.23.0")  # fp32 weights, and logits shifted in fp32
    assert release.peak_bytes == peak(spec)
    other = spec_of(tmp_path, FILE, "framework=trainer", "versions.transformers=v5.23.0", "padding_mask=boolean")
    assert release.moved_bytes == pytest.approx(peak(spec) - peak(other), rel=0.02)
    assert list(spec.origin.assumptions) == sorted(found.values(), key=lambda each: -each.moved_bytes)


def test_what_the_user_settles_is_no_assumption(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FILE, *SETTLED)

    assert spec.origin.assumptions == ()
    assert (spec.training.framework, spec.training.loss, spec.training.recompute) == ("sft", "tiled", "full")


@pytest.mark.parametrize(
    ("release", "loss"),
    [("v1.16.0", "tiled"), ("v1.15.0", "tiled"), ("v1.14.2", "chunked"), ("v1.6.0", "materialized")],
)
def test_trls_loss_is_that_of_its_release(release: str, loss: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FILE, *(each for each in SETTLED if "trl=" not in each), f"versions.trl={release}")

    assert spec.training.loss == loss
    assert spec.training.versions is not None
    assert spec.training.versions.trl == release[1:]


def test_a_version_that_yaml_reads_as_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(memcalc.InputError, match=r"write it with quotes or as v4\.5"):
        spec_of(tmp_path, FILE, "versions.transformers=4.50")


def test_small_shares_stay_out_of_the_headline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = memcalc.estimate(spec_of(tmp_path, FILE))
    sentence = assumed(result, "GiB")
    assert "the program that runs the file: trainer" in sentence
    few = Assumption("training.framework", "the program", "trainer", "sft", 1, 100)
    quiet = memcalc.estimate(result.spec.with_origin(result.spec.origin._replace(assumptions=(few,))))
    assert assumed(quiet, "GiB") == ""
    assert any(note.startswith("assumed: the program: trainer; with sft the peak is 1.0%") for note in quiet.notes)


def test_json_has_them(tmp_path: Path) -> None:
    from memcalc.documents.result import document

    rows = json.loads(json.dumps(document(memcalc.estimate(spec_of(tmp_path, FILE)))))["assumptions"]
    assert {row["field"] for row in rows} >= {"training.framework", "training.versions.transformers"}
    assert all(row["moved_bytes"] > 0 for row in rows)


def test_a_hub_id_assumes_nothing() -> None:
    assert memcalc.load("meta-llama/Llama-3.2-1B").origin.assumptions == ()


@pytest.mark.parametrize(
    ("gpu", "answer"), [("h100-80gb", "fits"), ("rtx-4090", "unknown"), ("rtx-3060", "does-not-fit")]
)
def test_a_run_that_may_be_a_smaller_one_is_not_said_not_to_fit(gpu: str, answer: str, tmp_path: Path) -> None:
    """32.4 GiB as assumed, 20.9 with transformers 5: between them nobody can say; the formula bound agrees in `check`."""
    from memcalc.spec.hardware.gpus import find_gpu
    from memcalc.verdict.judge import size_against

    spec = memcalc.load(spec_of(tmp_path, FILE), gpu=gpu)
    assert memcalc.estimate(spec).verdict == answer
    judged = size_against(spec, find_gpu(gpu).usable_bytes).judgement
    assert judged is not None
    assert judged.answer == answer


def test_a_configuration_of_our_own_is_no_program_s_run() -> None:
    """Its fields say what runs; a name alone brings no defaults, so the headline does not claim them."""
    from memcalc.report.screens.verdict import subject

    named = memcalc.estimate({"preset": "llama-3.2-1b", "training": {"framework": "sft"}})
    assert "as plain modules" in subject(named).how
    assert named.ledger.totals == memcalc.estimate("llama-3.2-1b").ledger.totals


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("pairs=true", "the second sequence of each pair"),
        ("reference_model=true", "the reference model"),
        ("evaluation_batch_size=2", "evaluation during training"),
        ("padding_free=true", "padding-free batches"),
        ("padding_mask=boolean", "the mask of padded sequences"),
        ("loss_shift=logits", "logits that are shifted"),
    ],
)
def test_what_the_step_does_not_run_makes_a_trace_a_lower_bound(setting: str, what: str) -> None:
    from memcalc.spec.untraced_features import not_run

    assert [(limit.feature, limit.holds_memory) for limit in not_run(memcalc.load("gpt2", setting))] == [(what, True)]
    assert not_run(memcalc.load("gpt2")) == ()


def test_a_trace_of_text_alone_leaves_a_tower_that_trains_untrained() -> None:
    from memcalc.spec.untraced_features import not_run

    seeing, frozen = (memcalc.load("datalab-to/surya-ocr-2", f"vision_tower={how}") for how in ("trained", "frozen"))
    assert [limit.holds_memory for limit in not_run(seeing)] == [True]
    assert not_run(frozen) == ()


# Padded adapters in axolotl: with transformers 4.48 the loss allocates 24.2 GiB, and the device needs 25.0 GiB; with 5.23
# backward allocates 23.3 GiB, and the device needs 26.5 GiB (25.4 to 27.6 in several orders of lengths).
RESERVES_MORE = """\
base_model: Qwen/Qwen2.5-0.5B
adapter: lora
lora_r: 8
lora_target_linear: true
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 2
optimizer: paged_adamw_8bit
bf16: auto
sdp_attention: true
"""


@pytest.mark.parametrize(
    ("budget", "settings", "answer"),
    [
        ("26GiB", (), "unknown"),
        ("26GiB", ("versions.transformers=4.48.3", "padding_mask=additive"), "fits"),
        ("26GiB", ("versions.transformers=5.23.0", "padding_mask=boolean"), "unknown"),
        ("29GiB", (), "fits"),
    ],
)
def test_a_run_fits_only_if_it_does_with_other_candidates_too(
    budget: str, settings: tuple[str, ...], answer: str, tmp_path: Path
) -> None:
    """The largest allocated peak does not always reserve most."""
    path = tmp_path / "run.yaml"
    path.write_text(RESERVES_MORE)
    (found,) = memcalc.check(path, overrides=settings, gpu="h200", budget=budget).outcomes

    assert found.status == answer


def test_the_headline_has_the_interval_of_the_other_candidates(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, RESERVES_MORE, "gpu=h200")
    enough, limited = size(spec, 29 * GIB), size(spec, 26 * GIB)

    assert error_bars(enough, "GiB").startswith("Interval: 24.90 GiB to 25.29 GiB in several orders of batch lengths, ")
    assert verdict(limited, "GiB") == (
        "CANNOT SAY: needs at least 24.90 GiB, probably 24.90 GiB to 27.56 GiB, of 26.00 GiB allowed. "
        "It fits with the assumed values, but may not with others."
    )
    assert "27.56 GiB in several orders of batch lengths, with other values than the assumed ones, " in error_bars(
        limited, "GiB"
    )


def test_other_candidates_change_with_the_run(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, RESERVES_MORE)
    assert {str(each.training.padding_mask) for each in other_candidates(spec)} == {"none", "boolean"}

    changed = spec.with_training(micro_batch_size=8, recompute="full")
    others = other_candidates(changed)
    assert {(each.training.micro_batch_size, each.training.recompute) for each in others} == {(8, "full")}
    assert {str(each.training.padding_mask) for each in others} == {"none", "boolean"}  # their own values stay


def test_another_candidate_that_becomes_the_same_run_or_invalid_is_no_candidate(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, RESERVES_MORE)
    first = other_candidates(spec)[0]

    assert first.blocks not in {each.blocks for each in other_candidates(spec.with_training(padding_mask="none"))}
    with_one_block_each = spec.model_copy(update={"model": spec.model.model_copy(update={"num_attention_heads": 5})})
    assert other_candidates(with_one_block_each) == ()  # 14 heads do not divide so
