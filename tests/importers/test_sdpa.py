"""`sdpa` in a file or a setting: the kernel that PyTorch picks for the model's modules and dtype."""

from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError

# flash has no kernel for DeepSeek's heads nor for Falcon's masks (memcalc/data/families); Falcon-7B takes the math
# kernel, which uses as much memory as eager attention
KERNELS = {"deepseek-ai/DeepSeek-V2-Lite": "memory-efficient", "tiiuae/falcon-7b": "eager", "Qwen/Qwen3-8B": "flash"}
FILES = {
    "axolotl": "base_model: {}\nattn_implementation: sdpa\nmicro_batch_size: 1\nsequence_len: 64\nbf16: true\n",
    "trainer": "model_name_or_path: {}\nattn_implementation: sdpa\nper_device_train_batch_size: 1\noutput_dir: out\nbf16: true\n",
}


@pytest.mark.parametrize("program", FILES)
@pytest.mark.parametrize("hub_id", KERNELS)
def test_a_file_with_sdpa_takes_the_kernel_of_the_model(tmp_path: Path, program: str, hub_id: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILES[program].format(hub_id))

    assert memcalc.load(path).training.attention == KERNELS[hub_id]


@pytest.mark.parametrize("hub_id", KERNELS)
def test_a_setting_with_sdpa_takes_it_too(hub_id: str) -> None:
    assert memcalc.load(hub_id, "attn_implementation=sdpa").training.attention == KERNELS[hub_id]


GROUPED = "llama-3.2-1b"  # eight key heads for 32 query heads


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ((), "math"),
        (("padding_mask=boolean",), "memory-efficient"),  # with a mask transformers repeats keys and values
        (("training.versions.transformers=4.53.0",), "memory-efficient"),  # and before 4.54 without one
        (("implementation=plain",), "memory-efficient"),
        (("num_key_value_heads=32",), "memory-efficient"),
    ],
)
def test_grouped_heads_in_fp32_take_the_math_kernel(words: tuple[str, ...], kernel: str) -> None:
    run = memcalc.load(GROUPED, "recipe=fp32", "implementation=huggingface", *words)
    assert run.training.attention == kernel


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("implementation=plain", "needs transformers' modules"),
        ("recipe=amp", "is modelled for dtype = fp32, not bf16"),
        ("num_key_value_heads=32", "needs grouped heads"),
    ],
)
def test_the_math_kernel_is_of_grouped_heads_in_fp32(change: str, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        memcalc.load(GROUPED, "recipe=fp32", "implementation=huggingface", "attention=math", change)


def test_a_family_without_a_fused_kernel_rejects_sdpa_as_transformers_does(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILES["axolotl"].format("google/gemma-2-2b"))

    with pytest.raises(InputError, match="gemma2 does not support sdpa"):
        memcalc.estimate(path)
