"""The search of the cheapest plan that fits, judged as a run is: bounds, replays, and what cannot be said."""

from collections.abc import Callable
from pathlib import Path

import pytest

import memcalc
from memcalc.documents.schema import documents
from memcalc.errors import DoesNotFit
from memcalc.ledger.verdict import Answer, Interval, RecordedErrors, Verdict
from memcalc.recomputation.config_chain import ConfigChain, chain_of, with_recompute
from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.plan import Plan, all_saved
from memcalc.recomputation.search import CLOSE, MOST, TRIES, JudgedPlan, PlanJudge, PlanSearch, Proposal
from memcalc.recomputation.strategies.lowest_peak import smallest
from memcalc.recomputation.strategies.optimal import OptimalPlan, optimal
from memcalc.recomputation.strategies.rules import every_layer
from memcalc.spec.limits import Limit
from memcalc.spec.origin import Origin
from memcalc.spec.spec import Spec
from memcalc.units import largest_that_fits
from memcalc.verdict.judge import judge
from tests.cli.conftest import Run, run  # noqa: F401 -- a fixture
from tests.thinning import quick_every

GIB = 2**30
GPT2 = ("recipe=pure", "b=16", "V=2000")


class Ratio(PlanJudge):
    """Judges by a ratio of reserved to allocated memory, in place of replays."""

    def __init__(self, spec: Spec, limit: int, reserved: Callable[[Proposal], int], *, error: float = 0.0) -> None:
        super().__init__(spec, limit)
        self._reserved, self._error = reserved, error
        self.asked: list[Proposal] = []

    def judge(self, proposal: Proposal) -> JudgedPlan:
        if proposal not in self.asked:
            self.asked.append(proposal)
        reserved = self._reserved(proposal)
        low, high = int(reserved * (1 - self._error)), int(reserved * (1 + self._error))
        answer: Answer = "fits" if high <= self.limit else "does-not-fit" if low > self.limit else "unknown"
        interval = Interval(low, high, RecordedErrors("ratio", 20, 0.0, 0.0, -self._error, self._error, replayed=True))
        verdict = Verdict(answer, reserved, reserved, self.limit, interval, answer == "fits")
        return JudgedPlan(proposal, proposal.spec, verdict, proposal.peak_bytes)


@pytest.fixture(scope="module")
def configured() -> ConfigChain:
    return chain_of(memcalc.load("gpt2", *GPT2))


def proposal(configured: ConfigChain, plan: Plan) -> Proposal:
    return Proposal(configured, OptimalPlan(plan, evaluate(configured.chain, plan), None))


def search(configured: ConfigChain, judge: Ratio) -> JudgedPlan | None:
    def ask(room: int) -> Proposal | None:
        found = optimal(configured.chain, room, bounded=False)
        return None if found is None else Proposal(configured, found)

    free = proposal(configured, Plan(all_saved(len(configured.chain)), "none"))
    least = proposal(configured, smallest(configured.chain))
    return PlanSearch(
        ask, judge, free, least.peak_bytes, [least, proposal(configured, every_layer(configured.chain))]
    ).best_plan()


@pytest.mark.parametrize("ratio", quick_every(2, [1.0, 1.02, 1.083, 1.2, 1.4]))
@pytest.mark.parametrize("share", quick_every(3, [0.0, 0.2, 0.5, 0.9]))
def test_no_cheaper_plan_fits(configured: ConfigChain, ratio: float, share: float) -> None:
    """Beside the cheapest plan of as much as may really be allocated: what the first guess was does not matter."""
    chain = configured.chain
    low, high = evaluate(chain, smallest(chain)).peak_bytes, evaluate(chain, all_saved(len(chain))).peak_bytes
    room = low + round((high - low) * share)
    judged = Ratio(configured.spec, round(room * ratio) + 1, lambda plan: round(plan.peak_bytes * ratio))
    found = search(configured, judged)
    best = optimal(chain, round(room * (1 - 2 * CLOSE)), bounded=False) or optimal(chain, low, bounded=False)

    assert found is not None
    assert best is not None
    assert found.verdict.answer == "fits"
    assert found.proposal.recompute_flops <= best.evaluation.recompute_flops
    assert len(judged.asked) <= TRIES + 3


def test_what_fits_as_it_is_is_not_planned(configured: ConfigChain) -> None:
    judged = Ratio(configured.spec, 100 * GIB, lambda plan: plan.peak_bytes)
    found = search(configured, judged)

    assert found is not None
    assert found.proposal.recompute_flops == 0
    assert len(judged.asked) == 1


def test_plans_that_recompute_layers_separately_may_reserve_less(configured: ConfigChain) -> None:
    """Segments of several layers that leave fragments: the search goes down to the smallest, and is not content."""
    chain = configured.chain
    limit = round(evaluate(chain, every_layer(chain)).peak_bytes * 1.05)

    def reserved(plan: Proposal) -> int:
        fragmented = any(not isinstance(item, int) and len(item) > 1 for item in plan.plan.plan.items)
        return round(plan.peak_bytes * (1.3 if fragmented else 1.02))

    found = search(configured, Ratio(configured.spec, limit, reserved))

    assert found is not None
    assert found.proposal.plan.plan.items == every_layer(chain).items


def test_the_likeliest_plan_where_nothing_can_be_said(configured: ConfigChain) -> None:
    least = evaluate(configured.chain, smallest(configured.chain)).peak_bytes
    found = search(configured, Ratio(configured.spec, least, lambda plan: plan.peak_bytes, error=0.1))

    assert found is not None
    assert found.verdict.answer == "unknown"
    assert found.proposal.peak_bytes == least
    assert search(configured, Ratio(configured.spec, least, lambda plan: plan.peak_bytes * 2)) is None


@pytest.mark.parametrize("border", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("start", [0, 1, 2, 6, 7, 8, 300])
def test_the_largest_that_fits(border: int, start: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= border

    assert largest_that_fits(fits, MOST, start) == border
    assert len(asked) <= 2 * max(abs(border - start), 1).bit_length() + 3
    if border:
        assert {border, border + 1} <= {*asked}  # both ends are judged


@pytest.mark.parametrize(
    ("config", "overrides", "gpu", "budget"),
    [
        ("gpt2", GPT2, "a100-40gb", "6GiB"),
        ("gpt2", ("recipe=mixed-16", "b=13", "dtype=fp16", "attention=memory-efficient"), "t4", None),
        ("llama-3.2-1b", ("recipe=pure", "b=5", "s=2048", "optimizer_implementation=fused"), "a100-40gb", None),
    ],
)
def test_the_verdict_is_that_of_every_command(
    config: str, overrides: tuple[str, ...], gpu: str, budget: str | None
) -> None:
    planning = memcalc.recompute(config, *overrides, gpu=gpu, budget=budget)
    again = judge(planning.result.spec, planning.limit)

    assert planning.verdict == again
    assert again.answer == "fits"
    cheaper = optimal(planning.configured.chain, planning.budget, bounded=False)
    assert cheaper is not None
    assert cheaper.evaluation.recompute_flops == planning.plan.evaluation.recompute_flops


def test_a_budget_beyond_the_gpu_is_the_gpus() -> None:
    planning = memcalc.recompute("gpt2", *GPT2, gpu="t4", budget="100GiB")

    assert planning.limit == memcalc.recompute("gpt2", *GPT2, gpu="t4").limit < 16 * GIB


def test_what_holds_memory_and_is_not_modelled() -> None:
    """The plan leaves room for what is known of it; whether the rest fits is open."""
    spec = memcalc.load("gpt2", *GPT2, gpu="a100-40gb")
    second = spec.with_origin(Origin(limits=(Limit("a second model", holds_memory=True, at_least_bytes=GIB),)))
    planning, alone = memcalc.recompute(second, budget="6GiB"), memcalc.recompute(spec, budget="6GiB")

    assert planning.verdict.answer == "unknown"
    assert planning.verdict.unmodelled == ("a second model",)
    assert planning.verdict.interval is not None
    assert planning.verdict.interval.high_bytes + GIB <= planning.limit == 6 * GIB
    assert planning.plan.evaluation.recompute_flops > alone.plan.evaluation.recompute_flops


def test_exit_codes_where_nothing_can_be_said(run: Callable[..., Run]) -> None:  # noqa: F811
    sharded = ("--set", "data_parallel=4", "--set", "zero_stage=1", "--set", "engine=deepspeed")
    asked = ("recompute", "gpt2", "--set", "recipe=pure", "--set", "b=8", *sharded, "--budget", "9GiB")
    code, out, err = run(*asked)

    assert (code, err) == (1, "")
    assert "CANNOT SAY: needs at least " in out
    assert "not replayed; the range of" in " ".join(out.split())
    code, out, err = run(*asked, "--accept-unknown", "--format", "json")
    document = documents()["recompute"].validate_json(out)
    assert (code, err) == (0, "")
    assert (document["verdict"], document["fits"]) == ("unknown", None)


def test_the_document_is_that_of_its_schema(run: Callable[..., Run]) -> None:  # noqa: F811
    sets = [word for override in GPT2 for word in ("--set", override)]
    code, out, err = run("recompute", "gpt2", *sets, "--gpu", "a100-40gb", "--budget", "6GiB", "--format", "json")
    document = documents()["recompute"].validate_json(out)

    assert (code, err) == (0, "")
    assert document["verdict"] == "fits"
    offload = document["offload"]
    assert offload["host_bytes_per_rank"] == offload["host_bytes_per_node"] == offload["freed_bytes"]


def test_offload_says_what_the_host_must_have() -> None:
    planning = memcalc.recompute("gpt2", *GPT2, "data_parallel=16", gpu="a100-40gb", budget="8GiB")

    assert planning.third is not None
    assert planning.third.node_ranks == 8  # of a node of A100s
    assert planning.third.host_bytes_per_node == 8 * planning.third.host_bytes_per_rank > 0


def test_what_would_help_where_nothing_fits() -> None:
    """The foreach update is the peak, whatever is recomputed; the fused one makes a plan fit."""
    with pytest.raises(DoesNotFit) as refused:
        memcalc.recompute("llama-3.2-1b", "recipe=pure", "b=1", "s=256", gpu="a100-40gb", budget="12GiB")
    message = str(refused.value)

    assert "is in optimizer_step_" in message
    assert "Recomputation does not reduce the optimizer step." in message
    assert "Cheapest change with which a plan fits: --set optimizer_implementation=fused" in message
    fused = ("recipe=pure", "b=1", "s=256", "optimizer_implementation=fused")
    assert memcalc.recompute("llama-3.2-1b", *fused, gpu="a100-40gb", budget="12GiB").verdict.answer == "fits"


def test_a_plan_that_is_nested_too_deep_to_be_written(tmp_path: Path) -> None:
    """The smallest plan of 16 layers under transformers' modules is 16 lists deep."""
    overrides = ("recipe=mixed-18", "b=4", "s=1024", "implementation=huggingface")
    spec = memcalc.load("llama-3.2-1b", *overrides, gpu="a100-80gb")
    with pytest.raises(DoesNotFit, match=r"No plan fits the 29\.00 GiB budget"):
        memcalc.recompute(spec, budget="29GiB")
    assert with_recompute(spec, "full").training.recompute == "full"
