"""A report against its run: the moment, what is not explained, and changes that really fit."""

import io
from functools import cache

import pytest

from memcalc.diagnosis import changes
from memcalc.diagnosis.changes import ExplainedReport
from memcalc.diagnosis.diagnosis import diagnose
from memcalc.estimation.estimate import estimate
from memcalc.estimation.outside_allocator import outside_bytes
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.loading import load
from memcalc.suggestions.run_overrides import written_out
from memcalc.verdict.needs import need_of
from tests.thinning import quick_every

GIB = 2**30
CARD = 24  # GiB
RUN = ("gpt2-large", ("l=9", "b=32", "recipe=amp", "training.attention=eager"))


@cache
def explained(allocated: str, *, run=RUN, frame: str = "", reserved: str = "", free: str = "0.50") -> ExplainedReport:
    text = (
        f"Traceback (most recent call last):\n{frame}\n"
        f"CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; {CARD}.00 GiB total capacity; {allocated} GiB already "
        f"allocated; {free} GiB free; {reserved or allocated} GiB reserved in total by PyTorch)"
    )
    found = diagnose("a.log", io.BytesIO(text.encode()), written_out(load(*run))).explained
    assert found is not None
    return found


def test_the_moment_is_the_first_that_needs_as_much() -> None:
    totals = estimate(load(*RUN)).ledger.totals
    found = explained("20.00")
    earlier = list(totals)[: list(totals).index(found.phase)]

    assert totals[found.phase] >= 21 * GIB > max(totals[phase] for phase in earlier)
    assert found.allocated == totals[found.phase]
    assert sum(found.components.values()) == found.allocated
    assert found.unexplained == 0


def test_the_traceback_knows_the_moment_better() -> None:
    frame = '  File "/x/torch/optim/adamw.py", line 9, in step\n    foreach(...)'

    assert explained("1.00", frame=frame).phase.startswith("optimizer_step")


def test_what_the_ledger_does_not_know_is_added_to_every_change() -> None:
    run = ("gpt2", ("b=1",))
    found = explained("20.00", run=run)

    assert found.unexplained == 21 * GIB - found.allocated > 0
    assert found.needed.bytes == need_of(load(*run), None).reserved_bytes + found.unexplained
    assert found.needed.errors.replayed
    assert any("used more than estimated at that point" in note for note in found.notes)


def test_a_change_fits_only_if_it_does_with_other_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that leaves its program open, a candidate may need more than the assumed one."""
    text = b"CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 24.00 GiB total capacity; 20.00 GiB already allocated; 2.00 GiB free; 21.00 GiB reserved in total by PyTorch)"
    run = written_out(load(*RUN))
    assumed = diagnose("a.log", io.BytesIO(text), run).explained
    monkeypatch.setattr(changes, "other_candidates", lambda spec: (spec.with_training(micro_batch_size=512),))
    open_choice = diagnose("a.log", io.BytesIO(text), run).explained

    assert assumed is not None
    assert open_choice is not None
    assert any(change.fits for change in assumed.changes)
    assert not any(change.fits for change in open_choice.changes)
    assert any(change.fits is None for change in open_choice.changes)


@pytest.mark.parametrize("allocated", quick_every(3, ["8.00", "16.00", "22.00"], first=1))
def test_changes_that_fit_do_fit(allocated: str) -> None:
    """Each is replayed, unless a bound excludes it; the budget is what the allocator had and could still have got."""
    found = explained(allocated, reserved=f"{float(allocated) + 1:.2f}")
    peak = estimate(load(*RUN)).ledger.peak_bytes

    assert found.budget == round((float(allocated) + 1.5) * GIB)
    assert found.changes
    for change in found.changes:
        changed = load(RUN[0], [*RUN[1], *change.overrides])
        need = need_of(changed, None)
        around = need.outside_bytes  # of ranks that one GPU does not have: they take what the allocator could have got
        assert change.allocated == estimate(changed).ledger.peak_bytes
        assert change.saved == peak - change.allocated
        assert change.saved > 0 or change.levers == ("allocator settings",)
        assert change.needed <= need.reserved_bytes + around + found.unexplained
        if change.fits:
            assert need.high_bytes + found.unexplained <= found.budget
        elif change.fits is None:
            assert need.low_bytes + found.unexplained <= found.budget < need.high_bytes + found.unexplained
        else:
            assert need.low_bytes + found.unexplained > found.budget
    verdicts = [{True: 0, None: 1, False: 2}[change.fits] for change in found.changes]
    assert verdicts == sorted(verdicts)


def test_a_smaller_micro_batch_keeps_the_sequences_of_a_step() -> None:
    changes = [change for change in explained("22.00").changes if change.levers == ("smaller micro-batch",)]

    (change,) = changes
    values = dict(override.split("=") for override in change.overrides)
    assert int(values["training.micro_batch_size"]) * int(values["training.gradient_accumulation_steps"]) == 32


def test_two_changes_where_one_is_not_enough() -> None:
    found = explained("10.00", free="0.10", run=("gpt2-large", ("l=18", "b=16", *RUN[1][2:])))

    assert {len(change.levers) for change in found.changes if change.fits} == {2}
    assert all(len(change.levers) == 1 for change in found.changes if not change.fits)


def test_changes_that_the_run_contradicts_are_not_offered() -> None:
    one_gpu = {lever for change in explained("22.00").changes for lever in change.levers}
    sharded = ("gpt2-large", ("l=6", "b=8", "recipe=mixed-16", "data_parallel=8", "zero_stage=1"))
    many = {lever for change in explained("22.00", run=sharded).changes for lever in change.levers}

    assert "shard more" not in one_gpu
    assert "flash attention" in one_gpu
    assert {"shard more", "shard over more GPUs"} <= many
    assert "flash attention" not in many


def test_without_figures_the_gpu_is_the_budget() -> None:
    spec = load("gpt2-large", ["l=2", "b=8"], gpu="v100-16gb")
    found = diagnose("a.log", io.BytesIO(b"RuntimeError: CUDA error: out of memory\n"), written_out(spec)).explained

    assert found is not None
    assert found.run_bytes is None
    assert found.budget is not None
    assert found.budget_source == "usable memory of v100-16gb, less context and NCCL"
    card = find_gpu("v100-16gb")
    assert found.budget == card.usable_bytes - outside_bytes(spec, card)
    assert found.needed.bytes == need_of(spec, None).reserved_bytes
