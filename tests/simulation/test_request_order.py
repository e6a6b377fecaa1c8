"""The requests of the allocator replay are those of the trace on fake tensors, in the same order."""

from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError, Unavailable
from memcalc.spec.optimizers import OPTIMIZERS
from tests.thinning import quick_every
from tools.request_order import Request, compare, first_difference, replayed_requests, traced_requests
from tools.request_order_cases import DIFFERING, cases, equal_requests, small, spec_of

QUICK = [
    ("gpt2", "plain", "amp"),
    ("gpt2", "huggingface", "eager, amp"),
    ("llama", "plain", "every second recomputed"),
    ("llama", "huggingface", "recomputed"),
    ("llama", "huggingface", "math"),
    ("phi3", "huggingface", "math, recomputed"),
    ("qwen3", "huggingface", "fused"),
    ("mistral", "huggingface", "accumulated"),
    ("codegen", "huggingface", "recomputed"),
    ("gemma2", "huggingface", "mixed-18"),
    ("qwen2", "huggingface", "mixed-20"),
    ("starcoder2", "huggingface", "eager, amp"),
    ("bloom", "huggingface", "recomputed, amp"),
    ("glm4", "huggingface", "recomputed, amp"),
    ("olmo2", "huggingface", "pure"),
    ("gpt_neox", "huggingface", "eager, amp"),
    ("gpt_oss", "huggingface", "eager, amp"),
    ("olmo2", "huggingface", "LoRA, amp"),  # the first layer reads a leaf
    ("ernie4_5_moe", "huggingface", "pure"),  # the router is in fp32
    ("cohere", "huggingface", "LoRA, amp"),  # a leaf that the first layer frees early
    ("phimoe", "huggingface", "recomputed, amp"),  # a torch.autograd.Function; what a graph alone references
    ("gpt_neo", "huggingface", "LoRA, amp"),  # a transposed gradient
    ("qwen2_moe", "huggingface", "eager, amp"),  # gradients through views
    ("falcon", "huggingface", "recomputed, amp"),
    ("llama4_text", "huggingface", "eager, amp"),
    ("phi", "huggingface", "eager, amp"),
    ("phi", "plain", "chunked, amp"),
    ("codegen", "plain", "chunked"),
    ("arcee", "plain", "recomputed, amp"),
    ("olmo2", "plain", "eager, amp"),
    ("llama", "plain", "LoRA"),  # a frozen norm's backward makes no gradient of its weight
    ("gemma", "plain", "LoRA, amp"),
    ("llama", "plain", "selective"),  # a checkpoint that references the causal mask
]
LATER = ("radam", "for-loop")  # which rectifies from its sixth step on
STEP = "optimizer_step_"
LONG = pytest.mark.long


def equal(family: str, implementation: str, setting: str) -> None:
    difference = compare(spec_of(family, implementation, setting))
    assert difference is None, str(difference)


@pytest.mark.parametrize("case", quick_every(8, QUICK), ids=", ".join)
def test_requests_are_the_traces(case: tuple[str, str, str]) -> None:
    pytest.importorskip("transformers")
    equal(*case)


@pytest.mark.parametrize(
    "words",
    [
        ("qwen3-0.6b", "num_layers=2", "s=2048", "b=2", "recipe=pure", "optimizer_implementation=fused"),
        ("codegen-350m", "num_layers=2", "s=2048", "b=4", "recipe=pure", "recompute=full", "attention=eager"),
        # the memory-efficient kernel in layers with a masked window, the math kernel in the others
        ("exaone-4-32b", "num_layers=4", "d=512", "h=8", "num_key_value_heads=2", "s=768", "b=2", "recipe=fp32")
        + ("head_dim=64", "sliding_window=256", "V=4096"),
    ],
    ids=lambda words: words[0],
)
def test_requests_of_presets_are_the_traces(words: tuple[str, ...]) -> None:
    """The runs that reserved a tenth more than the replay said; embeddings of more than 3072 tokens are sorted."""
    pytest.importorskip("transformers")
    difference = compare(memcalc.load(*words, "implementation=huggingface", gpu="a100-80gb"))
    assert difference is None, str(difference)


SLOW = ("sgd", "adam", "adadelta", "adamax", "rmsprop", "lion-8bit", "nadam")  # without a script of their own
EVERY = [(name, how) for name, facts in OPTIMIZERS.items() for how in facts.implementations if (name, how) != LATER]
MODELS = [("gpt2", "huggingface", "pure"), ("llama", "plain", "amp")]


def optimizers() -> list[Any]:
    """Return every optimizer on both models; quick: every third one that is not slow, on one model in turn.

    tests/step/test_optimizers.py runs all of them.
    """
    quick: dict[tuple[str, str], int] = {}
    for name, how in EVERY:
        seen = {each for each, _ in quick}, {each for _, each in quick}
        if name not in SLOW and (name not in seen[0] or how not in seen[1]):
            quick[name, how] = len(quick) % len(MODELS)
    some = {*[*quick][::3]}
    return [
        pytest.param(*model, *each, marks=() if each in some and quick[each] == turn else pytest.mark.long)
        for each in EVERY
        for turn, model in enumerate(MODELS)
    ]


@pytest.mark.parametrize(("family", "implementation", "recipe", "optimizer", "how"), optimizers())
def test_requests_of_every_optimizer_are_the_traces(
    family: str, implementation: str, recipe: str, optimizer: str, how: str
) -> None:
    """GPT-2's layers store their weights as (in, out); in amp the states are in fp32 and nothing is cast."""
    pytest.importorskip("transformers")
    words = (f"optimizer={optimizer}", f"optimizer_implementation={how}", f"recipe={recipe}")
    try:
        difference = compare(small(family, implementation, words))
    except Unavailable as error:
        pytest.skip(str(error))
    assert difference is None, str(difference)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", ("recipe=mixed-16", "gradient_clipping=1", "gradient_accumulation_steps=2")),
        ("qwen3_moe", ("recipe=amp", "dtype=fp16", "attention=eager")),  # the router's softmax reads fp16
        ("gpt2", ("recipe=pure", "optimizer=muon", "hidden_size=1536", "l=1")),  # norms of large matrices
        ("llama", ("recipe=pure", "attention=flash", "head_dim=100")),  # padded to 104 features
        pytest.param("llama", ("recipe=amp", "attention=flash", "head_dim=100", "recompute=full"), marks=LONG),
        # biases before weights
        pytest.param("gpt_neo", ("recipe=fp32", "attention=eager", "optimizer_in_backward=true"), marks=LONG),
        pytest.param("gpt2", ("recipe=pure", "autocast=true"), marks=LONG),  # norms read fp32 copies of their weights
        # so nothing saves the inputs of layers, which a checkpoint of several layers frees early
        pytest.param("gpt2", ("recipe=pure", "autocast=true", "recompute=[[0,1]]", "dropout=0"), marks=LONG),
        ("gemma2", ("recipe=amp", "attention=eager", "recompute=full", "reentrant_checkpoints=true")),
        ("llama", ("recipe=pure", "autocast=true", "fp32_modules=[embed_tokens,norm]", "gradient_clipping=1")),
    ],
)
def test_requests_of_other_settings_are_the_traces(family: str, words: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    difference = compare(small(family, "huggingface", words))
    assert difference is None, str(difference)


@pytest.mark.parametrize("recipe", ["pure", pytest.param("amp", marks=LONG)])
def test_radams_requests_are_those_of_its_sixth_step(recipe: str) -> None:
    """Its loop rectifies the variance from the sixth step on; the first steps request less."""
    spec = small("gpt2", "plain", ("optimizer=radam", "optimizer_implementation=for-loop", f"recipe={recipe}"))
    traced = [each.size for each in traced_requests(memcalc.trace(spec, steps=7).events) if each.phase == STEP + "7"]
    replayed = [each.size for each in replayed_requests(spec) if each.phase == STEP + "3"]
    assert traced == replayed


@pytest.mark.long
@pytest.mark.parametrize("case", [*cases()], ids=", ".join)
def test_requests_of_every_family_are_the_traces(case: tuple[str, str, str]) -> None:
    family, implementation, _ = case
    if family in DIFFERING[implementation]:
        pytest.skip("differs: docs/reports/verdicts.md")
    try:
        equal(*case)
    except (InputError, Unavailable) as error:
        pytest.skip(str(error))


def test_the_docs_name_the_families_with_equal_requests() -> None:
    page = Path(__file__).parents[2] / "docs" / "reports" / "verdicts.md"
    assert equal_requests() in page.read_text()


def test_the_first_request_that_differs_is_named() -> None:
    def requests(*sizes: int) -> list[Request]:
        return [Request("forward_1", size, frozenset(), f"operator {at}") for at, size in enumerate(sizes)]

    assert first_difference(requests(1, 2), requests(1, 2)) is None
    found = first_difference(requests(1024, 2048, 4096), requests(1024, 2048, 8192))
    assert found is not None
    assert (found.phase, found.place, found.index) == ("forward_1", 2, 2)
    assert found.reason == "4,096 bytes traced, 8,192 replayed"
    assert "operator 2" in str(found)


def test_a_storage_that_is_freed_at_another_time_differs() -> None:
    first = Request("forward_1", 1024, frozenset(), "a")
    traced = [first, Request("forward_1", 2048, frozenset(), "b")]
    replayed = [first, Request("forward_1", 2048, frozenset({0}), "b")]
    found = first_difference(traced, replayed)
    assert found is not None
    assert found.reason == "before it only the replay has freed 1,024 (a)"
