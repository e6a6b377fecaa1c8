"""Weights under FSDP2: what is on the GPU until the model is sharded, and what is never sharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.importers.loading import load
from memcalc.ledger.component import Component
from memcalc.ledger.ledger import Ledger
from memcalc.simulation.simulated_run import run_requests, unsupported_reason

RECORDINGS = Path(__file__).parents[2] / "benchmarks" / "recordings" / "sharded"
D, KV, F, V, RANK, LAYERS, N = 2048, 512, 8192, 4096, 16, 2, 8
MATRICES = 2 * D * D + 2 * D * KV + 3 * D * F  # q, o; k, v; gate, up, down
PACKED = LAYERS * MATRICES // 2
OTHERS = 2 * (V * D + LAYERS * 2 * D + D)  # embedding (tied) and norms in bf16
ADAPTERS = 4 * LAYERS * RANK * (2 * (D + D) + 2 * (D + KV) + 3 * (D + F))  # fp32
RUN = (
    *("llama-3.2-1b", f"num_layers={LAYERS}", f"vocab_size={V}", "b=1", "s=64", "recipe=pure", "finetune=qlora"),
    *(f"lora.rank={RANK}", "engine=fsdp2", "zero_stage=3", f"data_parallel={N}"),
)
TRL = """
model_name_or_path: meta-llama/Llama-3.2-1B
max_length: 64
per_device_train_batch_size: 1
use_peft: true
load_in_4bit: true
fsdp: full_shard auto_wrap
fsdp_config: {fsdp_version: %s}
"""
PROGRAM = ("framework=sft", "versions.trl=1.16.0", "versions.transformers=5.23.0", "data_parallel=8")


def estimated(*words: str) -> Ledger:
    return memcalc.estimate(*RUN, *words).ledger


def built(ledger: Ledger) -> int:
    """Bytes of weights while the model is built, besides those that stay."""
    return ledger.components("model")[Component.TEMPORARIES]


def test_all_weights_are_on_the_gpu_until_they_are_sharded() -> None:
    """Accelerate references all of them until the last unit is sharded; else shards replace them, unit by unit."""
    whole = PACKED + OTHERS + ADAPTERS
    layer = (MATRICES // 2 + 2 * 2 * D + ADAPTERS // LAYERS) // N  # of the first unit

    assert built(estimated("fsdp.keeps_unsharded_weights=true")) == whole
    assert built(estimated()) == whole - whole // N + layer


def test_weights_in_integers_stay_unsharded() -> None:
    """Scales stay whole anyway. accelerate/utils/fsdp_utils.py, fsdp2_prepare_model, incompatible_params4bit."""
    sharded, whole = (
        estimated(f"qlora.quant_storage={storage}").components("optimizer_step_2")[Component.WEIGHTS]
        for storage in ("compute", "uint8")
    )
    assert whole - sharded == PACKED - PACKED // N


HEAD = 4 * V * D  # embedding or LM head in fp32
NORM = 4 * D
LAYER = 4 * (MATRICES + 2 * D)
FULL = (*(word for word in RUN if "lora" not in word and "pure" not in word), "recipe=fp32", "dtype=fp32")
UNTIED = (*FULL, "tie_word_embeddings=false", "fsdp.wrap=layers-and-ends")


@pytest.mark.parametrize(
    ("words", "size"),
    [
        # Embedding, final norm and LM head at once; or a layer, while their shards are missing.
        ((*UNTIED, f"vocab_size={16 * V}", "fsdp.weights_from=host"), 2 * 16 * HEAD + NORM),
        ((*UNTIED, "tie_word_embeddings=true", "fsdp.weights_from=host"), LAYER - (HEAD + NORM) // N),
        # The last layer's gate and up matrix, while shards of final norm and LM head are missing.
        ((*UNTIED, "fsdp.weights_from=first-rank"), 2 * 4 * D * F - (HEAD + NORM) // N),
    ],
)
def test_weights_are_whole_before_they_are_sharded(words: tuple[str, ...], size: int) -> None:
    assert built(memcalc.estimate(*words).ledger) == size


def test_units_move_whole_one_after_the_other() -> None:
    """fully_shard frees a layer when it returns; embedding and LM head stay until all units are sharded."""
    requests = run_requests(load(UNTIED[0], [*UNTIED[1:], "fsdp.weights_from=host"]))
    script = [code for stretch in requests.stretches if stretch.phase == "model" for code in stretch.script]
    of_layer = 7  # tensors: q, k and v are one
    assert [code < 0 for code in script[: 3 * of_layer]] == [False] * 2 * of_layer + [True] * of_layer
    ends = script[2 * 3 * of_layer :]
    assert ends[:6] == [HEAD, HEAD // N, NORM, HEAD, NORM // N, HEAD // N]


def cases() -> list[dict[str, object]]:
    paths = RECORDINGS.glob("*adapters-4-bits*.jsonl")
    records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [record for record in records if "num_layers=8" in record["case"] and "engine=fsdp2" in record["case"]]


@pytest.mark.parametrize("record", cases(), ids=lambda record: str(record["case"]))
def test_building_a_recorded_model(record: dict[str, object]) -> None:
    """The reference step shards its model without Accelerate. What quantizes a matrix is not in the ledger."""
    phases = record["phases"]
    assert isinstance(phases, dict)
    ledger = memcalc.estimate(*str(record["case"]).split()).ledger

    assert sum(ledger.components("model").values()) == pytest.approx(phases["model"], rel=0.005)


def test_a_file_of_trl_stores_integers_by_default(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(TRL % 2)
    spec = load(path, PROGRAM)
    assert spec.training.qlora is not None
    assert (spec.training.qlora.quant_storage, spec.parallelism.fsdp.keeps_unsharded_weights) == ("uint8", True)

    path.write_text(TRL % 2 + "bnb_4bit_quant_storage: bfloat16\n")
    spec = load(path, PROGRAM)
    assert spec.training.qlora is not None
    assert spec.training.qlora.quant_storage == "compute"
    assert not unsupported_reason(spec)


def test_fsdp1_rejects_weights_in_integers(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(TRL % 1)
    with pytest.raises(InputError, match=r"FSDP1 cannot flatten 4-bit weights .* Set bnb_4bit_quant_storage: bfloat16"):
        load(path, PROGRAM)


def test_a_guessed_release_does_not_make_a_run_impossible(tmp_path: Path) -> None:
    """Before transformers 5.10 FSDP is FSDP1, which rejects integers; the file names neither."""
    path = tmp_path / "sft.yaml"
    path.write_text(TRL.replace("fsdp_config: {fsdp_version: %s}\n", ""))

    assert load(path, ("framework=sft", "data_parallel=8")).parallelism.engine == "fsdp2"
    with pytest.raises(InputError, match="FSDP1 cannot flatten"):
        load(path, ("framework=sft", "data_parallel=8", "versions.transformers=4.57.6"))


def test_what_a_script_stores_is_an_assumption(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(TRL % 2)
    words = ("framework=trainer", "versions.transformers=5.23.0", "data_parallel=8")
    assumed = {each.field: each.taken for each in load(path, words).origin.assumptions}

    assert assumed["training.qlora.quant_storage"] == "uint8"


@pytest.mark.parametrize(
    ("trl", "transformers", "warms_up"),
    [
        ("1.16.0", "5.23.0", True),
        ("1.16.0", "4.49.0", False),
        ("0.24.0", "5.23.0", False),
    ],
)
def test_transformers_allocates_all_weights_before_it_loads_them(
    trl: str, transformers: str, *, warms_up: bool, tmp_path: Path
) -> None:
    """modeling_utils.py, caching_allocator_warmup, since 4.50, with a device map, as TRL sets one on one GPU."""
    path = tmp_path / "sft.yaml"
    path.write_text("model_name_or_path: openai-community/gpt2\nmax_length: 64\nper_device_train_batch_size: 1\n")
    spec = load(path, ("framework=sft", f"versions.trl={trl}", f"versions.transformers={transformers}"))
    first = next(interval for interval in run_requests(spec).stretches if interval.script)

    assert first.phase == "model"
    assert (first.script[0] == 4 * 124_439_808) == warms_up  # GPT-2's parameters in fp32
