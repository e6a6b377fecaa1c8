"""Fake-quantized linear layers: the bytes that one saves and allocates, by arithmetic, and the rules of the field."""

from __future__ import annotations

import pytest

from memcalc.api import estimate, load
from memcalc.architectures.options.execution import linears_of
from memcalc.errors import InputError
from memcalc.layout.adapters import Adapters
from memcalc.layout.fake_quantized_layers import fake_quantized_layers
from memcalc.operators import Operators
from memcalc.operators.base import Dtypes, LinearLayers
from memcalc.operators.fake_quantized_linear import FakeQuantization
from memcalc.programs.program import Program, highest
from memcalc.programs.tape import Tape
from memcalc.programs.tape_compiler import compiled

K, N, T, G = 512, 1024, 256, 128  # inputs, outputs, tokens, elements of a group
FROZEN = Adapters((), 0, "", 0.0, (), None, input_gradient=False)

MODEL = (
    "model: {hidden_size: 512, num_layers: 2, num_attention_heads: 8, vocab_size: 1000, intermediate_size: 1280%s}\n"
)
TRAINING = "training: {sequence_length: 128, fake_quantization: int8-int4, fake_quantization_group: 128%s}\n"


def layer(dtype: str = "bf16", *, adapters: Adapters | None = None, by_range: bool = False) -> Program:
    """One linear layer, [n, k]."""
    tape = Tape()
    choice = FakeQuantization(G, frozenset({"proj"}), by_range=by_range)
    linears = LinearLayers(adapters=adapters, fake_quantization=choice)
    ops = Operators(tape, Dtypes(dtype, dtype), linears)
    x = tape.input("x", ("b", "s", "k"), dtype, "")
    y = ops.linear(x, "proj", ("n", "k"), ("b", "s", "n"), bias=False)
    return compiled(tape, y, keeps_gradients=True, main_gradient_dtype=None)


def sizes(program: Program) -> list[int]:
    return program.sizes({"b": 2, "s": T // 2, "k": K, "n": N, "k/g": K // G})


def saved(program: Program) -> int:
    """Bytes that backward needs besides the layer's input, which the caller references, and its output."""
    of = sizes(program)
    mine = [each for each in program.kept if each != program.entry]
    return sum(of[each] for each in mine if program.storages[each].name != "proj output")


def test_a_layer_saves_six_bytes_per_element_of_its_weight_and_its_input() -> None:
    """The clamp saves rounded values in fp32, the matmul results in bf16; 1 / scale is 4 bytes per group and token.

    torchao 0.13 under saved_tensors_hooks: [256, 512] of a weight with groups of 256 saves fp32 [256, 2, 256], bf16
    [512, 256] and, of the scales, fp32 [256, 2, 1] twice, of which the module keeps one; each token also 1 / scale.
    """
    assert saved(layer()) == 4 * N * K + 2 * N * K + 4 * N * K // G + 4 * T * K + 2 * T * K + 4 * T


def test_in_fp32_it_saves_eight() -> None:
    assert saved(layer("fp32")) == 8 * N * K + 4 * N * K // G + 8 * T * K + 4 * T


def test_a_frozen_weight_is_saved_once_and_its_layers_input_for_the_clamp_alone() -> None:
    """No gradient needs the weight's rounded values; the input's gradient needs the weight, and not the input."""
    assert saved(layer(adapters=FROZEN)) == 2 * N * K + 4 * T * K + 4 * T


def test_ranges_with_gradients_save_eighteen_bytes_per_element_of_the_weight() -> None:
    """In fp32 the weight, its distance to the least, that in scales rounded, and centered; in bf16 the result.

    Of each group the least and largest value, their distance and the scale: torchao 0.17 under saved_tensors_hooks.
    """
    of_input = 4 * T * K + 2 * T * K + 4 * T

    assert saved(layer(by_range=True)) == 18 * N * K + 4 * 4 * N * K // G + of_input


def test_a_range_divides_with_three_more_tensors_in_backward() -> None:
    """x / scale, that / scale, -gradient, and their product; then the incoming gradient, and what is still saved.

    The rounded and centered values, and the results, were freed; of the scales' own gradient a sum waits.
    """
    program = layer(by_range=True)
    top = sum(sizes(program)[each] for each in program.kept) + highest(program.backward, sizes(program)).bytes

    of_groups = 4 * 4 * N * K // G + 2 * 4 * N * K // G  # saved; the gradients of scale and zero point
    of_input = 2 * T * K + 4 * T * K + 4 * T
    assert top == of_input + (4 + 4) * N * K + 4 * N * K + 4 * 4 * N * K + of_groups


def test_forward_peaks_at_the_end_of_the_weights_chain() -> None:
    """Of the weight: before the clamp 4, after it 4, dequantized in fp32 4, in bf16 2, and its scales."""
    program = layer()
    of_input = 2 * T * K + 4 * T * K + 2 * T * K + 4 * T  # given, before the clamp, dequantized; scales

    assert highest(program.forward, sizes(program)).bytes == of_input + 14 * N * K + 4 * N * K // G


def test_backward_peaks_in_the_clamp_of_the_weight() -> None:
    """Incoming and outgoing gradient in fp32, two masks of a byte, a zero of 4 bytes; and what is saved.

    The matmul's saved results are freed; the input's gradient, 2TK, waits.
    """
    program = layer()
    events, of = program.backward, sizes(program)
    held = sum(of[each] for each in program.kept)
    top = held + highest(events, of).bytes

    of_weight = 4 * N * K + 4 * N * K + 4 * N * K + 2 * N * K + 4 + 4 * N * K // G
    of_input = 2 * T * K + 4 * T * K + 4 * T
    assert top == of_input + of_weight


@pytest.mark.parametrize(
    ("model", "training", "layers"),
    [
        (", tie_word_embeddings: false", "", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head"),
        (", tie_word_embeddings: true", "", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        (", tie_word_embeddings: true", ", lora: {target_modules: [q_proj, down_proj]}", "q_proj down_proj"),
    ],
)
def test_layers_with_fake_quantization(tmp_path, model, training, layers) -> None:
    """A tied head reads the embedding; of a model with adapters only the layers that have one."""
    path = tmp_path / "run.yaml"
    path.write_text(MODEL % (model + ", mlp: swiglu") + TRAINING % training)

    assert fake_quantized_layers(load(path)) == frozenset(layers.split())


def test_rows_that_are_no_whole_groups_stay(tmp_path) -> None:
    """1280 is no multiple of 512; torchao's padding_allowed is false."""
    path = tmp_path / "run.yaml"
    path.write_text(MODEL % ", tie_word_embeddings: true" + TRAINING.replace("group: 128", "group: 512") % "")

    assert fake_quantized_layers(load(path)) == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}


def test_scales_stay_with_the_modules(tmp_path) -> None:
    """Of each layer's weight and tokens, an fp32 scale and a zero point; without fake quantization there are none."""
    path = tmp_path / "run.yaml"
    path.write_text(MODEL % ", tie_word_embeddings: true" + TRAINING % "")
    rows = [row for row in estimate(path).headline.ledger.rows if "zero points" in row.tensor]

    weights = 4 * 512 * 512 + 2 * 512 * 1280  # q, k, v, o; up and down
    of_weights = [row for row in rows if row.tensor.endswith("weight")]
    assert sum(row.bytes for row in of_weights) == 2 * 2 * 4 * weights // 128
    of_inputs = [row for row in rows if row.tensor.endswith("input")]
    assert sum(row.bytes for row in of_inputs) == 2 * 2 * 6 * 4 * 128  # 2 layers, 6 matrices, 128 tokens
    assert linears_of(load(path, "fake_quantization=none")).fake_quantization is None


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["implementation=huggingface"], "a tied LM head that is called"),
        (["implementation=huggingface", "loss=fused", "finetune=lora"], "finetune = lora"),
        (["finetune=qlora"], "finetune = qlora"),
        (["tensor_parallel=2"], "tensor_parallel = 2"),
        (["data_parallel=2", "engine=deepspeed"], "engine = deepspeed"),
    ],
)
def test_what_is_not_modelled_with_it(tmp_path, words, found) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MODEL % "" + TRAINING % "")

    with pytest.raises(InputError, match=f"fake_quantization = int8-int4 is not modelled with {found}"):
        load(path, *words)


@pytest.mark.parametrize("granularity", ["int8-int4", "int8-int4-by-range"])
@pytest.mark.parametrize("implementation", ["plain", "huggingface"])
def test_an_mlp_four_times_as_wide_as_the_model_is_divided_into_groups_too(
    granularity: str, implementation: str
) -> None:
    """Its hidden size is 4·d in formulas."""
    words = ("num_layers=2", "s=128", "fake_quantization_group=128", "loss=fused", "tie_word_embeddings=false")
    quantized = (f"fake_quantization={granularity}", f"implementation={implementation}")
    found = estimate("llama-3.2-1b", *words, *quantized)

    assert found.replayed.ledger.peak_bytes > 0
