"""The presets: published parameter counts, sources named, nothing that another value settles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from memcalc.errors import InputError
from memcalc.layout.parameters import buffer_elements, count_parameters, parameter_table
from memcalc.spec.derive import derive_model
from memcalc.spec.loading import load
from memcalc.spec.model import ModelSpec

FOLDER = Path(__file__).parents[2] / "configs"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# Published counts: those of the checkpoints' tensors, parameters shared by embedding and head once.
# Each file's first lines name where its sizes, or its count, were looked up.
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    # V d + S d + l (12 d^2 + 13 d) + 2 d = 50257 d + 2048 d + 96 (12 d^2 + 13 d) + 2 d with d = 12288
    "gpt3": 174_604_259_328,
    "codegen-350m": 356_712_448,
    # 2 V d + V + l (12 d^2 + 7 d) + 2 d with V = 51200
    "codegen-2b": 2 * 51200 * 2560 + 51200 + 32 * (12 * 2560**2 + 7 * 2560) + 2 * 2560,
    "codegen-6b": 2 * 51200 * 4096 + 51200 + 33 * (12 * 4096**2 + 7 * 4096) + 2 * 4096,
    "codegen-16b": 2 * 51200 * 6144 + 51200 + 34 * (12 * 6144**2 + 7 * 6144) + 2 * 6144,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,  # LLaMA's sizes, with longer positions
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,  # the 14,848 correction biases of its routers are buffers
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3.5-moe": 41_873_153_344,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-3-7b": 7_298_011_136,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmoe-1b-7b": 6_919_161_856,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "starcoder": 15_517_456_384,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4-9b": 9_400_279_040,
    "glm-4-9b-chat": 9_399_951_360,
    "granite-3.1-2b": 2_533_531_648,
    "granite-3.1-8b": 8_170_848_256,
    "granite-3.0-1b-a400m": 1_334_628_352,
    "stablelm-3b-4e1t": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "command-r": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "mpt-7b": 6_649_286_656,
    "smollm3-3b": 3_075_098_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "llama-4-scout": 107_769_861_120,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "seed-oss-36b": 36_151_104_512,
    "ernie-4.5-0.3b": 360_748_032,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "nanochat-d20": 560_988_160,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "bloom-7b1": 7_069_016_064,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "phi-3-mini": 3_821_079_552,
    "exaone-4-32b": 32_003_216_384,  # 30.95 B without 2 · 102,400 · 5,120 of the embeddings
    "exaone-4-1.2b": 1_279_391_488,  # 1.07 B without 102,400 · 2,048
    "glm-4.5-air": 106_852_245_504,  # 106 B
    "minimax-m2": 228_689_748_992,  # 230 B
}


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


def model_of(name: str, **changes: object) -> ModelSpec:
    return ModelSpec.model_validate(derive_model(read(name)["model"] | changes))


@pytest.mark.parametrize("name", COUNTS)
def test_presets_have_their_published_parameter_counts(name: str) -> None:
    assert COUNTS[name] == count_parameters(model_of(name))


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_loads_by_its_name(name: str) -> None:
    """Nothing but its name is needed, and the loader makes the same model of it."""
    assert load(name).model == model_of(name)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_counted_here(name: str) -> None:
    """A preset without a published count beside it is a guess."""
    assert name in COUNTS


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_names_its_schema_and_its_source(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()

    assert lines[0] == "# yaml-language-server: $schema=../memcalc/data/config.schema.json"
    assert lines[1].startswith("# Source: ")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hold_a_name_and_a_model(name: str) -> None:
    """Only gpt3 also holds the training block of the published numbers."""
    blocks = set(read(name))

    assert blocks == ({"name", "model", "training"} if name == "gpt3" else {"name", "model"})


@pytest.mark.parametrize("name", PRESETS)
def test_presets_leave_out_what_follows(name: str) -> None:
    """Without any one key, the model is another one, or none: so `--set hidden_size=` rescales all that follows."""
    block = read(name)["model"]
    whole = derive_model(block)
    for key in block:
        if key == "architecture":
            continue
        try:
            shorter = derive_model({other: value for other, value in block.items() if other != key})
        except InputError:  # none: GLM-4.5's heads do not divide its width
            continue
        assert shorter.get(key) != whole[key], key


def test_a_preset_rescales_with_its_hidden_size() -> None:
    """GPT-3 with d = 6144: heads of 6144 / 96 = 64, an MLP of 4 * 6144 = 24576."""
    model = model_of("gpt3", hidden_size=6144)

    assert (model.head_dim, model.intermediate_size, model.embedding_size) == (64, 24576, 6144)


def test_codegen_350m_by_module() -> None:
    """l = 20, d = 1024, V = 51200: a parallel block with one norm, no attention biases, a head with one."""
    sums: dict[str, int] = {}
    for row in parameter_table(model_of("codegen-350m")):
        sums[row.module] = sums.get(row.module, 0) + row.total

    assert sums == {
        "embed_tokens": 52_428_800,  # V d = 51200 * 1024
        "layers.*.input_norm": 40_960,  # l 2 d = 20 * 2048
        "layers.*.attention.qkv_proj": 62_914_560,  # l 3 d^2 = 20 * 3 * 1024^2
        "layers.*.attention.o_proj": 20_971_520,  # l d^2
        "layers.*.mlp.up_proj": 83_968_000,  # l (4 d^2 + 4 d)
        "layers.*.mlp.down_proj": 83_906_560,  # l (4 d^2 + d)
        "norm": 2_048,  # 2 d
        "lm_head": 52_480_000,  # V d + V
    }
    assert sum(sums.values()) == 356_712_448


def test_deepseek_v3_keeps_its_correction_biases_apart() -> None:
    """58 MoE layers of 256 experts: 14,848 buffer elements, and 64 for the rotary tables (two of 32)."""
    model = model_of("deepseek-v3")

    assert buffer_elements(model) == 58 * 256 + 2 * 32
    assert count_parameters(model) + 58 * 256 == 671_026_419_200


def test_gpt3_holds_the_published_training_block() -> None:
    assert read("gpt3")["training"] == {
        "micro_batch_size": 1,
        "sequence_length": 2048,
        "dtype": "bf16",
        "recipe": "mixed-20",
        "implementation": "plain",
        "optimizer": "adamw",
        "attention": "eager",
        "dropout": 0.1,
        "recompute": "none",
    }
