"""Other programs' names of our fields: each sets what it means, in --set and in files; what means nothing is advised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.spec.fields import BLOCKS, NESTED, find_field
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.loading import load
from memcalc.spec.overrides import parse_overrides
from memcalc.spec.words import BUDGET, GPUS, advice_for, field_of, foreign_names, is_foreign_name

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 64}


def settings(*assignments: str) -> dict[str, Any]:
    return {".".join(map(str, path)): value for path, value in parse_overrides(assignments).items()}


@pytest.mark.parametrize(
    ("assignment", "meant"),
    [
        ("num_hidden_layers=3", {"model.num_layers": 3}),
        ("n_embd=64", {"model.hidden_size": 64}),
        ("model.n_head=4", {"model.num_attention_heads": 4}),
        ("num_local_experts=8", {"model.moe.num_experts": 8}),
        ("per_device_train_batch_size=4", {"training.micro_batch_size": 4}),
        ("batch_size=4", {"training.micro_batch_size": 4}),
        ("training.batch_size=4", {"training.micro_batch_size": 4}),
        ("max_seq_length=512", {"training.sequence_length": 512}),
        ("gradient_checkpointing=true", {"training.recompute": "full"}),
        ("gradient_checkpointing=False", {"training.recompute": "none"}),
        ("bf16=true", {"training.dtype": "bf16"}),
        ("fp16=false", {}),
        ("torch_dtype=bfloat16", {"training.dtype": "bf16"}),
        ("precision=bf16-mixed", {"training.dtype": "bf16", "training.recipe": "amp"}),
        ("optim=adamw_torch_fused", {"training.optimizer": "adamw", "training.optimizer_implementation": "fused"}),
        (
            "optim=paged_adamw_8bit",
            {"training.optimizer": "adam-8bit", "training.optimizer_options.paged": True},
        ),
        ("optim=muon", {"training.optimizer": "muon"}),
        ("attn_implementation=eager", {"training.attention": "eager"}),
        ("load_in_4bit=true", {"training.finetune": "qlora"}),
        ("lora_r=8", {"training.lora.rank": 8}),
        ("max_grad_norm=1.0", {"training.gradient_clipping": 1.0}),
        ("offload_optimizer=cpu", {"parallelism.offload": "optimizer"}),
        ("fsdp=full_shard auto_wrap", {"parallelism.zero_stage": 3, "parallelism.engine": "fsdp2"}),
        ("tp=2", {"parallelism.tensor_parallel": 2}),
        ("world_size=8", {"parallelism.gpus": 8}),
        ("vram=12GiB", {"hardware.budget": "12GiB"}),
        ("model_name_or_path=gpt2", {"preset": "gpt2"}),
        ("model=gpt2", {"preset": "gpt2"}),
        ("n_layer=", {"model.num_layers": None}),
        ("gradient_checkpointing=", {"training.recompute": None}),
    ],
)
def test_a_word_sets_the_fields_that_it_means(assignment: str, meant: dict[str, Any]) -> None:
    assert settings(assignment) == meant


def test_no_word_hides_a_field_of_ours_and_each_names_one() -> None:
    for name in foreign_names():
        assert is_foreign_name(name)
        assert find_field(name) is None, name
        path = (field_of(name) or "").split(".")
        if path == ["preset"] or tuple(path) in (GPUS, BUDGET):
            continue
        block = NESTED[path[1]] if len(path) == 3 else BLOCKS[path[0]]
        assert path[-1] in block.model_fields, name
        assert advice_for(name) is None, name


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim=7", "optim = '7' is not a known value. Choose from adamw_torch, "),
        (
            "attn_implementation=fast",
            "attn_implementation = 'fast' is not a known value. Choose from flash_attention_2, ",
        ),
        (
            "gradient_checkpointing=often",
            "gradient_checkpointing = 'often' is not a known value. Choose from true, false.",
        ),
        ("lr=1e-4", "unknown field 'lr'. Leave lr out: the field has no effect on memory."),
        ("training.learning_rate=1", "Leave learning_rate out: the field has no effect on memory."),
        (
            "train_batch_size=8",
            "unknown field 'train_batch_size'. Set global_batch_size (DeepSpeed's train_batch_size), or micro_batch_size for one GPU.",
        ),
        ("model.batch_size=2", "unknown field 'model.batch_size'. Did you mean training.micro_batch_size?"),
        ("per_device_train_batchsize=2", "Did you mean per_device_train_batch_size?"),
    ],
)
def test_what_cannot_be_settled_is_refused_with_what_to_write(assignment: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_overrides([assignment])

    assert message in str(caught.value)


def test_words_stand_in_blocks_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {n_layer: 2, n_embd: 64, n_head: 4, vocab_size: 100}\n"
        "training:\n  per_device_train_batch_size: 3\n  max_seq_length: 32\n  lora_r: 4\n  gradient_checkpointing: "
        "true\n"
        "parallelism: {dp: 2, fsdp: true}\nhardware: {card: t4}\n"
    )
    spec = load(path)

    assert (spec.model.num_layers, spec.model.hidden_size, spec.model.num_attention_heads) == (2, 64, 4)
    assert (spec.training.micro_batch_size, spec.training.sequence_length) == (3, 32)
    assert spec.training.finetune == "lora"
    assert spec.training.lora is not None
    assert spec.training.lora.rank == 4
    assert spec.training.recompute == "full"
    assert (spec.parallelism.data_parallel, spec.parallelism.zero_stage, spec.parallelism.engine) == (2, 3, "fsdp2")
    assert spec.hardware.gpu == "t4"

    path.write_text(path.read_text().replace("n_layer: 2", "n_layer: 0"))
    with pytest.raises(InputError, match=r"run\.yaml:1: model\.num_layers: num_layers = 0 is too small"):
        load(path)
    path.write_text("model: gpt2\ntraining: {b: 2, batch_size: 3}\n")
    with pytest.raises(
        InputError,
        match=r"batch_size sets micro_batch_size = 3, but another line sets micro_batch_size = 2. Keep one of the two",
    ):
        load(path)
    path.write_text("model: gpt2\nbatch_size: 3\n")
    with pytest.raises(
        InputError, match=r"run\.yaml:2: batch_size: 'batch_size' is outside its block. Move batch_size below tr"
    ):
        load(path)
    path.write_text("model: gpt2\nmodel: {tp: 3}\n".replace("model: gpt2\n", "preset: gpt2\n"))
    with pytest.raises(InputError, match=r"tp is a field of parallelism, not of model\. Move tp below paral"):
        load(path)


def test_a_model_may_be_named_in_place_of_its_block() -> None:
    assert load({"model": "llama-3-8b"}).model == load("llama-3-8b").model
    assert load({"model": "Qwen/Qwen3-14B", "training": {"b": 2}}).model.num_layers == 40


def test_the_number_of_gpus_sets_the_data_parallelism() -> None:
    """64 GPUs / (tensor 4 x pipeline 2) = 8 replicas."""
    spec = load("llama-3-8b", ["gpus=64", "tp=4", "pp=2"])

    assert (spec.parallelism.data_parallel, spec.parallelism.ranks) == (8, 64)
    assert load({"preset": "gpt2", "parallelism": {"gpus": 4}}).parallelism.data_parallel == 4
    written = {"preset": "gpt2", "parallelism": {"data_parallel": 2}}
    assert load(written, ["gpus=4"]).parallelism.data_parallel == 4
    assert load({"preset": "gpt2", "parallelism": {"gpus": 4}}, ["dp=2"]).parallelism.data_parallel == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["gpus=6", "tp=4"],
            "gpus = 6 differs from data_parallel 1 x tensor_parallel 4 x pipeline_parallel 1 x context_paral",
        ),
        (["gpus=2", "dp=4"], "gpus = 2 differs from data_parallel 4 x "),
        (["gpus=two"], "gpus = two is not a positive whole number. Write digits only, such as 8."),
        (["budget=12"], "budget = 12 has no unit. Write one, such as 12GiB."),
        (["budget=much"], "'much' is not a size."),
    ],
)
def test_inputs_that_cannot_be_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load("gpt2", overrides)

    assert message in str(caught.value)


def usable(result: memcalc.Result) -> int:
    return find_gpu(str(result.spec.hardware.gpu)).usable_bytes


def test_a_budget_is_what_a_gpu_may_hold() -> None:
    """12 GiB = 12,884,901,888 bytes, of an A100's kernels; of a GPU that has less, the GPU's own memory."""
    result = memcalc.estimate("gpt2", budget="12GiB")

    assert usable(result) == 12 * 2**30 == 12_884_901_888
    assert result.verdict == "fits"
    assert memcalc.estimate("gpt2", "b=16", budget="12GiB").verdict == "does-not-fit"
    assert result.ledger.totals == memcalc.estimate("gpt2", gpu="a100-80gb").ledger.totals
    named = memcalc.estimate("gpt2", "budget=12GiB", gpu="rtx-4090")
    assert named.spec.hardware.gpu == "rtx-4090:12GiB"
    assert usable(named) == 12 * 2**30
    assert usable(memcalc.estimate("gpt2", "budget=48GiB", gpu="rtx-4090")) == int(23.52 * 2**30)


def test_fields_may_be_keywords() -> None:
    given = memcalc.load("gpt2", micro_batch_size=4, lora={"rank": 4}, recompute=[0, 2], gpu="t4")

    assert given == memcalc.load("gpt2", "b=4", "lora.rank=4", "recompute=[0, 2]", gpu="t4")
    assert memcalc.estimate("gpt2", per_device_train_batch_size=2).spec.training.micro_batch_size == 2
    with pytest.raises(InputError, match="micro_batch_size: a object is not a value of a field"):
        memcalc.load("gpt2", micro_batch_size=object())


def test_a_word_adds_to_a_block_that_is_given_below_it() -> None:
    experts = {"num_experts": 8, "expert_intermediate_size": 64}
    spec = load({"model": {"num_experts_per_tok": 2, "architecture": "mixtral", **SIZES, "moe": experts}})

    assert spec.model.moe is not None
    assert (spec.model.moe.num_experts, spec.model.moe.num_experts_per_token) == (8, 2)
    with pytest.raises(
        InputError, match=r"num_experts sets num_experts = 4, but another line sets num_experts = 8\. Keep one"
    ):
        load({"model": {"num_experts": 4, "architecture": "mixtral", **SIZES, "moe": experts}})
    with pytest.raises(InputError, match=r"moe = 5 is not a block"):
        load({"model": {"num_experts": 4, "architecture": "mixtral", **SIZES, "moe": 5}})
