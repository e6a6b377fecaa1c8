"""What autograd saves on the host (save_on_cpu): the host's bytes, the device's, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

import memcalc
from memcalc.documents.result import document
from memcalc.documents.schema import documents
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.simulation.simulated_run import unsupported_reason
from memcalc.sweeping import evaluate
from memcalc.workspaces.pinned import pinned_block
from tests.sweeping.test_evaluation import assert_same
from tools.offload import OffloadedRun, activation_runs

B, S, D, H, V, LAYERS = 2, 128, 768, 12, 50257, 12  # gpt2, two short sequences
N = B * S


def host(*overrides: str) -> Any:
    return memcalc.estimate("gpt2", f"b={B}", f"s={S}", "recipe=pure", "dropout=0", *overrides).headline.host


def test_the_host_holds_every_saved_tensor_and_every_matrix() -> None:
    """34bsd, as on the device, but q, k, v are there beside their norm's output: and 24d² of weights in 16 bit.

    A layer: norm x, qkv x, q k v y, o x, norm x, up x, gelu x (4), down x (4), of 2 bytes each:
    (1 + 1 + 4 + 1 + 1 + 1 + 4 + 4) 2bsd = 34bsd; mean and reciprocal deviation of two norms 16bs, log-sum-exp 4bsh,
    a random state of 24 bytes; matrices 3d² + d² + 4d² + 4d², two norms' weights and biases 4d, of 2 bytes.
    """
    found = host("offload_activations=pageable")

    layer = 34 * N * D + 16 * N + 4 * N * H + 24 + 24 * D * D + 8 * D
    assert found.components("backward_2") == {
        Component.ACTIVATIONS: 8 * N + 8 * S + LAYERS * layer,  # of the embeddings their indices
        Component.LOGITS_AND_LOSS: 2 * N * D + 8 * N + 4 * D + 2 * N * D + 2 * V * D,
    }
    for phase in ("zero_grad_2", "optimizer_step_2"):
        assert found.totals[phase] == 0


def test_a_recomputed_layer_leaves_its_input() -> None:
    found = host("offload_activations=pageable", "recompute=full")

    assert found.components("loss_1")[Component.ACTIVATIONS] == 8 * N + 8 * S + LAYERS * 2 * N * D


def test_pinned_blocks_are_powers_of_two() -> None:
    found = host("offload_activations=pinned", "recompute=full")

    parts = [8 * N, 8 * S, *[2 * N * D] * LAYERS, 2 * N * D, 4 * N, 4 * N, 2 * D, 2 * D, 2 * N * D, 2 * V * D]
    assert found.peak_bytes == sum(map(pinned_block, parts))


def test_the_device_keeps_nothing_between_forward_and_backward() -> None:
    kept, gone = (
        memcalc.estimate("gpt2", "b=8", "recipe=pure", f"offload_activations={where}").ledger.components("loss_2")
        for where in ("none", "pinned")
    )

    assert Component.ACTIVATIONS in kept
    assert Component.ACTIVATIONS not in gone


def test_the_json_document_lists_host_memory() -> None:
    found = document(memcalc.estimate("gpt2", "offload_activations=pinned"))
    documents()["estimate"].validate_json(json.dumps(found))

    assert found["host"]["bytes"] == sum(found["host"]["components"].values()) > 0


def test_a_grid_equals_the_scalar_estimates() -> None:
    axes: dict[Any, Any] = {"offload_activations": ["none", "pinned"], "recompute": ["none", "selective"], "b": [1, 4]}

    assert_same("gpt2", evaluate("gpt2", axes, gpu="a100-40gb"), gpu="a100-40gb")


@pytest.mark.parametrize("run", activation_runs(), ids=lambda run: run.run.case)
def test_recorded_runs(run: OffloadedRun) -> None:
    """Only unsplit block remainders differ on the device; pinned memory is byte-exact."""
    assert abs(run.run.error) <= 0.006
    assert run.pinned_measured == run.pinned_estimated


def test_activation_offload_is_replayed() -> None:
    assert not unsupported_reason(memcalc.load("gpt2", "offload_activations=pinned"))


def test_recomputation_is_planned_for_the_device() -> None:
    with pytest.raises(InputError, match="offload_activations = pinned leaves no activations to plan"):
        memcalc.recompute("gpt2", "offload_activations=pinned", gpu="a100-40gb")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data_parallel=2", "zero_stage=2", "engine=deepspeed"),
            (
                "is not modelled with 2 ranks of engine deepspeed. Use one GPU, or only data parallelism with engine: "
                "fsdp2 or ddp, or set offload_activations: none."
            ),
        ),
        (
            ("recompute=selective",),
            "is not modelled with recompute = selective. Set recompute: none or full, without recompute_keep, or set",
        ),
        (("implementation=megatron",), "is not modelled with implementation = megatron. Set implementation: plain or"),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as refused:
        memcalc.estimate("llama-3.2-1b", "offload_activations=pinned", *overrides)

    assert f"offload_activations = pinned {message}" in str(refused.value)


def test_an_adapter_saves_what_its_gradients_need() -> None:
    """Of the first layer's q_proj, with an input that needs no gradient: x in fp32 for A, 4bsd; A x for B, 4bsr; and B, 4dr.

    The frozen matrix saves nothing there, for neither it nor its input gets a gradient.
    """
    words = ("recipe=pure", f"b={B}", f"s={S}", "l=1", "lora.rank=8", "lora.target_modules=[q_proj]")
    found = memcalc.estimate("llama-3.2-1b", *words, "offload_activations=pageable").headline.host
    assert found is not None

    saved = sum(row.bytes for row in found.rows if "q_proj" in row.tensor and "backward_2" in row.phases)
    assert saved == 4 * N * 2048 + 4 * N * 8 + 4 * 2048 * 8


def test_ranks_of_fsdp2_save_whole_weights() -> None:
    """What forward sees of a weight is gathered, so every rank's host gets all of it, as one GPU's does."""
    words = ("recipe=pure", "b=2", "s=128", "l=2", "offload_activations=pageable")
    fsdp2 = ("engine=fsdp2", "zero_stage=3", "data_parallel=8")
    one, eighth = (memcalc.estimate("llama-3.2-1b", *words, *more).headline.host for more in ((), fsdp2))

    assert one is not None
    assert eighth is not None
    assert one.components("backward_2") == eighth.components("backward_2")


def test_replicas_save_what_one_gpu_does() -> None:
    """DDP's buckets hold gradients; what forward saves is every rank's own."""
    words = ("recipe=pure", "b=2", "s=128", "l=2", "offload_activations=pinned")
    one, half = (memcalc.estimate("llama-3.2-1b", *words, f"data_parallel={n}").headline.host for n in (1, 2))

    assert one is not None
    assert half is not None
    assert one.totals == half.totals


def test_experts_save_the_rows_that_rounding_added() -> None:
    """70 tokens to 8 of 32 experts of granite: 18 rows of each, 576 for 560 copies.

    Each expert's gate and up saves its rows; the weighting saves 560 rows of what down made, index_add the product;
    topk's choice, the copies' order and their tokens, once more by index_add, are 560 integers each; the router's
    probabilities are saved by the softmax that made them and by the gather that reads them.
    """
    words = ("recipe=pure", "b=1", "s=70", "l=1", "V=4096", "offload_activations=pageable")
    found = memcalc.estimate("granite-3.0-1b-a400m", *words).headline.host
    assert found is not None

    rows = [(row.shape, row.dtype) for row in found.rows if "backward_2" in row.phases for _ in range(row.count)]
    assert rows.count(((32, 18, 1024), "bf16")) == 2  # of gate and up
    assert sum(s in ((1, 70, 8, 1024), (560, 1024)) for s, _ in rows) == 2
    assert sum(dtype == "int64" and s == (1, 70, 8) for s, dtype in rows) == 4
    assert rows.count(((1, 70, 32), "fp32")) == 2


def test_ligers_kernels_overwrite_the_copies_from_the_host() -> None:
    """Their backward writes the gradients of gate and up over the saved tensors, here over copies of them."""
    given = ("implementation=huggingface", "recipe=pure", "b=2", "s=1024", "num_layers=2", "V=512")
    torchs, ligers = (
        memcalc.estimate("llama-3.2-1b", *given, "offload_activations=pinned", f"kernels={kernels}").ledger
        for kernels in ("torch", "liger")
    )

    copies = [row.bytes for row in ligers.live_rows("backward_2") if row.tensor == "mlp.gate_proj output, saved"]
    assert copies == [2 * 1024 * 8192 * 2]
    assert ligers.totals["backward_2"] < torchs.totals["backward_2"]
