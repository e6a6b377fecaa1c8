"""The published network of 64 branches as a chain file, the published plan, and the largest batches on its GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from memcalc import api
from memcalc.errors import DoesNotFit, InputError
from memcalc.recomputation.chain_file import open_chain
from memcalc.recomputation.evaluation import evaluate, evaluate_without_recomputation
from memcalc.recomputation.strategies.optimal import optimal
from tests.cli.conftest import Run, run  # noqa: F401 -- a fixture

FILE = str(Path(__file__).parents[2] / "docs" / "examples" / "chains" / "branches.yaml")
PUBLISHED = [5, 10, 15, 19]
BRANCH = 784 * 512 + 20 * 512 * 512 + 512 * 8
PARAMETERS = 64 * BRANCH + 512 * 10


def test_the_network_is_the_published_one() -> None:
    """361,501,696 parameters; gradients of all are left by backward; 12 bytes each are resident."""
    described = open_chain(FILE)
    chain = described.chain(1)

    assert PARAMETERS == 361_501_696
    assert chain.resident == 12 * PARAMETERS
    assert sum(block.left_bytes for block in chain.blocks) == 4 * PARAMETERS
    assert chain.flops == 2 * PARAMETERS  # of one sample: every weight multiplies once
    assert len(chain) == 64 * 22 + 3


def test_everything_saved_is_the_sum_of_all_inputs() -> None:
    """The image, 21 of [b, 512] a branch, 64 of [b, 8] joined and the classes: at the end of forward."""
    b = 1000
    chain = open_chain(FILE).chain(b)
    kept = 4 * b * (64 * 21 * 512 + 512 + 10 + 10)

    found = evaluate_without_recomputation(chain)

    assert found.saved_bytes == kept  # the image is resident beside the chain
    assert found.peak_bytes > 12 * PARAMETERS + kept + 4 * b * 784


def test_the_published_plan_saves_four_outputs_of_each_branch() -> None:
    described = open_chain(FILE)
    chain = described.chain()
    plan = described.keeping(chain, PUBLISHED)
    found = evaluate(chain, plan)

    assert plan.items[:5] == (
        (0, 1, 2, 3, 4),
        (5, 6, 7, 8, 9),
        (10, 11, 12, 13, 14),
        (15, 16, 17, 18),
        (19, 20, 21),
    )
    assert plan.items[-3:] == (1408, 1409, 1410)
    # Every matmul of every branch runs twice, but not the one to the classes: 2·512·10 FLOPs of a sample.
    assert found.recompute_flops == chain.flops - 2 * 512 * 10 * 6000


def test_the_largest_batches_are_exact() -> None:
    """At the answer the plan fits, at one more it does not, and so it is with everything saved."""
    planning = api.recompute_chain(FILE, gpu="p40", saved=PUBLISHED, maximize=True)
    described = open_chain(FILE)

    def peak(batch: int, *, saved: bool) -> int:
        chain = described.chain(batch)
        found = evaluate(chain, described.keeping(chain, PUBLISHED)) if saved else evaluate_without_recomputation(chain)
        return found.peak_bytes

    assert planning.gain is not None
    assert planning.budget is not None
    assert planning.batch == planning.gain.most
    for batch, saved in ((planning.gain.most, True), (planning.gain.without, False)):
        assert peak(batch, saved=saved) <= planning.budget < peak(batch + 1, saved=saved)
    assert planning.gain.most / planning.gain.without == pytest.approx(5.1, abs=0.1)
    # Forward once more: 4/3 of the work of a step, less the matmul to the classes.
    assert planning.gain.slow_down == pytest.approx(4 / 3, abs=1e-5)


@pytest.mark.long
def test_the_optimum_recomputes_less_than_the_published_plan() -> None:
    described = open_chain(FILE)
    chain = described.chain()
    published = evaluate(chain, described.keeping(chain, PUBLISHED))

    better = optimal(chain, published.peak_bytes)

    assert better is not None
    assert better.evaluation.peak_bytes <= published.peak_bytes
    assert better.evaluation.recompute_flops < published.recompute_flops


def test_the_screen_and_the_document(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Of one search."""
    search = cache(api.recompute_chain)
    monkeypatch.setattr(
        api, "recompute_chain", lambda *words, saved, **options: search(*words, saved=(*saved,), **options)
    )
    words = ("recompute", FILE, "--plan", "5,10,15,19", "--maximize", "batch", "--gpu", "p40")
    code, out, err = run(*words)
    document = json.loads(run(*words, "--format", "json").out)

    assert (code, err) == (0, "")
    assert out.startswith(f"64 branches of 22 matmuls: 1411 blocks, batch {document['batch']:,}\n")
    assert "with everything saved (5.1 times)." in " ".join(out.split())
    assert "this plan (given)" in out
    assert document["largest_batch"]["with"] == document["batch"]
    assert document["strategy"] == "given"


def test_a_given_plan_needs_no_limit(run: Callable[..., Run]) -> None:  # noqa: F811
    """The screen has the peak without a verdict, the document no budget; a search has nothing to search within."""
    words = ("recompute", FILE, "--plan", "5,10,15,19")
    code, out, err = run(*words)
    document = json.loads(run(*words, "--format", "json").out)
    chain = open_chain(FILE).chain()

    assert (code, err) == (0, "")
    assert document["budget_bytes"] is None
    assert document["peak_bytes"] == evaluate(chain, open_chain(FILE).keeping(chain, PUBLISHED)).peak_bytes
    assert "Needs 7.05 GiB; recomputes 100.0% of a forward" in " ".join(out.split())
    assert "FITS" not in out
    for more in (("--maximize", "batch"), ()):
        assert run("recompute", FILE, *(words[2:] if more else ()), *more).code == 2


CHAIN = """
chain:
  blocks:
    - {name: first, input: 8, output: 8, flops: 1}
    - {name: fixed, input: 8, output: 8, flops: 1, recomputable: false}
    - {name: later, count: 3, input: 8, output: 8, flops: 1}
"""


@pytest.fixture
def chain(tmp_path: Path) -> str:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    return str(tmp_path / "chain.yaml")


def test_blocks_that_cannot_be_recomputed_are_saved(chain: str) -> None:
    """So is the last one: its backward follows its forward at once."""
    planning = api.recompute_chain(chain, budget=1000, saved=[3])

    assert planning.plan.plan.items == ((0,), 1, (2,), (3,), 4)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            [2, 1],
            "--plan 2,1 does not name blocks in order: the chain has blocks 1 to 5. Give the numbers of the blocks",
        ),
        ([0], "the chain has blocks 1 to 5"),
        ([6], "the chain has blocks 1 to 5"),
        ([1, 1], "does not name blocks in order"),
    ],
)
def test_plans_of_other_blocks_are_refused(saved: list[int], message: str, chain: str) -> None:
    with pytest.raises(InputError, match=message):
        api.recompute_chain(chain, budget=1000, saved=saved)


def test_a_plan_that_does_not_fit_says_what_it_needs(chain: str) -> None:
    with pytest.raises(DoesNotFit, match=r"The plan does not fit 0\.00 GiB\. It needs "):
        api.recompute_chain(chain, budget=10, saved=[3])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (FILE, "--plan", "five", "--gpu", "p40"),
            "'five' is not a list of positions. Write the numbers of the blocks that save their outputs",
        ),
        (
            ("gpt2", "--plan", "5", "--gpu", "p40"),
            "--plan needs a chain, but gpt2 is a configuration. Set the plan of a configuration with --set",
        ),
    ],
)
def test_wrong_plans_on_the_command_line(words: tuple[str, ...], message: str, run: Callable[..., Run]) -> None:  # noqa: F811
    code, _, err = run("recompute", *words)

    assert code == 2
    assert message in err
