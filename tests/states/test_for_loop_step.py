"""What a program's own loop does with logits and gradients: arithmetic, defaults of frameworks, rules."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger

TOKENS, VOCAB, WIDTH = 2 * 512, 32768, 64
SIZES = (
    *("num_layers=2", f"hidden_size={WIDTH}", "num_attention_heads=4", "num_key_value_heads=4", "head_dim=16"),
    *("intermediate_size=128", f"vocab_size={VOCAB}", "b=2", "s=512", "optimizer=sgd"),
)
LOGITS = TOKENS * VOCAB


def run(*words: str) -> Ledger:
    return memcalc.estimate("llama-3.2-1b", *SIZES, *words).ledger


def of(ledger: Ledger, component: Component, phase: str) -> int:
    return sum(row.bytes for row in ledger.rows if row.component is component and phase in row.phases)


@pytest.mark.parametrize(
    ("words", "bytes_per_logit"),
    [
        # logits 2, log-probabilities 4, their gradient 4, that of the copy 4
        (("recipe=pure",), 14),
        # logits 2, log-probabilities 2, two gradients of 2
        (("recipe=pure", "loss_upcast=false"), 8),
        # logits 2, log-probabilities 4 from one kernel, their gradient 4, that of the logits 2
        (("recipe=amp", "loss_upcast=false"), 12),
        # logits 4, log-probabilities 4, two gradients of 4
        (("recipe=fp32",), 16),
        (("recipe=fp32", "loss_upcast=false"), 16),
        # logits that Fabric has converted 4, log-probabilities 4, two gradients of 4
        (("recipe=pure", "logits_dtype=fp32"), 16),
        (("recipe=pure", "logits_dtype=fp32", "implementation=huggingface"), 16),
    ],
)
def test_bytes_per_logit_at_the_peak(words: tuple[str, ...], bytes_per_logit: int) -> None:
    """Beside them only what is as small as the hidden states and the labels: under a twentieth of a byte per logit."""
    found = of(run(*words), Component.LOGITS_AND_LOSS, "backward_2")

    assert 0 <= found - bytes_per_logit * LOGITS < LOGITS // 20


CHUNKED = ("recipe=pure", "loss=chunked", "loss_recompute=false", "loss_chunks=8")


@pytest.mark.parametrize(
    ("words", "phase", "bytes_per_logit"),
    [
        # torchtune: bf16 logits 2 and log-probabilities 4 of all chunks, an fp32 copy of one in eight
        (("logits_until=loss",), "loss_2", 2 + 4 + 4 / 8),
        # in backward log-probabilities go as gradients of one chunk come: 4 of all, two gradients of one
        (("logits_until=loss",), "backward_2", 4 + (4 + 4) / 8),
        # LitGPT with adapters: fp32 logits 4, log-probabilities 4
        (("logits_until=step", "logits_dtype=fp32"), "loss_2", 4 + 4),
        # LitGPT's full fine-tuning: logits 4, gradients of all chunks 4, and zeros around them 4
        (("logits_until=step", "logits_dtype=fp32", "chunked_head=false"), "backward_2", 4 + 4 + 4),
    ],
)
def test_bytes_per_logit_of_chunks_that_stay(words: tuple[str, ...], phase: str, bytes_per_logit: float) -> None:
    found = of(run(*CHUNKED, *words), Component.LOGITS_AND_LOSS, phase)

    assert abs(found - bytes_per_logit * LOGITS) < LOGITS // 10


def test_logits_that_a_loop_names_live_through_the_step_and_the_next_forward() -> None:
    """2 bytes of each in the optimizer's step, 4 where Fabric has converted them; the next backward has new ones."""
    for words, item_bytes in (((), 2), (("logits_dtype=fp32",), 4)):
        step, backward = (run("recipe=pure", *words, f"logits_until={each}") for each in ("step", "backward"))
        for phase in ("optimizer_step_1", "optimizer_step_2", "forward_2"):
            more = of(step, Component.LOGITS_AND_LOSS, phase) - of(backward, Component.LOGITS_AND_LOSS, phase)
            assert more == item_bytes * LOGITS, phase
        assert step.totals["backward_2"] == backward.totals["backward_2"]


HIDDEN = TOKENS * WIDTH


@pytest.mark.parametrize(
    ("words", "more"),
    [
        # of each of two norms two fp32 tensors, in place of the bf16 input that one kernel keeps
        (("norm_dtype=fp32",), 2 * (4 + 4 - 2) * HIDDEN),
        # keys and values of 4 heads, in place of 2
        (("repeat_kv=true",), 2 * 2 * (HIDDEN - HIDDEN // 2)),
        # the kernel's output, which its backward reads, and the copy that the next matmul reads; q, k and v, of which
        # v is a view, twice as wide as q with 2 heads of k and v beside 4, in place of v alone
        (("heads_first=true",), 2 * HIDDEN + 2 * 2 * HIDDEN - 2 * HIDDEN // 2),
    ],
)
def test_modules_that_keep_more(words: tuple[str, ...], more: int) -> None:
    one, own = (
        sum(
            row.bytes // row.count
            for row in run("recipe=pure", "num_key_value_heads=2", *options, "logits_until=loss").rows
            if row.component is Component.ACTIVATIONS and "loss_2" in row.phases
        )
        for options in ((), words)
    )

    assert own - one == more


def test_autocast_over_16_bit_weights_runs_layer_norms_in_fp32() -> None:
    """Of each of two norms an fp32 copy of the input stays, in place of the bf16 one; matmuls cast what they read.

    gpt2's layers, plain: the fp32 outputs of norms are cast for the matmuls, which keep the casts.
    """
    small = ("num_layers=2", f"hidden_size={WIDTH}", "num_attention_heads=4", "b=2", "s=512", "optimizer=sgd")
    pure, autocast = (
        sum(
            row.bytes // row.count
            for row in memcalc.estimate(
                "gpt2", *small, "recipe=pure", *words, "logits_until=loss", "dropout=0"
            ).ledger.rows
            if row.component is Component.ACTIVATIONS and "loss_2" in row.phases
        )
        for words in ((), ("autocast=true",))
    )

    assert autocast - pure == 2 * (4 - 2) * HIDDEN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("recipe=amp", "autocast=false"),
            (
                "--set: training.autocast: autocast = false contradicts recipe = amp, which is autocast over fp32 "
                "weights. "
                "Leave autocast out, or set recipe: fp32 or pure."
            ),
        ),
        (
            ("recipe=pure", "weight_dtype=fp16"),
            (
                "--set: training.weight_dtype: weight_dtype = fp16 is not dtype = bf16, but recipe = pure computes in "
                "the "
                "dtype of the weights. Set recipe: pure and autocast: true, or leave weight_dtype out."
            ),
        ),
        (
            ("recipe=pure", "autocast=true", "weight_dtype=fp16", "zero_stage=3", "data_parallel=2"),
            (
                "--set: training.weight_dtype: weight_dtype = fp16 is not modelled with dtype = bf16 for sharded "
                "weights "
                "or FP8. Leave weight_dtype out, or set zero_stage: 0, tensor_parallel: 1 and fp8: none."
            ),
        ),
        (
            ("recipe=pure", "fp32_modules=[norm]", "implementation=huggingface"),
            "fp32_modules = norm is modelled only for transformers' modules trained in 16 bits under autocast",
        ),
        (
            ("recipe=pure", "autocast=true", "fp32_modules=[lm_head]", "implementation=huggingface"),
            "fp32_modules = lm_head, but the embedding and the LM head share one weight.",
        ),
        (
            ("recipe=fp32", "autocast=true"),
            (
                "--set: training.autocast: autocast = true computes in 16 bits, but recipe = fp32 and dtype = fp32. "
                "Set "
                "recipe: amp and dtype: bf16 or fp16, or leave autocast out."
            ),
        ),
    ],
)
def test_autocast_and_recipes_that_contradict_each_other(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as raised:
        memcalc.load("gpt2", *words)

    assert message in str(raised.value)


def test_gradients_that_are_freed_before_backward_live_through_the_next_forward() -> None:
    """Those of the step before: 4 bytes per parameter in the second step's forward and loss, and not in backward."""
    before = {each: run("recipe=amp", f"zero_grad_before={each}") for each in ("forward", "backward")}
    layer = 4 * WIDTH**2 + 3 * WIDTH * 2 * WIDTH + 2 * WIDTH  # q, k, v, o; gate, up, down; two norms
    gradients = 4 * (2 * layer + VOCAB * WIDTH + WIDTH)

    for phase in ("forward_2", "loss_2"):
        assert of(before["forward"], Component.GRADIENTS, phase) == 0
        assert of(before["backward"], Component.GRADIENTS, phase) == gradients
    assert before["forward"].totals["backward_2"] == before["backward"].totals["backward_2"]
    for phase in ("forward_1", "loss_1", "backward_1"):
        assert before["forward"].totals[phase] == before["backward"].totals[phase]


@pytest.mark.parametrize(
    ("framework", "loop"),
    [
        ("lightning", ("loss", "backward", True)),
        ("loop", ("step", "forward", False)),
        ("accelerate", ("backward", "forward", True)),
    ],
)
def test_frameworks_have_their_loops(framework: str, loop: tuple[str, str, bool]) -> None:
    training = memcalc.load("llama-3.2-1b", f"framework={framework}").training

    assert (training.logits_until, training.zero_grad_before, training.loss_upcast) == loop


def test_a_loop_around_transformers_has_its_loss() -> None:
    assert memcalc.load("llama-3.2-1b", "framework=loop", "implementation=huggingface").training.loss_upcast


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("loss_upcast=false", "implementation=huggingface"),
            (
                "--set: training.loss_upcast: loss_upcast = false needs implementation = plain and loss = "
                "materialized, not huggingface and materialized. Set loss_upcast: true, or implementation: plain and "
                "loss: materialized."
            ),
        ),
        (
            ("loss_recompute=false",),
            (
                "--set: training.loss_recompute: loss_recompute = false needs loss = chunked: loss = materialized has "
                "no chunks to checkpoint. Set loss: chunked, or leave loss_recompute out."
            ),
        ),
        (
            ("chunked_head=false", "loss=chunked"),
            (
                "--set: training.chunked_head: chunked_head = false needs loss_recompute = false: recomputation starts "
                "from the hidden states of each chunk. Set loss: chunked and loss_recompute: false, or leave "
                "chunked_head out."
            ),
        ),
        (
            ("repeat_kv=true", "implementation=megatron"),
            (
                "--set: training.repeat_kv: repeat_kv = true needs implementation = plain or torchtitan or "
                "huggingface, not megatron. Leave repeat_kv out, or set implementation: plain."
            ),
        ),
        (
            ("norm_dtype=fp32", "implementation=huggingface"),
            (
                "--set: training.norm_dtype: norm_dtype = fp32 needs implementation = plain: implementation = "
                "huggingface has its own norms. Set norm_dtype: input, or implementation: plain."
            ),
        ),
        (
            ("logits_dtype=fp32", "loss=chunked"),
            (
                "--set: training.logits_dtype: logits_dtype = fp32 needs logits, but implementation = plain with loss "
                "= chunked returns none. Set logits_dtype: compute."
            ),
        ),
    ],
)
def test_losses_without_such_logits_are_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as raised:
        memcalc.load("llama-3.2-1b", *words)

    assert message in str(raised.value)
