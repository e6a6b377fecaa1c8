"""Plans inside a layer: the integer programme against all choices, and the plan against estimate, trace and step."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memcalc
from memcalc.errors import DoesNotFit, InputError, Unavailable
from memcalc.recomputation.config_chain import chain_of, layer_flops, product_flops, with_recompute
from memcalc.recomputation.selective import Product, Selective, SelectiveChoice, choose
from memcalc.recomputation.strategies.optimal import optimal
from memcalc.spec.matmuls import layer_matmuls
from tests.cli.conftest import Run, run  # noqa: F401 -- a fixture
from tests.nullcuda.conftest import NULL_PYTHON

GIB = 2**30
PURE = ("recipe=pure", "b=16", "s=1024")
NARROW = ("d=1024", "h=16", "moe.expert_intermediate_size=3584")


def all_choices(layers: int, inside: int, again: int, products: list[Product], room: int) -> list[int]:
    """FLOPs of every choice that fits the room."""
    found = []
    for recomputed in range(layers + 1):
        for count in range(len(products) + 1):
            for kept in combinations(products, count):
                held = (layers - recomputed) * inside + recomputed * sum(product.saved_bytes for product in kept)
                if held <= room:
                    found.append(recomputed * (again - sum(product.spared_flops for product in kept)))
    return found


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 900)), min_size=1, max_size=5),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 20_000),
)
def test_the_programme_finds_the_best_of_all_choices(
    layers: int, sizes: list[tuple[int, int]], more_bytes: int, more_flops: int, room: int
) -> None:
    pytest.importorskip("scipy")
    products = [Product(f"product {i}", *pair) for i, pair in enumerate(sizes)]
    inside = sum(product.saved_bytes for product in products) + more_bytes
    again = sum(product.spared_flops for product in products) + more_flops

    found = choose(layers, inside, again, products, room)

    assert found is not None
    kept = [product for product in products if product.name in found.saved_operators]
    held = (layers - found.recomputed) * inside + found.recomputed * sum(product.saved_bytes for product in kept)
    cost = found.recomputed * (again - sum(product.spared_flops for product in kept))
    assert held <= room + room * 1e-6
    # The tie between plans of one price may cost a millionth of a layer's FLOPs for each room that it spares.
    assert cost <= min(all_choices(layers, inside, again, products, room)) + again * 1e-5 * layers


def test_no_room_has_no_choice() -> None:
    assert choose(3, 10, 10, [Product("a", 5, 5)], -1) is None
    assert choose(3, 10, 10, [Product("a", 5, 5)], 30) == SelectiveChoice(0, ())


def test_without_scipy_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    with pytest.raises(Unavailable) as refused:
        choose(3, 10, 10, [Product("a", 5, 5)], 20)
    assert (
        str(refused.value) == "strategy = selective needs SciPy, which is not installed. Run: pip install 'scipy>=1.11'"
    )


@pytest.mark.parametrize("config", ["gpt2", "llama-3.2-1b", "codegen-350m", "mixtral-8x7b", "qwen1.5-moe-a2.7b"])
def test_products_are_all_of_a_layers_flops(config: str) -> None:
    for attention in ("eager", "flash"):
        spec = memcalc.load(config, f"attention={attention}", "b=3", "s=256")
        assert sum(product_flops(spec).values()) == layer_flops(spec, 0)


@pytest.mark.parametrize(
    ("config", "overrides", "budget"),
    [
        pytest.param("gpt2", PURE, 14 * GIB, marks=pytest.mark.long),
        ("llama-3.2-1b", ("recipe=pure", "b=4", "s=2048", "optimizer_implementation=fused"), 25 * GIB),
        pytest.param("codegen-350m", ("recipe=pure", "b=8", "s=1024"), 10 * GIB, marks=pytest.mark.long),
    ],
)
def test_selective_plans_run_less_again_than_plans_of_whole_layers(
    config: str, overrides: tuple[str, ...], budget: int
) -> None:
    """And the chain's peak is the estimate's."""
    pytest.importorskip("scipy")
    spec = memcalc.load(config, *overrides, gpu="a100-80gb")
    found = Selective(spec).cheapest_plan(budget)
    assert found is not None

    assert found.saved_operators
    assert found.peak_bytes == memcalc.estimate(found.spec).ledger.peak_bytes <= budget
    whole = optimal(chain_of(spec).chain, budget)
    assert whole is not None
    assert found.plan.evaluation.recompute_flops < whole.evaluation.recompute_flops


def test_keeping_everything_that_runs_again_costs_no_products() -> None:
    """A Llama layer's last product is not run again: PyTorch stops once all that was kept for backward is there."""
    spec = memcalc.load("llama-3.2-1b", "recipe=pure")
    names = layer_matmuls(spec.model, spec.training)
    flops = product_flops(spec)

    bare = chain_of(spec, ()).chain.blocks[2]
    assert bare.released_late_bytes == 0
    assert bare.recompute_flops == sum(flops.values()) - flops["mlp.down_proj"]
    every = chain_of(spec, names[:-1]).chain.blocks[2]
    assert every.recompute_flops == 0
    # qkv (d + 2·512), attention and o_proj (d each), gate and up (4d each) of 2048 tokens, bf16; log-sum-exps;
    # and a block each for a seed and an unused mask.
    assert every.released_late_bytes == 2048 * 2 * (3072 + 2048 + 2048 + 8192 + 8192) + 32 * 2048 * 4 + 2 * 512


@pytest.mark.long
@pytest.mark.skipif(not NULL_PYTHON.exists(), reason="no CUDA build of torch: `make .venv-null`")
@pytest.mark.parametrize(
    ("config", "overrides", "budgets"),
    [
        ("gpt2", PURE, ("17GiB", "16GiB")),
        ("gpt2", ("recipe=amp", "b=8", "s=1024", "training.dropout=0.1"), ("9GiB",)),
        ("llama-3.2-1b", ("recipe=pure", "b=4", "s=2048", "optimizer_implementation=fused"), ("28GiB", "27GiB")),
        (
            "llama-3.2-1b",
            ("recipe=pure", "b=4", "s=1024", "attention=eager", "optimizer_implementation=fused"),
            ("20GiB",),
        ),
        ("codegen-350m", ("recipe=pure", "b=8", "s=1024"), ("11.5GiB", "10GiB")),
        (
            "mixtral-8x7b",
            ("recipe=pure", "b=16", "s=1024", "l=4", "V=8000", "optimizer_implementation=fused", *NARROW),
            ("8GiB", "6.5GiB"),
        ),
        (
            "qwen1.5-moe-a2.7b",
            ("recipe=pure", "b=16", "s=1024", "l=4", "V=8000", "d=1024", "h=16", "optimizer_implementation=fused"),
            ("14GiB",),
        ),
    ],
)
def test_planned_peaks_are_traced_peaks(
    config: str, overrides: tuple[str, ...], budgets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The bars: allocated within 0.1 %, and what is reserved fits the budget."""
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    for budget in budgets:
        planning = memcalc.recompute(config, *overrides, gpu="a100-80gb", budget=budget, strategy="selective")
        assert planning.saved_operators
        for device in memcalc.api.verified(planning, python=str(NULL_PYTHON)):
            with capsys.disabled():
                print(
                    f"\n{config} {budget} on {device.device}: planned {device.planned:,}, traced {device.traced:,}, "
                    f"{device.planned / device.traced - 1:+.4%}, budget {planning.budget:,}: {planning.recompute} "
                    f"keeping {', '.join(planning.saved_operators)}"
                )
            assert abs(device.planned / device.traced - 1) <= 0.001
            outside = planning.result.headline.outside
            assert device.reserved[1] + outside.device_context <= planning.limit


def test_pasted_code_keeps_what_the_plan_says() -> None:
    """The lines for PyTorch, executed on layers of seven products: each runs again but for those that are kept."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("scipy")
    from torch.utils._python_dispatch import TorchDispatchMode

    planning = memcalc.recompute("gpt2", *PURE, gpu="a100-80gb", budget="16GiB", strategy="selective")
    products = layer_matmuls(planning.configured.spec.model, planning.configured.spec.training)
    ran: list[Any] = []

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in products)

        def forward(self, x):
            for step in self.steps:
                x = step(x).tanh()
            return x

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func)
            return func(*args, **(kwargs or {}))

    names = {"layers": [Layer() for _ in range(12)], "x": torch.randn(2, 4, requires_grad=True)}
    with Watch():
        exec("\n".join(planning.framework_texts[0].lines), names)
        forward = ran.count(torch.ops.aten.mm.default)
        names["x"].sum().backward()

    again = len([item for item in planning.plan.plan.items if not isinstance(item, int)])
    assert forward == 12 * len(products)
    # Backward: two products a linear; and what runs again.
    assert ran.count(torch.ops.aten.mm.default) == 3 * forward + again * (len(products) - len(planning.saved_operators))


@pytest.mark.parametrize(
    ("config", "keep"),
    [
        ("gpt2 l=2 d=64 h=4 V=96", ("attention.qkv_proj", "attention output", "mlp.up_proj")),
        (
            "mixtral-8x7b l=2 d=64 h=4 num_key_value_heads=2 head_dim=16 V=96 moe.expert_intermediate_size=32",
            ("attention.o_proj", "mlp.router", "mlp.experts.gate", "mlp.experts.down"),
        ),
    ],
)
def test_gradients_are_those_of_everything_kept(config: str, keep: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    from memcalc.step.causal_lm import build

    def gradients(recompute: str, keep: tuple[str, ...]) -> list[Any]:
        torch.manual_seed(0)
        spec = memcalc.load(*config.split(), "recipe=fp32", "dtype=fp32", "attention=eager", "s=16")
        model = build(with_recompute(spec, recompute, keep), torch.device("cpu"))
        tokens = torch.randint(96, (1, 16))
        model.loss(model.logits(tokens), tokens).backward()
        return [parameter.grad for parameter in model.module.parameters()]

    kept, again = gradients("none", ()), gradients("full", keep)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("recompute_keep=[attention]",),
            "recompute_keep needs recomputed layers, but recompute = none",
        ),
        (
            ("recompute=full", "recompute_keep=[mlp]"),
            "recompute_keep = mlp is not an operator of the layer. Choose from attention.qkv_proj",
        ),
        (
            ("recompute=full", "recompute_keep=[attention]", "implementation=huggingface"),
            "implementation = huggingface has no modelled order of operators",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as refused:
        memcalc.load("gpt2", *overrides)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("deepseek-v2-lite", "the order of operators of latent attention is not modelled"),
        ("gpt-oss-20b", "experts with biases run a different matmul"),
        ("llama-3.2-1b implementation=huggingface", "implementation = huggingface has no modelled order of operators"),
    ],
)
def test_layers_that_are_not_planned_inside(config: str, why: str) -> None:
    name, *overrides = config.split()
    with pytest.raises(InputError, match=f"strategy = selective saves results of single operators, but {why}"):
        memcalc.recompute(name, *overrides, gpu="h200", budget="2000GiB", strategy="selective")


def test_plans_of_experts_on_the_screen(run: Callable[..., Run]) -> None:  # noqa: F811
    """What runs again is no product, and transformers' experts have products of their own."""
    pytest.importorskip("scipy")
    overrides = ("recipe=pure", "b=16", "s=1024", "l=4", "V=8000", "optimizer_implementation=fused", *NARROW)
    sets = [word for override in overrides for word in ("--set", override)]
    asked = ("recompute", "mixtral-8x7b", *sets, "--gpu", "a100-80gb", "--budget", "8GiB", "--strategy", "selective")
    code, out, err = run(*asked)
    text = " ".join(out.split())

    assert (code, err) == (0, "")
    assert "recomputes no matmul" in text
    assert "Memory against compute, plans of whole layers" in text
    assert "--recompute-granularity selective --recompute-modules moe" in text
    assert text.count("KEEP = {") == 1


def test_what_does_not_fit_names_the_smallest() -> None:
    with pytest.raises(DoesNotFit, match="No plan fits"):
        memcalc.recompute("gpt2-xl", gpu="t4", strategy="selective")


def test_the_screen(run: Callable[..., Run]) -> None:  # noqa: F811
    pytest.importorskip("scipy")
    sets = [word for override in PURE for word in ("--set", override)]
    code, out, err = run(
        "recompute", "gpt2", *sets, "--gpu", "a100-80gb", "--budget", "16GiB", "--strategy", "selective"
    )

    assert (code, err) == (0, "")
    assert "    recompute_keep: [attention" in out
    assert "this plan (selective)" in out
    assert "--recompute-granularity selective --recompute-modules" in out
