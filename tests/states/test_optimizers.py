"""Optimizer states by their published sizes, and what the step makes and drops, buffer by buffer."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.spec.optimizers import OPTIMIZERS
from tests.states.test_recipes import MODEL, D, L, P, S, V

STATE, TEMPORARIES = Component.OPTIMIZER_STATE, Component.TEMPORARIES
TENSORS = 12 * L + 5  # 12 in a layer, two embeddings, a head, a norm of two
LARGEST = 4 * D**2  # elements of up or down, more than V d = 6144


def ledger(optimizer: str, recipe: str = "fp32", **training: Any) -> Ledger:
    dtype = "fp32" if recipe == "fp32" else "bf16"
    options = {"optimizer": optimizer, "recipe": recipe, "dtype": dtype}
    return memcalc.estimate({"model": MODEL, "training": options | training}).ledger


def states(optimizer: str, recipe: str = "fp32", **training: Any) -> int:
    """Bytes of optimizer states."""
    return ledger(optimizer, recipe, **training).components("zero_grad_2").get(STATE, 0)


def made(optimizer: str, how: str, step: int = 2, recipe: str = "fp32", **training: Any) -> int:
    """Bytes that are made and dropped in a step."""
    run = ledger(optimizer, recipe, optimizer_implementation=how, **training)
    return run.components(f"optimizer_step_{step}").get(TEMPORARIES, 0)


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "options", "bytes_"),
    [
        ("sgd", {}, 0),
        ("momentum", {}, 4),
        ("momentum", {"nesterov": True}, 4),
        ("adam", {}, 8),
        ("adamw", {}, 8),
        ("adamw", {"amsgrad": True}, 12),
        ("adagrad", {}, 4),
        ("adadelta", {}, 8),
        ("adamax", {}, 8),
        ("nadam", {}, 8),
        ("radam", {}, 8),
        ("rmsprop", {}, 4),
        ("rmsprop", {"centered": True}, 8),
        ("rmsprop", {"momentum": 0.9}, 8),
        ("rmsprop", {"centered": True, "momentum": 0.9}, 12),
        ("rprop", {}, 8),
        ("lion", {}, 4),
    ],
)
def test_states_in_bytes_a_parameter(optimizer: str, options: dict[str, Any], bytes_: int) -> None:
    assert states(optimizer, optimizer_options=options) == bytes_ * P


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "rmsprop", "adadelta"])
def test_states_have_the_dtype_of_what_is_updated(optimizer: str) -> None:
    """torch: zeros_like the parameter, which is a master in fp32 or the weight itself."""
    assert 2 * states(optimizer, "pure") == states(optimizer, "mixed-20") == states(optimizer, "fp32")


def test_states_appear_in_the_first_step_and_stay() -> None:
    run = ledger("adamw")

    for phase in run.phases:
        later = run.phases.index(phase) >= run.phases.index("optimizer_step_1")
        assert run.components(phase).get(STATE, 0) == (8 * P if later else 0), phase


def test_adagrads_states_are_there_when_it_is_built() -> None:
    run = ledger("adagrad")

    assert [run.components(phase).get(STATE, 0) for phase in ("model", "optimizer", "forward_1")] == [0, 4 * P, 4 * P]


@pytest.mark.parametrize(("optimizer", "bytes_"), [("adamw", 8), ("adagrad", 4), ("momentum", 4)])
def test_fused_optimizers_with_a_step_counter_keep_it_on_the_device(optimizer: str, bytes_: int) -> None:
    """4 bytes for each tensor; SGD counts nothing."""
    counters = 0 if optimizer == "momentum" else 4 * TENSORS

    assert states(optimizer, optimizer_implementation="fused") == bytes_ * P + counters


def test_asgd_keeps_an_average_and_three_numbers_a_tensor() -> None:
    assert states("asgd") == 4 * P + 3 * 4 * TENSORS


def test_asgds_average_stands_beside_another_average() -> None:
    """Both are named so in the ledger; 4 bytes per parameter each, one made with the optimizer, one in its first step."""
    assert states("asgd", ema="fp32") == states("asgd") + 4 * P


def test_adafactor_keeps_rows_and_columns_of_matrices_and_vectors_whole() -> None:
    """4 bytes per row and a column of qkv (3d, d), o (d, d), up (4d, d), down (d, 4d), the tables; 13 d of vectors."""
    layer = (3 * D + D) + (D + D) + (4 * D + D) + (D + 4 * D) + 13 * D
    tables = 2 * (V + D) + (S + D)

    assert states("adafactor") == 4 * (L * layer + tables + 2 * D)


def test_muon_keeps_one_state_of_the_layers_matrices_and_two_of_all_else() -> None:
    """The matrices of a layer are 12 d² elements."""
    matrices = L * 12 * D**2

    assert states("muon") == 4 * matrices + 8 * (P - matrices)


# Of this model qkv, o, up and down (12 d² = 49 152) and both tables of 6144 have 4096 elements or more; 13 d = 832 a
# layer, 2048 positions and the norm's 128 are small.
LARGE, SMALL = L * 12 * D**2 + 2 * V * D, L * 13 * D + S * D + 2 * D


def test_large_and_small_tensors_are_all() -> None:
    assert LARGE + SMALL == P


@pytest.mark.parametrize("recipe", ["fp32", "pure"])
def test_8_bit_adam_keeps_2_03125_bytes_of_each_large_tensor(recipe: str) -> None:
    """2 · (1 + 4/256) of a large one, 8 of a small one in any recipe; and two maps of 256 fp32 values."""
    assert states("adam-8bit", recipe) == LARGE * 203_125 // 100_000 + 8 * SMALL + 2 * 1024


def test_8_bit_lion_keeps_half_of_that() -> None:
    assert states("lion-8bit") == LARGE * 203_125 // 200_000 + 4 * SMALL + 1024


def test_a_tensor_of_4096_elements_is_large_to_8_bit_adam() -> None:
    """o (64, 64) has 4096: 8320 bytes; 4095 would have 32 760."""
    rows = [row for row in ledger("adam-8bit").live_rows("zero_grad_2", STATE) if "o_proj" in row.module]
    weight = [row for row in rows if row.tensor.startswith("weight")]

    assert sum(row.bytes for row in weight) == L * 2 * (4096 + 4 * 16)
    assert {row.dtype for row in weight} == {"uint8", "fp32"}


def test_4_bit_adam_keeps_1_0625_bytes_of_each_large_tensor() -> None:
    """2 · (1/2 + 4/128) of a large one (formulas.md B2), 8 of a small one, and two maps of 16 fp32 values a tensor."""
    packed = 4 * L + 2

    assert states("adam-4bit") == LARGE * 10_625 // 10_000 + 8 * SMALL + packed * 2 * 4 * 16


def test_lamb_keeps_two_fp32_moments_and_a_norm() -> None:
    assert states("lamb", "pure") == states("lamb") == 8 * P + 4 * TENSORS


def test_galore_keeps_moments_of_the_long_side_and_a_projector() -> None:
    """GaLore table 1 with rank r and m <= n: 2 n r + m r; in 16 bit. qkv (192, 64), o (64, 64), up and down 256 x 64."""
    r = 16
    matrices = [(3 * D, D), (D, D), (4 * D, D), (4 * D, D)]
    projected = sum(2 * n * r + m * r for n, m in matrices)
    rest = P - L * 12 * D**2

    assert states("galore", "pure", optimizer_options={"rank": r}) == 2 * (L * projected + 2 * rest)


def test_in_fp32_galores_projector_keeps_all_singular_vectors() -> None:
    """It is a view of them: m² in place of m r."""
    r = 16
    matrices = [(3 * D, D), (D, D), (4 * D, D), (4 * D, D)]
    projected = sum(2 * n * r + m * m for n, m in matrices)

    assert states("galore", optimizer_options={"rank": r}) == 4 * (L * projected + 2 * (P - L * 12 * D**2))


# -- temporaries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [name for name, facts in OPTIMIZERS.items() if "fused" in facts.implementations])
def test_a_fused_step_makes_next_to_nothing(optimizer: str) -> None:
    """Muon's matrices apart, for which nobody has fused anything."""
    assert made(optimizer, "fused") == (made("muon", "foreach") if optimizer == "muon" else 0)


@pytest.mark.parametrize(
    ("optimizer", "lists", "decayed"),
    [
        ("sgd", 0, 1),
        ("momentum", 0, 1),
        ("adam", 1, 1),
        ("adamw", 1, 1),
        ("adagrad", 2, 2),
        ("adadelta", 2, 3),
        ("adamax", 1, 1),
        ("nadam", 1, 2),
        ("radam", 1, 1),
        ("rmsprop", 1, 2),
        ("asgd", 1, 1),
        ("adafactor", 1, 1),
        ("lion", 1, 1),
    ],
)
def test_foreach_makes_lists_as_large_as_all_parameters(optimizer: str, lists: int, decayed: int) -> None:
    for decay, count in ((0.0, lists), (0.1, decayed)):
        assert made(optimizer, "foreach", optimizer_options={"weight_decay": decay}) == 4 * count * P


def test_foreach_rprop_selects_one_gradient_at_a_time() -> None:
    """The signs of all; of the largest, a condition of one byte and the outcome of four."""
    assert made("rprop", "foreach") == 4 * P + (1 + 4) * LARGEST


# The layer's vectors before its largest matrices: a norm of d before up, up's bias of 4d before down.
@pytest.mark.parametrize(
    ("optimizer", "options", "elements"),
    [
        ("sgd", {}, 0),
        ("sgd", {"weight_decay": 0.1}, LARGEST),
        ("momentum", {}, 0),
        ("momentum", {"nesterov": True}, LARGEST),
        ("momentum", {"nesterov": True, "weight_decay": 0.1}, 2 * LARGEST),
        ("adam", {}, 2 * LARGEST + 4 * D),  # a temporary, the denominator, and the last one's
        ("adamw", {"amsgrad": True}, 2 * LARGEST + 4 * D),
        ("adam", {"weight_decay": 0.1}, 3 * LARGEST + 4 * D),
        ("adagrad", {}, LARGEST + 4 * D),
        ("adadelta", {}, 2 * LARGEST + 4 * D),
        ("adamax", {}, LARGEST),
        ("nadam", {}, 2 * LARGEST + 4 * D),
        ("radam", {}, 5 * LARGEST),
        ("rmsprop", {}, LARGEST + 4 * D),
        ("rmsprop", {"weight_decay": 0.1}, 2 * LARGEST + 4 * D),
        ("rprop", {}, 3 * LARGEST),
        ("asgd", {}, 0),
        # down: the update, the norms of its rows and columns; the square and the update of the bias before it
        ("adafactor", {}, LARGEST + D + 4 * D + 4 * D + 4 * D),
        ("lion", {}, LARGEST),
    ],
)
def test_a_loop_makes_a_few_buffers_of_one_parameter(optimizer: str, options: dict[str, Any], elements: int) -> None:
    assert made(optimizer, "for-loop", optimizer_options=options) == 4 * elements


def test_muon_orthogonalises_its_largest_matrix_in_bf16() -> None:
    """Newton-Schulz on n = d · 4d elements: the update in the gradient's dtype, two in bf16, two gram matrices of d²."""
    assert made("muon", "fused") == (4 + 2 + 2) * LARGEST + 2 * 2 * D**2
    assert made("muon", "fused", recipe="pure") == (2 + 2 + 2) * LARGEST + 2 * 2 * D**2


def test_beside_muon_adamw_makes_a_list_of_the_rest() -> None:
    """Of a vocabulary that is large enough, embeddings and head make more than Muon does."""
    run = memcalc.estimate(
        {"model": MODEL | {"vocab_size": 4096}, "training": {"optimizer": "muon", "recipe": "pure"}}
    ).ledger
    vectors = L * 13 * D + S * D + 2 * D

    assert run.components("optimizer_step_2")[TEMPORARIES] == 2 * (2 * 4096 * D + vectors)


def test_lamb_casts_16_bit_weights_to_take_their_norm() -> None:
    assert made("lamb", "for-loop") == 0
    assert made("lamb", "for-loop", recipe="pure") == 4 * LARGEST


def test_4_bit_adam_unpacks_both_moments_of_the_largest_tensor() -> None:
    """Of each: 4 bytes per element in fp32, 8 of the codes as int64, and an fp32 scale for 128 elements: 24.0625."""
    largest = 4 * D * D  # up, down; both tables are smaller

    assert largest > V * D
    assert made("adam-4bit", "for-loop", recipe="pure") == largest * 240_625 // 10_000


def test_galore_decomposes_the_largest_matrix_in_fp32() -> None:
    """16-bit (64, 256), down: the matrix and a copy for cuSOLVER, U of 64 x 64, V of 64 x 256, S of 64, in fp32.

    A status is in a block of 512 bytes. Up, before it, has left a denominator of 256 x r and an update.
    """
    decomposition = 4 * (2 * LARGEST + LARGEST + D**2 + D) + 512
    left = 2 * (4 * D * 16 + LARGEST)

    assert made("galore", "for-loop", recipe="pure", optimizer_options={"rank": 16}) == decomposition + left


@pytest.mark.parametrize("optimizer", ["adam-8bit", "lion-8bit"])
def test_8_bit_kernels_update_in_place(optimizer: str) -> None:
    assert made(optimizer, "for-loop") == 0


@pytest.mark.parametrize(
    ("recipe", "item"),
    [
        ("pure", 2),  # the optimizer updates the weights themselves
        ("mixed-16", 4),  # it updates the masters
        ("mixed-18", 4),
        ("mixed-20", 4),
        ("amp", 4),
    ],
)
def test_temporaries_have_the_dtype_of_what_is_updated(recipe: str, item: int) -> None:
    assert made("adamw", "foreach", recipe=recipe) == item * P


# -- the first step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop", "adafactor"])
def test_torch_makes_all_states_before_the_first_update(optimizer: str) -> None:
    for how in ("foreach", "for-loop"):
        assert made(optimizer, how, step=1) == made(optimizer, how, step=2)


def test_sgd_makes_momenta_on_its_way() -> None:
    """With a large tied embedding first, its temporaries are gone when the layers' momenta are made."""
    model = MODEL | {"num_layers": 8, "vocab_size": 4096, "tie_word_embeddings": True}
    training = {
        "optimizer": "momentum",
        "optimizer_implementation": "for-loop",
        "optimizer_options": {"nesterov": True},
        "recipe": "pure",
    }
    run = memcalc.estimate({"model": model, "training": training}).ledger
    first, later = (run.components(f"optimizer_step_{step}").get(TEMPORARIES, 0) for step in (1, 2))

    assert later == 2 * 4096 * D
    assert first == 2 * LARGEST


# -- what else happens in the step -------------------------------------------------------------------------------------


def test_clipping_takes_a_norm_of_each_gradient() -> None:
    """An fp32 number a tensor for each 65,536 elements of the largest, and a norm for each; SGD makes nothing else."""
    assert made("sgd", "foreach", gradient_clipping=1.0) == 4 * TENSORS * 1 + 4 * TENSORS


def test_what_the_update_makes_hides_what_clipping_makes() -> None:
    assert made("adamw", "foreach", gradient_clipping=1.0) == made("adamw", "foreach")


def test_asgds_mean_is_distinguished_from_a_separate_average() -> None:
    rows = [row for row in ledger("asgd", ema="fp32").rows if row.component is STATE]

    assert len({(row.module, row.tensor) for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("recipe", "ema", "bytes_"),
    [("pure", "weights", 2), ("pure", "fp32", 4), ("amp", "weights", 4), ("amp", "fp32", 4)],
)
def test_an_average_is_a_copy_made_with_the_optimizer(recipe: str, ema: str, bytes_: int) -> None:
    run = ledger("sgd", recipe, ema=ema)

    assert [run.components(phase).get(STATE, 0) for phase in ("model", "optimizer")] == [0, bytes_ * P]


def test_an_fp32_average_of_16_bit_weights_casts_one_at_a_time() -> None:
    assert made("sgd", "foreach", recipe="pure", ema="fp32") == 4 * LARGEST
    assert made("sgd", "foreach", recipe="mixed-20", ema="fp32") == 0  # the masters are in fp32


def test_megatron_can_sum_gradients_in_16_bit() -> None:
    """2 bytes from the beginning in place of 4, and 4 more in the step, when the masters get theirs."""
    run = ledger("adamw", "mixed-18", gradient_dtype="bf16")
    phases = ("optimizer", "forward_1", "optimizer_step_1", "zero_grad_2")

    assert [run.components(phase)[Component.GRADIENTS] for phase in phases] == [2 * P, 2 * P, 6 * P, 2 * P]


# -- bitsandbytes' tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "moments"), [("adam-8bit", 2), ("lion-8bit", 1)])
def test_tables_can_keep_their_states_out_of_8_bits(optimizer: str, moments: int) -> None:
    """gpt2-medium: 4 bytes a number in place of 1 and a scale of 4 for each 256: of 50,257 tokens and 1,024 places."""
    tables = (50_257 * 1024, 1024 * 1024)
    run = ("gpt2-medium", "recipe=pure", f"optimizer={optimizer}")
    narrow, wide = (
        memcalc.estimate(*run, f"optimizer_options.embeddings_32bit={word}").ledger.components("zero_grad_2")[STATE]
        for word in ("false", "true")
    )

    assert wide - narrow == moments * sum(4 * n - (n + 4 * -(-n // 256)) for n in tables)


def test_tables_of_masters_cannot() -> None:
    run = ("recipe=mixed-16", "optimizer=adam-8bit", "optimizer_options.embeddings_32bit=true")
    with pytest.raises(InputError, match="embeddings_32bit = true does not apply to recipe = mixed-16") as caught:
        memcalc.estimate("gpt2", *run)

    assert caught.value.remedy


# -- paged -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adam-8bit"])
def test_paged_states_of_small_tensors_stay_on_the_gpu(optimizer: str) -> None:
    """No tensor here has 100,000 elements."""
    paged = states(optimizer, optimizer_options={"paged": True})

    assert paged == states(optimizer)


def test_momentum_of_a_split_table_is_as_whole_as_its_gradient() -> None:
    """torch/optim/sgd.py clones it: 2·32000·4096 bytes on each of two ranks; with decay it is a sum, and split."""
    run = ("llama-2-7b", "num_layers=2", "recipe=pure", "tensor_parallel=2", "optimizer=momentum")

    def momentum(*more: str) -> int:
        rows = memcalc.estimate(*run, *more).ledger.rows
        (found,) = {row.bytes for row in rows if row.component is STATE and row.module == "embed_tokens"}
        return found

    assert momentum() == 2 * 32000 * 4096
    assert momentum("optimizer_options.weight_decay=0.1") == 2 * 16000 * 4096
