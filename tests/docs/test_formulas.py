"""docs/explanations/formulas.md misses nothing: every function of the estimate, and every source that a tensor cites, is in it."""

import ast
import itertools
from pathlib import Path

import pytest

import memcalc
from memcalc.layout.symbols import MEANINGS
from memcalc.spec.presets import preset_names
from tests.sources import tree_of
from tests.thinning import quick_every
from tools.formulas import cited_by, kept_sum
from tools.polynomial import ZERO, axes_product

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "explanations" / "formulas.md").read_text()


@pytest.mark.parametrize(
    "module",
    [
        "ledger/textbook",
        "programs/operator_workspaces",
        "states/communication_buffers",
        "layout/schedules",
        "states/megatron_buffers",
        "states/megatron_grad_buffer",
        "estimation/outside_allocator",
        "allocator/pytorch/block_sizes",
    ],
)
def test_every_function_appears(module: str) -> None:
    tree = tree_of(ROOT / "memcalc" / f"{module}.py")
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]

    assert functions
    assert [name for name in functions if f"- **`{name}`**" not in TEXT] == []


def test_every_symbol_appears() -> None:
    assert [symbol for symbol in MEANINGS if f"| `{symbol}` |" not in TEXT] == []


@pytest.mark.parametrize("preset", quick_every(15, preset_names()))
def test_every_source_of_a_model_appears(preset: str) -> None:
    for implementation, attention in itertools.product(
        ("plain", "huggingface"), ("eager", "flash", "memory-efficient")
    ):
        for recipe in ("amp", "mixed-20"):
            assert (
                missing(preset, f"implementation={implementation}", f"attention={attention}", f"recipe={recipe}")
                == set()
            )


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "lion", "adafactor", "adam-8bit"])
def test_every_source_of_an_optimizer_appears(optimizer: str) -> None:
    for how, recipe in itertools.product(("foreach", "fused", "for-loop"), ("pure", "mixed-16", "mixed-18")):
        words = (f"optimizer={optimizer}", f"optimizer_implementation={how}", f"recipe={recipe}")
        assert missing("gpt2", "num_layers=1", *words) == set()


@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp2", "megatron"])
def test_every_source_of_an_engine_appears(engine: str) -> None:
    for stage, split in itertools.product(range(4), ("sequence_parallel=false", "sequence_parallel=true")):
        words = (f"engine={engine}", f"zero_stage={stage}", "data_parallel=4", "tensor_parallel=2", split)
        modules = ("implementation=plain", "recipe=mixed-18") if engine == "megatron" else ()
        assert missing("llama-3.2-1b", *words, *modules) == set()


def missing(preset: str, *overrides: str) -> set[str]:
    """The sources of a run that the page lacks; none for a run that is refused."""
    try:
        return {citation for _, citation in cited_by(memcalc.load(preset, *overrides)) if citation not in TEXT}
    except memcalc.InputError:
        return set()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("gpt2 attention=eager recipe=pure dropout=0.1", "34·b·s·d + 5·b·s²·h + 16·b·s"),
        ("gpt2 attention=flash recipe=pure dropout=0.1", "34·b·s·d + 4·b·s·h + 16·b·s + 24"),
        ("gpt2 attention=flash recipe=pure dropout=0", "32·b·s·d + 4·b·s·h + 16·b·s + 24"),
        # 34 + 3 tensors of 2·4·d more in the activation function
        ("gpt2 attention=flash recipe=pure dropout=0.1 implementation=huggingface", "58·b·s·d + 4·b·s·h + 16·b·s + 24"),
        # q, k, v, the attention's output, and twice a residual and its norm
        ("llama-2-7b attention=flash recipe=pure", "16·b·s·d + 4·b·s·h + 8·b·s·F + 8·b·s + 24"),
    ],
)
def test_sums_in_symbols_are_those_of_the_papers(run: str, expected: str) -> None:
    assert kept_sum(memcalc.load(*run.split())) == expected


@pytest.mark.parametrize(
    ("axes", "written"),
    [
        (("b", "s", "(h+2·h_kv)·d_h"), "b·s·h·d_h + 2·b·s·h_kv·d_h"),
        (("d_h-d_rot",), "d_h - d_rot"),
        (("d_h/2", "4·d"), "2·d·d_h"),
        (("V/t", "d"), "d·V/t"),
        (("s", "s"), "s²"),
        ((), "1"),
    ],
)
def test_axes_multiply_out(axes: tuple[str, ...], written: str) -> None:
    assert str(axes_product(axes)) == written


def test_like_terms_add_up() -> None:
    assert str(axes_product(("d", "d"), 4) + axes_product(("d",)) + axes_product(("2·d", "4·d"))) == "12·d² + d"
    assert str(ZERO) == ""
