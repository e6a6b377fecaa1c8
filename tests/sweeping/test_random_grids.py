"""Random runs over random batches: tables and single estimates agree to the byte."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memcalc.sweeping import evaluate
from tests.properties.specs import configs, examples
from tests.sweeping.test_evaluation import assert_same


@given(data=st.data())
@examples(40)
def test_tables_equal_single_estimates(data):
    config = data.draw(configs(adapters=True))
    axes: dict[str, Any] = {
        "s": sorted(data.draw(st.sets(st.integers(1, 130) | st.integers(1500, 9000), min_size=1, max_size=3))),
        "b": sorted(data.draw(st.sets(st.integers(1, 9), min_size=1, max_size=3))),
        "gradient_accumulation_steps": data.draw(st.sampled_from([[1], [1, 2], [3], [1, 2, 8]])),
    }
    gpu = data.draw(st.sampled_from([None, "h100-80gb", "t4"]))
    assert_same(config, evaluate(config, axes, gpu=gpu), gpu=gpu)


@given(data=st.data())
@examples(8)
def test_tables_over_layouts_equal_single_estimates(data):
    """What layouts share, stages with more or fewer micro-batches in flight among it, changes no byte."""
    config = data.draw(configs(experts=data.draw(st.booleans())))
    several: dict[str, list[Any]] = {
        "pipeline_parallel": [1, 2, 3, 4],
        "tensor_parallel": [1, 2, 3],
        "data_parallel": [1, 2, 8],
        "zero_stage": [0, 1, 2, 3],
        "recompute": ["none", "selective", "full", "every-2"],
        "schedule": ["1f1b", "gpipe", "zb-h1", "zb-v"],
        "optimizer": ["adamw", "lion", "sgd"],
        "attention": ["eager", "flash"],
        "implementation": ["plain", "huggingface", "megatron", "torchtitan"],
        "engine": ["ddp", "fsdp2", "deepspeed", "megatron"],
        "recipe": ["mixed-16", "mixed-18", "pure"],
        "context_parallel": [1, 2],
        "sequence_parallel": [False, True],
        "num_layers": [4, 6],
        "vocab_size": [1000, 1024],
        "ema": ["none", "fp32"],
        "torch_version": ["v2.12", "v2.13"],
    }
    chosen = data.draw(st.lists(st.sampled_from(sorted(several)), min_size=2, max_size=3, unique=True))
    axes: dict[str, Any] = {name: several[name] for name in chosen}
    axes |= {"gradient_accumulation_steps": [1, 3, 8], "b": [1, 3], "s": [64]}
    gpu = data.draw(st.sampled_from([None, "h100-80gb"]))
    assert_same(config, evaluate(config, axes, gpu=gpu), gpu=gpu)
