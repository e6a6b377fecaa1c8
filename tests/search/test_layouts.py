"""Every layout is one that could be loaded, and every other is left out for a reason."""

import pytest

import memcalc
from memcalc.search.layouts import Space, divisors
from memcalc.search.ranking import chosen


def space(name: str, gpus: int, *overrides: str, node: int = 8, sequences: int = 64, held: str = "") -> Space:
    return Space(memcalc.load(name, *overrides), gpus, node, sequences, frozenset(filter(None, [held])))


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("implementation", ["plain", "huggingface", "megatron"])
def test_each_could_be_loaded(name: str, implementation: str) -> None:
    """Read again from the words of a configuration, rules and all, each is the same run."""
    layouts = list(space(name, 8, f"implementation={implementation}").layouts())

    assert layouts
    for layout in layouts[:: max(1, len(layouts) // 25)]:
        run = chosen(layout, "full", 1)
        assert memcalc.load(run.model_dump()) == run
        assert run.parallelism.ranks == 8
        assert layout.sequences * run.parallelism.data_parallel == 64


def test_none_is_there_twice_and_none_is_missing() -> None:
    """gpt2 (12 heads, 12 layers) over 4 cards: all products of degrees, with stages that the rules allow."""
    found = [layout.spec.parallelism for layout in space("gpt2", 4).layouts()]
    splits = {(s.tensor_parallel, s.context_parallel, s.pipeline_parallel, s.data_parallel) for s in found}

    assert len(set(found)) == len(found)
    assert splits == {
        (t, c, p, 4 // (t * c * p)) for t in (1, 2, 4) for c in (1, 2, 4) for p in (1, 2, 4) if 4 % (t * c * p) == 0
    }
    assert {s.zero_stage for s in found if s.pipeline_parallel == 1 and s.data_parallel > 1} == {0, 1, 2, 3}
    assert {s.zero_stage for s in found if s.pipeline_parallel > 1} == {0, 1}
    assert {s.virtual_stages for s in found if s.pipeline_parallel == 4} == {
        1,
        3,
    }  # 12 layers: 4 stages of 1 or 3 chunks


def test_interleaved_stages_are_sharded_by_an_engine_that_runs_them() -> None:
    """DeepSpeed's pipeline engine has 1F1B alone; Megatron-LM's distributed optimizer has fp32 main gradients."""

    def engines(recipe: str) -> set[tuple[str, int, str]]:
        found = [layout.spec.parallelism for layout in space("gpt2", 4, f"recipe={recipe}").layouts()]
        return {(each.schedule, each.zero_stage, each.engine) for each in found if each.pipeline_parallel > 1}

    either = {("1f1b", 0, "ddp"), ("1f1b", 1, "deepspeed"), ("interleaved", 0, "ddp")}
    assert engines("mixed-20") == either
    assert engines("mixed-18") == either | {("interleaved", 1, "megatron")}


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (
            "gpt2",
            (),
            "tensor_parallel = 16: tensor-parallel ranks communicate in every layer and stay inside a node of 8 GPUs",
        ),
        ("gpt2", (), "tensor_parallel = 8 does not divide num_attention_heads = 12."),
        ("gpt2", (), "pipeline_parallel = 16: a stage needs at least one of the 12 layers"),
        ("gpt3", (), "context_parallel = 2 needs attention = flash, not eager: no rank has all keys at once."),
        ("gpt2", (), "zero_stage = 2 is not modelled with pipeline_parallel = 2"),
        ("gpt2", (), "zero_stage = 3 with pipeline_parallel = 2: not searched, since a stage holds"),
        (
            "llama-3-8b",
            ("implementation=huggingface",),
            "tensor_parallel = 2 is not modelled with transformers' modules",
        ),
    ],
)
def test_what_is_left_out_has_its_reason(name: str, overrides: tuple[str, ...], words: str) -> None:
    searched = space(name, 16, *overrides)
    list(searched.layouts())

    reasons = [": ".join(filter(None, key)) for key in searched.pruned]
    assert any(reason.startswith(words) for reason in reasons), reasons


def test_a_batch_that_the_replicas_do_not_divide() -> None:
    searched = space("gpt2", 16, sequences=6)
    replicas = {layout.spec.parallelism.data_parallel for layout in searched.layouts()}

    assert replicas == {1, 2}
    assert any(key.reason == "it does not divide the 6 sequences of a step" for key in searched.pruned)


def test_megatrons_modules_bring_its_engine() -> None:
    """As a configuration's own default has it: as soon as the model is split, or its optimizer."""
    for layout in space("gpt2", 4, "implementation=megatron").layouts():
        spread = layout.spec.parallelism
        split = spread.tensor_parallel * spread.context_parallel * spread.pipeline_parallel > 1
        assert spread.engine == ("megatron" if split or spread.zero_stage else "ddp")


@pytest.mark.parametrize("field", ["tensor_parallel", "pipeline_parallel", "zero_stage", "sequence_parallel"])
def test_what_is_held_stays(field: str) -> None:
    own = ("tensor_parallel=2", "pipeline_parallel=2", "zero_stage=1", "sequence_parallel=true", "data_parallel=4")
    searched = space("gpt2", 16, *own, held=field)
    wanted = getattr(memcalc.load("gpt2", *own).parallelism, field)

    assert {getattr(layout.spec.parallelism, field) for layout in searched.layouts()} == {wanted}


def test_divisors() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_torchtitan_has_a_layout_on_one_gpu() -> None:
    """Autocast without FSDP2, which needs several ranks."""
    found = memcalc.fit("llama-3-8b", "implementation=torchtitan", gpu="b200").best

    assert [(each.result.spec.parallelism.engine, each.result.spec.training.recipe) for each in found] == [
        ("ddp", "amp")
    ]
