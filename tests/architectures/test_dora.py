"""DoRA's layers: the bytes that one saves and allocates, by arithmetic, and its parameters."""

from __future__ import annotations

import pytest

from memcalc.api import load
from memcalc.errors import InputError
from memcalc.layout.adapters import Adapters
from memcalc.layout.peft_parameters import trainable_parameters
from memcalc.operators import Operators
from memcalc.operators.base import Dtypes, LinearLayers
from memcalc.programs.program import Program, highest
from memcalc.programs.tape import Tape
from memcalc.programs.tape_compiler import compiled

K, N, R, T = 512, 1024, 8, 64  # inputs, outputs, rank, tokens
MODEL = "model: {hidden_size: 512, num_layers: 2, num_attention_heads: 8, vocab_size: 1000, intermediate_size: 1280}\n"
TRAINING = "training: {sequence_length: 128, lora: {rank: 8, target_modules: [q_proj, up_proj], dora: true}}\n"


def layer(*, magnitudes: bool) -> Program:
    """One linear layer of bf16, [n, k], with an adapter."""
    tape = Tape()
    adapters = Adapters(("proj",), R, "bf16", 0.0, (), None, input_gradient=False, magnitudes=magnitudes)
    ops = Operators(tape, Dtypes("bf16", "bf16"), LinearLayers(adapters=adapters))
    x = tape.input("x", ("b", "s", "k"), "bf16", "")
    y = ops.linear(x, "proj", ("n", "k"), ("b", "s", "n"), bias=False)
    return compiled(tape, y, keeps_gradients=True, main_gradient_dtype=None)


def sizes(program: Program) -> list[int]:
    return program.sizes({"b": 2, "s": T // 2, "k": K, "n": N, "r": R})


def saved(program: Program) -> int:
    """Bytes that backward needs besides the layer's input and its output."""
    of = sizes(program)
    mine = [each for each in program.kept if each != program.entry]
    return sum(of[each] for each in mine if program.storages[each].name != "proj with adapter")


def test_both_outputs_are_saved_for_the_magnitude() -> None:
    """LoRA saves A's output; DoRA also both outputs, and per output the norm, the magnitude over it, and that less 1."""
    assert saved(layer(magnitudes=False)) == 2 * T * R
    assert saved(layer(magnitudes=True)) == 2 * T * R + 2 * 2 * T * N + 3 * 2 * N


def test_the_adapter_is_a_matrix_while_its_rows_get_their_norms() -> None:
    """Of few tokens: the identity, A's and B's output for it, that scaled, and the sum with the weight.

    torchtune 0.6.1 modules/peft/dora.py: x_eye, lora_weight, self.scaling * lora_weight, weight + ...; and the norms.
    """
    program = layer(magnitudes=True)
    of_tokens = 2 * T * K + 2 * T * R + 2 * 2 * T * N  # the input, A's output, both outputs

    assert highest(program.forward, sizes(program)).bytes == of_tokens + 2 * K * K + 2 * K * R + 3 * 2 * K * N + 2 * N


def test_a_magnitude_trains_for_each_output(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MODEL + TRAINING)
    with_magnitudes, without = (trainable_parameters(load(path, *words)) for words in ((), ("lora.dora=false",)))

    assert without == 2 * 8 * ((512 + 512) + (512 + 1280))
    assert with_magnitudes - without == 2 * (512 + 1280)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["implementation=huggingface"], "implementation = huggingface"),
        (["tensor_parallel=2"], "tensor parallelism"),
        (["fake_quantization=int8-int4"], "fake quantization"),
    ],
)
def test_what_is_not_modelled_with_it(tmp_path, words, found) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MODEL + TRAINING)

    with pytest.raises(InputError, match=rf"lora\.dora = true is not modelled with {found}"):
        load(path, *words)
