"""Chains that a file describes: the published ones, written down in YAML."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from memcalc import api
from memcalc.errors import InputError
from memcalc.recomputation.chain_file import describes_chain, open_chain
from memcalc.recomputation.evaluation import evaluate
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.verdict.recorded_errors import reserve_ratio
from tests.cli.conftest import Run, run  # noqa: F401 -- a fixture
from tests.recomputation.published import PARAMETERS, branches, eight_products, keeping

PRODUCTS = """
name: eight products
chain:
  blocks:
    - {name: product, count: 8, input: 1, output: 1, flops: 1}
    - {name: loss, input: 1, output: 0, recomputable: false}
"""

# A batch of 1000: 4·1000·512 bytes between two layers; 2·1000·512·512 FLOPs.
BRANCHES = f"""
chain:
  resident: {12 * PARAMETERS}
  input: 2048000
  branches: 64
  blocks:
    - {{name: layer, count: 21, input: 2048000, output: 2048000, flops: 524288000, left: 1 MiB}}
    - {{name: layer 22, input: 2048000, output: 32000, flops: 8192000, left: 16 KiB}}
  joined:
    - {{name: concatenation, input: 2048000, output: 2048000, recomputable: false}}
    - {{name: loss, input: 2048000, output: 0, recomputable: false}}
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "chain.yaml").write_text(text)
        return str(tmp_path / "chain.yaml")

    return write


def test_eight_products(written: Callable[[str], str]) -> None:
    described = open_chain(written(PRODUCTS))

    assert described.name == "eight products"
    assert described.chain() == eight_products()


def test_branches_that_are_joined(written: Callable[[str], str]) -> None:
    chain = open_chain(written(BRANCHES)).chain()
    plan = keeping(5, 10, 15, 19)

    assert evaluate(chain, plan).peak_bytes == evaluate(branches(1000), plan).peak_bytes
    assert chain.flops == branches(1000).flops


def test_its_plan(written: Callable[[str], str]) -> None:
    planning = api.recompute_chain(written(PRODUCTS), budget=6)

    assert planning.plan.plan.items == ((0, 1, 2), (3, 4, 5), 6, 7, 8)
    assert planning.plan.loss == 0
    assert planning.reserve is None
    with_card = api.recompute_chain(written(PRODUCTS), gpu="t4", strategy="every-layer")
    assert with_card.plan.evaluation.recompute_flops == 8


def test_the_budget_of_a_gpu_assumes_the_maximum_ratio(
    run: Callable[..., Run],  # noqa: F811
    written: Callable[[str], str],
) -> None:
    """A chain cannot be replayed, so the most that recorded runs of one GPU reserved for each allocated byte counts."""
    planning = api.recompute_chain(written(PRODUCTS), gpu="t4")
    middle, errors = reserve_ratio(("one GPU",))
    card = find_gpu("t4")

    assert planning.reserve is not None
    assert planning.reserve.ratio == pytest.approx(middle * (1 + errors.high))
    assert planning.reserve.ratio > middle > 1
    assert planning.budget == int((card.usable_bytes - card.context_bytes) / planning.reserve.ratio)
    code, out, err = run("recompute", written(PRODUCTS), "--gpu", "t4", "--accept-unknown")
    assert (code, err) == (0, "")
    assert f"divided by {planning.reserve.ratio:.2f}, the most that {errors.runs} recorded runs" in " ".join(
        out.split()
    )


def test_the_command(run: Callable[..., Run], written: Callable[[str], str]) -> None:  # noqa: F811
    path = written(PRODUCTS)
    code, out, err = run("recompute", path, "--budget", "6", "--units", "bytes")

    assert (code, err) == (0, "")
    assert "FITS: 6 bytes of 6 bytes; recomputes 75.0% of a forward, a step is 25.0% longer." in out
    assert "((0, 1, 2), (3, 4, 5), 6, 7, 8)" in out
    code, out, err = run("recompute", path, "--budget", "6", "--format", "json")
    assert json.loads(out)["plan"] == [[0, 1, 2], [3, 4, 5], 6, 7, 8]
    code, out, err = run("recompute", path, "--budget", "3")
    assert (code, out) == (1, "")
    assert "No plan fits 0.00 GiB. The smallest needs" in err
    code, out, err = run("recompute", path, "--budget", "6", "--verify")
    assert (code, out) == (2, "")
    assert "is a chain: --set, --verify, --plot, --html and --write need a configuration." in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "chain: {blocks: [{input: 1, output: 2, size: 3}]}",
            "chain.blocks.0.size = 3: Extra inputs are not permitted",
        ),
        (
            "chain: {blocks: [{input: -1, output: 2}]}",
            "chain.blocks.0.input = -1: Input should be greater than or equal",
        ),
        ("chain: {blocks: [{input: 1 GiBi, output: 2}]}", "'1 GiBi' is not a size"),
        ("chain: {blocks: []}", "chain.blocks = a list: List should have at least 1 item"),
        ("chain: {branches: 2, blocks: [{input: 1, output: 2}]}", "chain.branches = 2, but nothing joins them."),
        ("chain: [", "this is not YAML"),
    ],
)
def test_what_is_no_chain_is_refused(text: str, message: str, written: Callable[[str], str]) -> None:
    with pytest.raises(InputError) as refused:
        open_chain(written(text))
    assert message in str(refused.value)


def test_selective_plans_need_operators(written: Callable[[str], str]) -> None:
    with pytest.raises(InputError, match="strategy = 'selective' does not apply to chains"):
        api.recompute_chain(written(PRODUCTS), budget=6, strategy="selective")
    with pytest.raises(InputError, match="the memory limit is missing"):
        api.recompute_chain(written(PRODUCTS))


def test_other_files_are_no_chains(written: Callable[[str], str], tmp_path: Path) -> None:
    assert describes_chain(written(PRODUCTS))
    assert not describes_chain(written("model: {num_layers: 2}"))
    assert not describes_chain("gpt2")
    assert not describes_chain(str(tmp_path))
