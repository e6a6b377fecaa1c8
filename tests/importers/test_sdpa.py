"""`sdpa` in a file or a setting: the kernel that PyTorch picks for the model's modules and dtype."""

from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component

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
        ("implementation=plain", "needs transformers' or torchtitan's modules"),
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
        memcalc.estimate(path, "versions.transformers=5.23.0")


def test_a_release_that_rejects_the_file_is_not_assumed_but_named(tmp_path: Path) -> None:
    """Releases before 5.23 support sdpa for Gemma 2. A run with a rejected candidate may need more, so it never fits."""
    path = tmp_path / "run.yaml"
    path.write_text(FILES["axolotl"].format("google/gemma-2-2b"))
    result = memcalc.estimate(path, gpu="h200")
    versions = result.spec.training.versions

    assert versions is not None
    assert versions.transformers == "4.57.6"
    assert [limit.feature for limit in result.spec.origin.limits if limit.holds_memory] == [
        "5.23.0 as the version of transformers"
    ]
    assert result.verdict == "unknown"
    assert any("gemma2 does not support sdpa" in note for note in result.notes)
    assert memcalc.estimate(path, "versions.transformers=4.57.6", gpu="h200").verdict == "fits"


def test_releases_with_sdpa_for_gemma_2_have_it(tmp_path: Path) -> None:
    """transformers 5.16.1 models/gemma2/modeling_gemma2.py: _supports_sdpa."""
    path = tmp_path / "run.yaml"
    path.write_text(FILES["axolotl"].format("google/gemma-2-2b"))

    assert memcalc.load(path, "versions.transformers=5.16.1").training.attention == "flash"
    with pytest.raises(InputError, match=r"up to 5\.16\.1 support sdpa: --set versions\.transformers=5\.16\.1"):
        memcalc.load(path, "versions.transformers=5.23.0")


@pytest.mark.parametrize("preset", ["gemma-2-2b", "gpt-oss-20b"])
def test_the_kernels_of_flash_attn_take_what_sdpa_does_not(preset: str) -> None:
    """Soft-capping and sinks: no score is materialized, and gpt-oss's sinks get a gradient."""
    words = (preset, "implementation=huggingface", "attention=flash", "attention_windows=kernel", "recipe=pure")
    found = memcalc.estimate(*words, "l=2", "b=1", "s=4096")
    eager = memcalc.estimate(*words[:2], "recipe=pure", "l=2", "b=1", "s=4096")

    heads = found.spec.model.num_attention_heads
    saved = [run.ledger.components("loss_2")[Component.ACTIVATIONS] for run in (eager, found)]
    assert saved[0] - saved[1] > 2 * 2 * heads * 4096**2  # of each layer at least the probabilities
    gradients = {row.module for row in found.ledger.rows if row.component is Component.GRADIENTS}
    assert any("sinks" in module for module in gradients) is (preset == "gpt-oss-20b")
