"""The short screen: its content, its length for every preset and many layouts, and readable colors."""

import io

import pytest
from rich.color import Color

import memcalc
from memcalc.ledger.result import Result
from memcalc.report import labels
from memcalc.report.screen import BAD, GOOD, UNSURE, Details, Screen
from memcalc.report.screens.sizing import MOST_LINES, MOST_LINES_OF_MANY, draw_short
from memcalc.report.screens.verdict import subject
from memcalc.spec.presets import preset_names
from memcalc.verdict.other_modules import with_transformers
from memcalc.verdict.reasons import reason_of
from tests.thinning import quick_every


def short(result: Result, width: int = 80) -> list[str]:
    """The screen of `memcalc estimate`, with all that may be on it."""
    file = io.StringIO()
    reason = reason_of(result) if result.spec.inference is None else None
    details = Details(reason=reason, other=with_transformers(result), advice="memcalc fit")
    draw_short(Screen(file, width), result, details=details)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("name", quick_every(16, preset_names()))
def test_thirty_lines_are_enough_for_every_preset_on_one_gpu(name: str) -> None:
    lines = short(memcalc.estimate(name, gpu="h100-80gb").replayed)

    assert len(lines) <= MOST_LINES == 30
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("  activations        l(34bsd+5bs²h)") for line in lines)
    assert lines[-1].startswith("More: --full (phases, ")


LAYOUTS = [
    ("llama-3-70b", "zero_stage=3", "dp=64", "recompute=full", "recipe=mixed-16", "implementation=huggingface"),
    ("llama-3-70b", "zero_stage=2", "dp=8"),
    (
        "llama-3.1-405b",
        "implementation=megatron",
        "tp=8",
        "pp=8",
        "dp=4",
        "sequence_parallel=true",
        "recompute=selective",
    ),
    ("deepseek-v3", "implementation=megatron", "ep=8", "pp=16", "dp=8"),
    ("llama-3-8b", "zero_stage=2", "dp=8", "engine=deepspeed", "offload=optimizer", "recipe=mixed-16"),
    ("llama-3-8b", "dp=4", "implementation=torchtitan"),
    ("mixtral-8x7b", "finetune=qlora", "dp=4"),
]


@pytest.mark.parametrize("run", quick_every(8, LAYOUTS), ids=" ".join)
def test_forty_lines_are_enough_for_any_layout(run: tuple[str, ...]) -> None:
    for gpu in (None, "h100-80gb", "t4"):
        lines = short(memcalc.estimate(*run, gpu=gpu).replayed)
        assert len(lines) <= MOST_LINES_OF_MANY == 40
        assert max(map(len, lines)) <= 80


def test_gpt3_shows_the_published_formulas_and_numbers_without_a_flag() -> None:
    """96·(12·12288² + 13·12288) + 50257·12288 = 174.58 B; 20 bytes each = 3,251.79 GiB; the papers' activations."""
    text = "\n".join(short(memcalc.estimate("gpt3.yaml").replayed))

    for numbers in (
        "parameters         l(12d²+13d)+Vd          174.58 B      174.60 B",
        "model states       20 bytes/parameter  3,251.79 GiB  3,252.26 GiB",
        "activations        l(34bsd+5bs²h)        256.50 GiB    256.50 GiB",
    ):
        assert numbers in text


def test_the_parts_that_are_shown_sum_to_the_peak() -> None:
    result = memcalc.estimate("llama-3-8b", gpu="h100-80gb").replayed
    file = io.StringIO()
    draw_short(Screen(file, 100), result, "bytes")
    rows = [line.split() for line in file.getvalue().splitlines()]
    sizes = {row[0]: int(next(cell for cell in row if "," in cell).replace(",", "")) for row in rows if _is_part(row)}

    inside = sum(size for mark, size in sizes.items() if mark.isupper() or mark == "+")
    assert inside == result.ledger.peak_bytes
    assert inside + sizes["s"] + sizes["x"] == result.headline.device_bytes


def _is_part(row: list[str]) -> bool:
    return len(row) > 3 and len(row[0]) == 1 and row[0] != "." and any("%" in cell for cell in row)


def test_components_that_are_shown_together_are_named() -> None:
    """Without room for all, gradients and logits of the file are among "smaller parts", 43% of the peak."""
    lines = short(memcalc.estimate("docs/examples/trainer.yaml", gpu="rtx-4090").replayed)

    (rest,) = (line for line in lines if line.startswith("  +  smaller parts"))
    assert rest.endswith("  logits and loss, weights, 1 more")


def test_it_names_the_modules_if_they_matter() -> None:
    """CodeGen 350M: 7.99 GiB as plain modules; transformers' attend eagerly and allocate 15.75 GiB."""
    plain = memcalc.estimate("codegen-350m")
    other = with_transformers(plain)
    theirs = memcalc.estimate("codegen-350m", implementation="huggingface")

    assert other is not None
    assert (other.allocated_bytes, other.attention) == (theirs.ledger.peak_bytes, "eager")
    text = " ".join(" ".join(short(plain)).split())
    assert "These are plain PyTorch modules; transformers' own would allocate 15.75 GiB (eager attention)" in text
    assert with_transformers(memcalc.estimate("llama-3-8b")) is None  # within 10 %
    assert with_transformers(theirs) is None


def test_the_headline_names_the_program() -> None:
    assert "as transformers 5.23 Trainer; 1 GPU" in short(memcalc.estimate("meta-llama/Llama-3.2-1B"))[1]
    assert "as plain modules; 1 GPU" in short(memcalc.estimate("gpt2"))[1]
    assert "as transformers modules; 1 GPU" in short(memcalc.estimate("gpt2", implementation="huggingface"))[1]


def test_colors_read_on_black_and_on_white() -> None:
    """Contrast of at least 3 with both, as WCAG 2.2 (1.4.11) has it: (lighter + 0.05) / (darker + 0.05)."""

    def luminance(style: str) -> float:
        channels = [value / 255 for value in Color.parse(style).get_truecolor()]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    styles = {style for _, style, _ in labels._PARTS.values()}
    styles |= {style.removeprefix("bold ") for style in (GOOD, BAD, UNSURE)}
    for style in styles:
        assert (luminance(style) + 0.05) / 0.05 >= 3, style
        assert 1.05 / (luminance(style) + 0.05) >= 3, style


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("lora.dora=true",), "DoRA of rank 8, adamw"),
        (("lora.dora=true", "finetune=qlora"), "QDoRA of rank 8, adamw"),
        (("finetune=qlora",), "QLoRA of rank 8, adamw"),
        (("fake_quantization=int8-int4",), "fake-quantized int8-int4"),
    ],
)
def test_the_subject_names_adapters_and_fake_quantization(words: tuple[str, ...], expected: str) -> None:
    assert expected in "\n".join(subject(memcalc.estimate("llama-3.2-1b", *words)).lines)
