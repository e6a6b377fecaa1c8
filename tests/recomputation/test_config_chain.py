"""Plans of configurations: the chain's peak is the estimate's, to the byte, and the rules are never better."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import memcalc
from memcalc.errors import DoesNotFit, InputError
from memcalc.recomputation.batch_gain import Machine, break_even, gain, slow_down, step_seconds
from memcalc.recomputation.config_chain import chain_of, with_recompute
from memcalc.recomputation.evaluation import evaluate
from memcalc.recomputation.plan import Segment, all_saved
from memcalc.recomputation.planner import STRATEGIES
from memcalc.recomputation.recommendation import plan_recompute
from memcalc.recomputation.strategies.lowest_peak import smallest
from memcalc.recomputation.strategies.optimal import optimal
from memcalc.recomputation.strategies.rules import cut
from memcalc.suggestions.run_overrides import written_out
from tests.cli.conftest import Run, run  # noqa: F401 -- a fixture

GIB = 2**30


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("gpt2", ("recipe=pure", "b=8", "V=2000")),
        ("gpt2", ("recipe=amp", "b=4")),
        ("gpt2", ("recipe=mixed-20", "b=4", "implementation=huggingface")),
        ("llama-3.2-1b", ("recipe=fp32", "dtype=fp32", "attention=memory-efficient", "V=2000")),
        ("mixtral-8x7b", ("recipe=pure", "l=6", "V=2000")),
        ("gpt3", ("recipe=mixed-18", "tensor_parallel=8", "l=8")),
    ],
)
def test_the_peak_of_a_plan_is_the_estimates(config: str, overrides: tuple[str, ...]) -> None:
    configured = chain_of(memcalc.load(config, *overrides, gpu="h200"))
    chain = configured.chain
    plans: list[Segment] = [all_saved(len(chain)), cut(chain, 1), cut(chain, 3), smallest(chain).items]
    for items in plans:
        planned = with_recompute(configured.spec, configured.recompute(items))
        assert evaluate(chain, items).peak_bytes == memcalc.estimate(planned).ledger.peak_bytes


def test_flops_are_those_of_matrix_products() -> None:
    """GPT-2's layer: 12 d² weights, a multiply-add each a token; attention 4·b·s²·d. Its head: V·d."""
    configured = chain_of(memcalc.load("gpt2", "b=2", "s=512"))

    tokens, d = 2 * 512, 768
    layer = configured.chain.blocks[configured.first]
    assert layer.flops == 2 * tokens * 12 * d * d + 4 * tokens * 512 * d
    assert configured.chain.blocks[-1].flops == 2 * tokens * 50257 * d


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("llama-3-8b", ("recipe=pure", "s=4096", "b=2")),
        ("llama-3-70b", ("recipe=pure", "s=4096", "b=8", "tensor_parallel=8", "optimizer_implementation=fused")),
        ("gpt3", ("recipe=pure", "b=4", "tensor_parallel=16", "optimizer_implementation=fused")),
    ],
)
def test_the_optimum_is_never_worse_than_the_rules(
    config: str, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    configured = chain_of(memcalc.load(config, *overrides, gpu="h200"))
    chain = configured.chain
    low = evaluate(chain, smallest(chain)).peak_bytes
    high = evaluate(chain, all_saved(len(chain))).peak_bytes
    rules = [evaluate(chain, cut(chain, k)) for k in range(1, len(chain))]
    for share in (10, 40, 70):
        budget = low + (high - low) * share // 100
        found = optimal(chain, budget)
        rule = min(rule.recompute_flops for rule in rules if rule.peak_bytes <= budget)
        assert found is not None
        assert found.evaluation.peak_bytes <= budget
        assert found.evaluation.recompute_flops <= rule
        with capsys.disabled():
            ours = found.evaluation.recompute_flops / chain.flops
            loss = (found.loss or 0) / chain.flops
            print(
                f"\n{config} at {budget / GIB:.1f} GiB: {ours:.1%} of a forward again, rules {rule / chain.flops:.1%}, "
                f"at most {loss:.2%} above the best"
            )


def test_the_answer() -> None:
    planning = memcalc.recompute("gpt2", "recipe=pure", "b=16", "V=2000", gpu="a100-40gb", budget="6GiB")

    assert planning.verdict.answer == "fits"
    assert (planning.result.headline.device_bytes or 0) <= planning.limit == 6 * GIB
    assert planning.plan.evaluation.peak_bytes <= planning.budget < 6 * GIB
    assert planning.plan.loss is not None
    assert planning.plan.evaluation.recompute_flops <= dict(planning.rules)["every-layer"].recompute_flops
    assert set(dict(planning.rules)) == set(STRATEGIES)
    assert [said.framework for said in planning.framework_texts] == [
        "PyTorch",
        "transformers",
        "Megatron-LM",
        "DeepSpeed",
        "torchtitan",
    ]
    assert planning.framework_texts[0].items == planning.plan.plan.items


def test_pasted_code_runs_the_plan() -> None:
    """The lines for PyTorch, executed: each layer as often as the plan says."""
    torch = pytest.importorskip("torch")
    planning = memcalc.recompute("gpt2", "recipe=pure", "b=16", "l=6", "V=2000", gpu="a100-40gb", budget="3.5GiB")
    ran: list[int] = []

    class Layer(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x):
            ran.append(self.number)
            return super().forward(x).relu()

    layers = torch.nn.ModuleList(Layer(4, 4) for _ in range(6))
    for number, layer in enumerate(layers):
        layer.number = number
    names = {"layers": layers}
    exec("\n".join(planning.framework_texts[0].lines), names)
    names["run"](names["PLAN"], torch.randn(2, 4, requires_grad=True)).sum().backward()

    again = planning.plan.evaluation.recompute_flops // planning.configured.chain.blocks[1].flops
    assert again > 0
    assert len(ran) == 6 + again


def test_an_impossible_budget_names_the_smallest_and_what_holds_it() -> None:
    with pytest.raises(DoesNotFit) as refused:
        memcalc.recompute("gpt2-xl", gpu="t4")

    message = str(refused.value)
    assert message.startswith("No plan fits 14.56 GiB usable on Tesla T4. The smallest needs at least 36.35 GiB")
    assert "is in optimizer_step_1: optimizer state 11.61 GiB, gradients" in message
    assert "Recomputation does not reduce the optimizer step." in message
    assert "micro_batch_size" not in message  # a smaller one would not help either


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ((), {}, "the memory limit is missing. Add --gpu GPU or --budget SIZE."),
        (
            ("pipeline_parallel=2",),
            {"gpu": "t4"},
            "pipeline_parallel = 2, but plans are for one stage only.",
        ),
        (
            (),
            {"gpu": "t4", "strategy": "best"},
            "strategy = 'best' is not known. Choose optimal, selective, none,",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(overrides: tuple[str, ...], options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as refused:
        memcalc.recompute("gpt2", *overrides, **options)  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_the_largest_batch() -> None:
    run_on_t4 = (
        "recipe=mixed-16",
        "dtype=fp16",
        "attention=memory-efficient",
    )  # a T4 has neither bf16 nor flash attention
    planning = memcalc.recompute("gpt2", *run_on_t4, gpu="t4", maximize=True)

    without, best = planning.gain.without, planning.gain.most
    assert without < best == planning.result.spec.training.micro_batch_size
    assert planning.gain.replayed
    assert planning.verdict.answer == "fits"
    assert memcalc.recompute("gpt2", *run_on_t4, f"b={without}", gpu="t4").recompute == "none"
    assert memcalc.recompute("gpt2", *run_on_t4, f"b={without + 1}", gpu="t4").recompute != "none"
    with pytest.raises(DoesNotFit):
        memcalc.recompute("gpt2", *run_on_t4, f"b={best + 1}", gpu="t4")


def test_an_engine_has_its_layers_recomputed_one_by_one() -> None:
    planning = memcalc.recompute(
        "gpt2", "recipe=pure", "b=8", "data_parallel=4", "zero_stage=3", gpu="a100-40gb", budget="10GiB"
    )

    assert planning.recompute != "none"
    assert all(isinstance(layer, int | str) for layer in planning.recompute)
    assert planning.verdict.answer == "fits"


def test_the_command(run: Callable[..., Run], tmp_path: Path) -> None:  # noqa: F811
    written = tmp_path / "planned.yaml"
    code, out, err = run(
        "recompute",
        "gpt2",
        "--set",
        "recipe=pure",
        "--set",
        "b=16",
        "--gpu",
        "a100-40gb",
        "--set",
        "V=2000",
        "--budget",
        "6GiB",
        "--write",
        str(written),
        "--format",
        "json",
    )
    document = json.loads(out)

    assert (code, err) == (0, "")
    result = memcalc.estimate(str(written))
    assert result.replayed.ledger.peak_bytes == document["peak_bytes"]
    assert (document["verdict"], document["fits"]) == ("fits", True)
    assert document["device_bytes"] <= document["interval"]["high_bytes"] <= document["limit_bytes"] == 6 * GIB
    assert abs(result.ledger.peak_bytes / document["peak_bytes"] - 1) < 0.001
    assert document["may_save_at_most_flops"] == 0
    # A plan has one peak wherever plans are compared, and that of its replay in addition.
    by_formulas = document["peak_bytes"] - document["rests_bytes"]
    assert by_formulas in {point["peak_bytes"] for point in document["front"]}
    assert abs(document["rests_bytes"]) < 0.002 * document["peak_bytes"]
    assert document["front"][-1]["again_flops"] == 0
    # The plan is on the front, or as good as a point of it: no point beats it in both, by the formulas of either.
    cheaper = [p for p in document["front"] if p["again_flops"] <= document["again_flops"]]
    assert min(point["peak_bytes"] for point in cheaper) >= result.ledger.peak_bytes


def test_the_screen(run: Callable[..., Run]) -> None:  # noqa: F811
    code, out, err = run(
        "recompute", "gpt2", "--set", "b=16", "--set", "V=2000", "--gpu", "a100-40gb", "--budget", "6GiB"
    )

    assert (code, err) == (0, "")
    assert "FITS: " in out
    assert "Interval: " in out
    assert "The allocator replay finds" in out
    table, front = out.split("Memory against compute")
    (own,) = re.findall(r"this plan \(optimal\) +([\d.]+)", table)
    assert re.search(rf"^ +{own}  fits", front, re.MULTILINE)  # the same plan, the same peak
    assert "  training:\n    recompute: " in out
    assert "--recompute-granularity full" in out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("    "))


@pytest.mark.long
def test_the_picture(run: Callable[..., Run], tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    asked = ("recompute", "gpt2", "--set", "b=16", "--set", "V=2000", "--gpu", "a100-40gb", "--budget", "6GiB")
    code, _, err = run(*asked, "--plot", str(tmp_path / "front.svg"))

    assert (code, err) == (0, "")
    picture = (tmp_path / "front.svg").read_text()
    assert picture.startswith("<?xml")
    for words in ("this plan (optimal)", "every-layer", "budget ", "recomputed FLOPs, % of a forward"):
        assert f"<!-- {words}" in picture  # matplotlib says each text it draws
    code, out, err = run(*asked, "--plot", str(tmp_path / "front.html"))
    assert (code, out) == (2, "")
    assert "front.html ends in '.html'. The suffix decides what is written: .png, .svg." in err


def test_exit_code_1_where_nothing_fits(run: Callable[..., Run]) -> None:  # noqa: F811
    code, out, err = run("recompute", "gpt2-xl", "--gpu", "t4")

    assert (code, out) == (1, "")
    assert err.startswith("error: No plan fits 14.56 GiB")


def test_a_steps_time() -> None:
    """Forward 1 s, backward 2 s; a ring of 4 ranks moves 2·3/4 of 20 bytes at 10 a second: 3 s, of which 1 is waited."""
    machine = Machine(100.0, ranks=4, link_bytes_per_second=10.0)

    assert step_seconds(machine, 1, 100, 0, 20) == 1 + 2 + 1
    assert step_seconds(machine, 1, 100, 50, 20) == 1 + 2.5 + 0.5  # recomputation hides a part of the ring
    assert slow_down(100, 100) == 4 / 3


def test_the_break_even_of_a_larger_batch() -> None:
    """4 and 16 sequences, the larger ones with a third more work: (4/3 - 1)·4·16/(16 - 4/3·4) = 2."""
    half = break_even(4, 16, 4 / 3)

    assert half == pytest.approx(2)
    assert gain(Machine(100.0, half_batch=half or 0), (4, 0), (16, 16 * 100), 100, 0) == pytest.approx(1)
    assert break_even(4, 5, 4 / 3) is None  # a quarter more sequences, a third more work each


def test_what_a_plan_buys() -> None:
    planning = memcalc.recompute("gpt2", "recipe=pure", "b=16", "V=2000", gpu="a100-40gb", budget="6GiB")
    found, third = planning.gain, planning.third

    assert found.without < 16 <= found.most
    assert found.pays_below is not None
    half = found.without * (1 / found.pays_below - 1)
    assert break_even(found.without, found.most, found.slow_down) == pytest.approx(half)
    assert third is not None
    assert third.offload is not None
    assert third.offload.freed_bytes >= planning.before.peak_bytes - planning.budget
    # 12 layers of 312 TFLOP/s; forward once, backward twice.
    assert third.step_seconds == 3 * planning.configured.chain.flops / 312e12
    slower = plan_recompute(written_out(planning.configured.spec), 6 * GIB, host_bytes_per_second=10**9).third
    assert slower is not None
    assert slower.offload is not None
    assert slower.offload.waited_seconds > third.offload.waited_seconds


def test_a_larger_batch_pays_where_a_gpu_is_not_full() -> None:
    """At b_half = 4 a GPU reaches 1/2 of its rate with 4 sequences and 4/5 with 16: 1.6 times, over 4/3 of the work."""
    assert gain(Machine(100.0, half_batch=4.0), (4, 0), (16, 16 * 100), 100, 0) == pytest.approx(1.6 * 3 / 4)
    assert gain(Machine(100.0), (4, 0), (16, 16 * 100), 100, 0) == pytest.approx(3 / 4)
