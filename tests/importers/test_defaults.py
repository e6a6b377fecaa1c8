"""What frameworks do where their files are silent, and words that mean more than they look. Files of our own making."""

from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.importers.field_tables import ImportedConfig
from memcalc.importers.loading import import_file, load
from memcalc.layout.stages import stages_of
from tests.importers.excerpts import GPT_NEOX, NEMO, TORCHTUNE

LLAMA = "model_name_or_path: meta-llama/Meta-Llama-3-8B\n"
GPT = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
GPT += "--vocab-size 32000 --micro-batch-size 1 "
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 2"


def imported(folder: Path, name: str, text: str) -> ImportedConfig:
    path = folder / name
    path.write_text(text)
    found = import_file(path)
    assert found is not None
    return found


def spec_of(folder: Path, name: str, text: str, *overrides: str) -> Any:
    path = folder / name
    path.write_text(text)
    return load(path, overrides)


def test_llama_factory_trains_adapters_on_every_layer(tmp_path: Path) -> None:
    """finetuning_args.py: finetuning_type lora, lora_rank 8, lora_target all; TrainingArguments: 8 sequences."""
    training = spec_of(tmp_path, "a.yaml", LLAMA + "cutoff_len: 1024\nbf16: true\n").training

    assert (training.finetune, training.lora.rank, training.lora.target_modules) == ("lora", 8, "all-linear")
    assert training.micro_batch_size == 8
    assert training.recompute == "full"


def test_axolotl_computes_in_bf16_on_512_tokens(tmp_path: Path) -> None:
    """schemas/config.py: bf16 auto, sequence_len 512."""
    base = "base_model: meta-llama/Meta-Llama-3-8B\nmicro_batch_size: 2\n"
    training = spec_of(tmp_path, "a.yml", base).training

    assert (training.dtype, training.recipe, training.sequence_length) == ("bf16", "pure", 512)
    assert spec_of(tmp_path, "b.yml", base + "fp16: true\n").training.dtype == "fp16"
    assert spec_of(tmp_path, "c.yml", base + "float32: true\n").training.dtype == "fp32"


@pytest.mark.parametrize("name", ["sequence_parallel_degree", "context_parallel_size"])
def test_axolotl_renamed_its_splits_of_the_sequence(name: str, tmp_path: Path) -> None:
    found = imported(tmp_path, "a.yml", f"base_model: x/llama-3-8b\nmicro_batch_size: 1\n{name}: 4\n")

    assert found.blocks["parallelism"]["context_parallel"] == 4


@pytest.mark.parametrize(("value", "stated"), [("true", False), ("offload", True), ("offload_disk", True)])
def test_checkpoints_of_axolotl_that_leave_the_device_are_reported(value: str, stated: bool, tmp_path: Path) -> None:
    text = f"base_model: x/llama-3-8b\nmicro_batch_size: 1\ngradient_checkpointing: {value}\n"
    found = imported(tmp_path, "a.yml", text)

    assert found.blocks["training"]["recompute"] == "full"
    assert any("its checkpoints leave the device" in note for note in found.notes) is stated


def test_trl_has_defaults_of_its_own(tmp_path: Path) -> None:
    """trl/trainer/base_config.py: bf16 and gradient_checkpointing; sft_config.py: 1,024 tokens."""
    ours = spec_of(tmp_path, "a.yaml", LLAMA + "per_device_train_batch_size: 2\nuse_peft: true\n", "framework=sft")
    plain = spec_of(tmp_path, "b.yaml", LLAMA + "per_device_train_batch_size: 2\n", "versions.transformers=v5.23")

    assert (ours.training.dtype, ours.training.recompute, ours.training.sequence_length) == ("bf16", "full", 1024)
    assert (plain.training.dtype, plain.training.recompute, plain.training.sequence_length) == ("bf16", "none", 2048)


def test_the_loss_of_trl_in_chunks_of_256_tokens(tmp_path: Path) -> None:
    text = LLAMA + "per_device_train_batch_size: 2\nmax_length: 4096\nloss_type: chunked_nll\n"
    training = spec_of(tmp_path, "a.yaml", text, "versions.trl=v1.14.2").training

    assert (training.loss, training.loss_chunks) == ("chunked", 2 * 4096 // 256)


@pytest.mark.parametrize(
    ("block", "stage"),
    [
        ("fsdp_sharding_strategy: FULL_SHARD", 3),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", 2),
        ("fsdp_sharding_strategy: 2", 2),
        ("fsdp_sharding_strategy: NO_SHARD", 0),
        ("fsdp_sharding_strategy: HYBRID_SHARD_ZERO2", 2),
        ("fsdp_reshard_after_forward: false", 2),
        ("fsdp_reshard_after_forward: 'false'", 2),
        ("fsdp_version: 2", 3),
    ],
)
def test_what_fsdp_shards(block: str, stage: int, tmp_path: Path) -> None:
    """torch.distributed.fsdp.ShardingStrategy."""
    text = f"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {{{block}}}\n"

    assert spec_of(tmp_path, "a.yaml", text, "preset=gpt2", "b=1").parallelism.zero_stage == stage


def test_hybrid_shards_ask_for_the_number_of_copies(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n"

    assert any("--set data_parallel_replicate=" in note for note in imported(tmp_path, "a.yaml", text).notes)


def test_fields_of_a_block_are_listed_one_by_one(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nmixed_precision: bf16\n"
    text += "fsdp_config: {fsdp_state_dict_type: FULL_STATE_DICT, fsdp_offload_params: false, fsdp_of_tomorrow: 1}\n"
    found = imported(tmp_path, "a.yaml", text)

    assert found.unknown == ("fsdp_config.fsdp_of_tomorrow",)
    assert "fsdp_config.fsdp_offload_params" in [path for path, _, _ in found.mapped]
    assert "fsdp_config.fsdp_state_dict_type" in [path for path, _ in found.no_effect]
    inline = LLAMA + "per_device_train_batch_size: 1\ndeepspeed: {zero_optimization: {stage: 2, of_tomorrow: 1}}\n"
    found = imported(tmp_path, "b.yaml", inline)
    assert found.unknown == ("deepspeed.zero_optimization.of_tomorrow",)
    assert found.blocks["parallelism"]["zero_stage"] == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--bf16", {"intermediate_size": 4 * 4096}),
        ("--bf16 --swiglu", {"intermediate_size": 10_880}),  # 4 * 4096 * 2/3 = 10922.7, 170.7 times 64
        ("--bf16 --swiglu --ffn-hidden-size 11008", {"intermediate_size": 11_008}),
        ("--bf16 --position-embedding-type alibi", {"position_embedding": "none"}),
        ("--bf16 --no-position-embedding", {"position_embedding": "none"}),
        ("--bf16 --no-position-embedding --use-rotary-position-embeddings", {"position_embedding": "rope"}),
    ],
)
def test_sizes_of_megatron(arguments: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """arguments.py, validate_args."""
    model = spec_of(tmp_path, "a.sh", f"python pretrain_gpt.py {GPT}{arguments}").model

    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        ("--checkpoint-activations", "full"),
        ("--activations-checkpoint-method uniform", "full"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full"),
        (f"{BLOCK} 3", (0, 1, 2)),
        (f"{BLOCK} 1 --pipeline-model-parallel-size 2", (0, 4)),  # of each stage of 4 layers the first
        (f"{BLOCK} 1 --pipeline-model-parallel-size 2 {CHUNKS}", (0, 2, 4, 6)),  # of each chunk
    ],
)
def test_recomputation_of_megatron(arguments: str, layers: object, tmp_path: Path) -> None:
    assert spec_of(tmp_path, "a.sh", f"python pretrain_gpt.py {GPT}--bf16 {arguments}").training.recompute == layers


def test_experts_of_megatron(tmp_path: Path) -> None:
    """As wide as the dense layers where nothing is said; every second layer from the first."""
    text = f"python pretrain_gpt.py {GPT}--bf16 --num-experts 4 --moe-layer-freq 2 --moe-expert-capacity-factor 1.25"
    moe = spec_of(tmp_path, "a.sh", text).model.moe

    assert moe.expert_intermediate_size == 4 * 4096
    assert moe.dense_layers == (1, 3, 5, 7)
    assert [path for path, _ in imported(tmp_path, "a.sh", text).not_modelled] == ["moe-expert-capacity-factor"]
    pattern = imported(tmp_path, "b.sh", text.replace("freq 2", "freq ([0]*1+[1]*7)"))
    assert any("--set model.moe.first_dense_layers=" in note for note in pattern.notes)


def test_deepseek_v2_lite_from_megatrons_arguments(tmp_path: Path) -> None:
    """As large as its config.json says: 15.7 B parameters (arXiv 2405.04434, appendix B)."""
    text = (
        "python pretrain_gpt.py --num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944 "
        "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 102400 --micro-batch-size 1 --bf16 --swiglu "
        "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 "
        "--multi-latent-attention --kv-lora-rank 512 --normalization RMSNorm --position-embedding-type rope "
        "--disable-bias-linear --untie-embeddings-and-output-weights\n"
    )
    spec = spec_of(tmp_path, "a.sh", text, "model.moe.first_dense_layers=1")

    assert memcalc.estimate(spec).parameters == memcalc.estimate("deepseek-v2-lite").parameters


def test_a_jobs_script_is_a_script(tmp_path: Path) -> None:
    """Megatron-DeepSpeed's, as a job of Slurm."""
    text = f"#SBATCH --nodes=2\npython pretrain_gpt.py {GPT}--bf16 --deepspeed --zero-stage 1 --checkpoint-activations"
    found = imported(tmp_path, "train.slurm", text)

    assert found.blocks["parallelism"]["zero_stage"] == 1
    assert found.blocks["training"]["recompute"] == "full"
    assert found.blocks["parallelism"]["engine"] == "deepspeed"


def test_the_launcher_before_the_program(tmp_path: Path) -> None:
    text = f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {GPT}--bf16 --tensor-model-parallel-size 4"

    assert spec_of(tmp_path, "a.sh", text).parallelism.data_parallel == 4


def test_nemo_lists_what_its_table_does_not_have(tmp_path: Path) -> None:
    """Nothing of the model is taken to have no effect unless the table says so."""
    text = "model: {encoder_seq_length: 512, of_tomorrow: 1, fsdp: true, optim: {lr: 1.0}}\n"
    found = imported(tmp_path, "a.yaml", text)

    assert found.unknown == ("model.of_tomorrow",)
    assert [path for path, _ in found.not_modelled] == ["model.fsdp"]


TITAN = """\
model = {name = "llama3", flavor = "8B"}
training = {local_batch_size = 8, seq_len = 2048, dtype = "DTYPE"}
parallelism = {data_parallel_shard_degree = 4, pipeline_parallel_degree = STAGES, of_tomorrow = 1}
"""


def test_weights_of_torchtitan_in_16_bits(tmp_path: Path) -> None:
    def written(dtype: str) -> Any:
        return spec_of(tmp_path, "a.toml", TITAN.replace("DTYPE", dtype).replace("STAGES", "1")).training

    assert written("float32").recipe == "amp"
    assert written("bfloat16").recipe == "pure"


def test_a_pipeline_of_torchtitan_cuts_the_local_batch(tmp_path: Path) -> None:
    """pipeline_parallel_microbatch_size is 1 where nothing is said: 8 sequences are 8 micro-batches."""
    text = TITAN.replace("DTYPE", "float32").replace("STAGES", "2")
    found = imported(tmp_path, "a.toml", text)

    assert found.blocks["training"]["micro_batch_size"] == 1
    assert found.blocks["training"]["gradient_accumulation_steps"] == 8
    assert found.unknown == ("parallelism.of_tomorrow",)


STAGED = TITAN.replace("DTYPE", "float32").replace("STAGES", "4").replace(", of_tomorrow = 1", ", FIELDS")


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        # The embedding and the LM head count as a layer each: 34 of them are 9, 9, 8 and 8.
        ("data_parallel_replicate_degree = 1", [8, 9, 8, 7]),
        (
            "pipeline_parallel_first_stage_less_layers = 0, pipeline_parallel_last_stage_less_layers = 0",
            [8, 8, 8, 8],
        ),
        # Eight chunks: 5, 5, and six of 4, of which each stage has every fourth.
        ('pipeline_parallel_schedule = "Interleaved1F1B"', [4 + 4, 5 + 4, 4 + 4, 4 + 3]),
    ],
)
def test_torchtitan_splits_a_pipeline(fields: str, layers: list[int], tmp_path: Path) -> None:
    """distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part."""
    spec = spec_of(tmp_path, "a.toml", STAGED.replace("FIELDS", fields))

    assert [stage.layers for stage in stages_of(spec)] == layers
    assert not spec.origin.limits


def test_an_uneven_pipeline_of_torchtitan_is_a_limit(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "a.toml", STAGED.replace("FIELDS", "pipeline_parallel_first_stage_less_layers = 2"))

    assert [limit.feature for limit in spec.origin.limits] == ["an uneven pipeline split"]


def test_a_pipeline_of_torchtitan_keeps_its_logits(tmp_path: Path) -> None:
    """The schedule's cache references them, so `del pred` is in the other branch of train.py."""
    spec = spec_of(tmp_path, "a.toml", STAGED.replace("FIELDS", "data_parallel_replicate_degree = 1"))

    assert (spec.training.implementation, spec.training.logits_until) == ("torchtitan", "backward")
    assert not any("logits_until" in note for note in memcalc.estimate(spec).notes)


@pytest.mark.parametrize("ranks", ["gpus=8", "data_parallel=1"])
def test_torchtitan_has_no_fsdp_over_one_rank(ranks: str, tmp_path: Path) -> None:
    """Eight GPUs of two stages and four tensor-parallel ranks: what FSDP2 would shard and cast stays in fp32."""
    parallelism = "data_parallel_shard_degree = -1\ntensor_parallel_degree = 4\npipeline_parallel_degree = 2"
    spec = spec_of(tmp_path, "run.toml", LLAMA_TITAN + parallelism + "\n", ranks)

    low = spec_of(
        tmp_path,
        "low.toml",
        '[training]\ndtype = "bfloat16"\n'.join(LLAMA_TITAN.split("[training]\n")) + parallelism + "\n",
        ranks,
    )

    assert (low.training.dtype, low.training.recipe) == ("bf16", "pure")  # weights in 16 bits are not cast
    assert (spec.training.dtype, spec.training.recipe, spec.parallelism.zero_stage) == ("fp32", "fp32", 0)
    assert spec.training.attention == "math"  # models/attention.py has no other kernel for it


def test_torchtitan_in_fp32_has_no_fused_attention(tmp_path: Path) -> None:
    text = LLAMA_TITAN.replace("seq_len = 8192", 'seq_len = 8192\nmixed_precision_param = "float32"')
    spec = spec_of(tmp_path, "run.toml", text, "data_parallel=8")

    assert (spec.training.dtype, spec.training.attention) == ("fp32", "math")


@pytest.mark.parametrize("ranks", [(), ("gpus=1",), ("gpus=8",)])
def test_replicas_of_torchtitan_without_shards_are_ddp(ranks: tuple[str, ...], tmp_path: Path) -> None:
    """apply_ddp: buckets of 100 MiB; a file that does not say how many GPUs there are runs on one."""
    degrees = "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n" if "gpus=8" in ranks else ""
    spec = spec_of(tmp_path, "run.toml", LLAMA_TITAN + degrees, *ranks)
    training, parallelism = spec.training, spec.parallelism

    assert (training.implementation, training.recipe, training.recompute) == ("torchtitan", "amp", "selective")
    assert (parallelism.engine, parallelism.zero_stage, parallelism.bucket_cap_mb) == ("ddp", 0, 100)
    assert parallelism.data_parallel == (8 if degrees else 1)


@pytest.mark.parametrize(("chunk", "schedule", "virtual"), [(4, "1f1b", 1), (2, "interleaved", 2)])
def test_a_virtual_stage_of_megatron_that_is_a_whole_stage(
    chunk: int, schedule: str, virtual: int, tmp_path: Path
) -> None:
    """8 layers on 2 stages are 4 layers per stage; Megatron-LM training/arguments.py: one virtual stage is none."""
    text = f"python pretrain_gpt.py {GPT}--bf16 --pipeline-model-parallel-size 2 --global-batch-size 2"
    parallelism = spec_of(tmp_path, "a.sh", f"{text} --num-layers-per-virtual-pipeline-stage {chunk}").parallelism

    assert (parallelism.schedule, parallelism.virtual_stages) == (schedule, virtual)


def test_litgpt_over_several_gpus(tmp_path: Path) -> None:
    """Fine-tuning checkpoints each block, pretraining none and copies its shards over nodes."""
    rest = "train: {micro_batch_size: 1, global_batch_size: 32}\ndevices: 8\n"
    tuned = imported(tmp_path, "a.yaml", f"checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B\n{rest}").blocks
    trained = imported(tmp_path, "b.yaml", f"model_name: Llama-3-8B\nnum_nodes: 2\n{rest}").blocks

    assert (tuned["parallelism"]["zero_stage"], tuned["training"]["recompute"]) == (3, "full")
    assert "recompute" not in trained["training"]
    assert trained["parallelism"]["data_parallel_replicate"] == 2


def test_deepspeeds_16_bit_copies_are_reported(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true, '
    text += '"bf16_master_weights_and_grads": true}, "data_types": {"grad_accum_dtype": "fp32"}}'
    found = imported(tmp_path, "ds.json", text)

    assert [path for path, _ in found.not_modelled] == ["bf16.bf16_master_weights_and_grads"]
    assert found.blocks["training"]["gradient_dtype"] == "fp32"


@pytest.mark.parametrize(
    "arguments",
    [
        f"{BLOCK} 99999999999 --pipeline-model-parallel-size 0",
        "--tensor-model-parallel-size 0 --nproc-per-node 8 --nnodes 1",
        "--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 0",
        "--num-layers 99999999999999 --num-experts 4 --moe-layer-freq 2",
        "--attention-dropout none",
        "--num-layers abc --num-experts 4 --moe-layer-freq 0",
    ],
)
def test_sizes_of_megatron_that_cannot_be(arguments: str, tmp_path: Path) -> None:
    """Refused by our rules, not by arithmetic; nothing is counted layer by layer."""
    with pytest.raises(InputError):
        spec_of(tmp_path, "a.sh", f"python pretrain_gpt.py {GPT}--bf16 {arguments}")


def test_litgpt_pretrains_with_fused_adamw_and_clips(tmp_path: Path) -> None:
    """litgpt/pretrain.py; the fine-tuning programs have neither, and one sequence in a forward."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_name: llama-3-8b\nprecision: bf16-mixed\ndevices: 1\ntrain: {global_batch_size: 8, max_norm: 1.0}\n"
    )
    pretrains = load(path).training
    path.write_text("checkpoint_dir: llama-3-8b\nprecision: bf16-true\ndevices: 1\ntrain: {global_batch_size: 8}\n")
    tunes = load(path).training

    assert (pretrains.optimizer_implementation, pretrains.gradient_clipping, pretrains.micro_batch_size) == (
        "fused",
        1.0,
        4,
    )
    assert (tunes.optimizer_implementation, tunes.gradient_clipping, tunes.micro_batch_size) == ("foreach", None, 1)
    assert any("assuming at most 2,048" in note for note in load(path).origin.notes)


def test_litgpt_has_bases_in_8_bits(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "checkpoint_dir: llama-3-8b\nquantize: bnb.int8\ndevices: 1\nlora_query: true\ntrain: {max_seq_length: 512}\n"
    )
    spec = load(path)

    assert (spec.training.finetune, spec.training.lora and spec.training.lora.rank) == ("lora", 8)
    assert any("not modelled: a base in int8" in note for note in spec.origin.notes)


LLAMA_TITAN = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n[parallelism]\n'
)


@pytest.mark.parametrize(
    ("parallelism", "overrides", "expected"),
    [
        # shards over what replicas leave
        ("data_parallel_replicate_degree = 2", ("data_parallel=16",), {"parallelism.data_parallel_replicate": 2}),
        # norms and dropout along the sequence, and a loss over parts of the vocabulary, wherever tensors are split
        (
            "tensor_parallel_degree = 4",
            ("data_parallel=8",),
            {"parallelism.sequence_parallel": True, "training.loss": "vocab-parallel", "training.recipe": "amp"},
        ),
        (
            "tensor_parallel_degree = 4\ndisable_loss_parallel = true",
            ("data_parallel=8",),
            {"parallelism.sequence_parallel": True, "training.loss": "materialized"},
        ),
        # autocast where FSDP does not cast
        ("data_parallel_shard_degree = 1", (), {"training.recipe": "amp", "parallelism.zero_stage": 0}),
        (
            "data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 4",
            (),
            {"training.recipe": "amp", "parallelism.data_parallel": 4, "parallelism.engine": "ddp"},
        ),
        (
            "data_parallel_shard_degree = 1\ntensor_parallel_degree = 8",
            (),
            {"training.recipe": "fp32", "training.dtype": "fp32"},
        ),
    ],
)
def test_torchtitan_by_its_parallelism(
    parallelism: str, overrides: tuple[str, ...], expected: dict[str, Any], tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, "run.toml", LLAMA_TITAN + parallelism + "\n", *overrides)

    for field, value in expected.items():
        block, name = field.split(".")
        assert getattr(getattr(spec, block), name) == value, field


EXPERT_TITAN = LLAMA_TITAN.replace('name = "llama3"', 'name = "{}"').replace('flavor = "8B"', 'flavor = "{}"')


@pytest.mark.parametrize(
    ("name", "flavor", "architecture"),
    [
        ("qwen3", "30B-A3B", "qwen3_moe"),
        ("deepseek_v3", "16B", "deepseek_v2"),
        ("deepseek_v3", "671B", "deepseek_v3"),
        ("llama4", "17bx16e", "llama4_text"),
        ("llama4", "17bx128e", "llama4_text"),
    ],
)
def test_torchtitan_has_experts_of_its_own(name: str, flavor: str, architecture: str, tmp_path: Path) -> None:
    """expert_tensor_parallel_degree is 1 where nothing is said, and means nothing without expert parallelism."""
    text = EXPERT_TITAN.format(name, flavor) + "tensor_parallel_degree = 4\n"
    alone = spec_of(tmp_path, "a.toml", text + "expert_tensor_parallel_degree = 1\n", "data_parallel=8")
    spread = spec_of(tmp_path, "a.toml", text + "expert_parallel_degree = 8\n", "data_parallel=8")

    assert alone.model.architecture == architecture
    assert {alone.training.implementation, spread.training.implementation} == {"torchtitan"}
    assert (alone.parallelism.expert_parallel, alone.parallelism.expert_width_ranks) == (1, 4)
    assert (spread.parallelism.expert_parallel, spread.parallelism.expert_width_ranks) == (8, 1)


def test_torchtitans_deepep_is_a_limit(tmp_path: Path) -> None:
    text = EXPERT_TITAN.format("qwen3", "30B-A3B") + "expert_parallel_degree = 8\n{}\n"
    kinds = {}
    for kind in ("standard", "deepep"):
        spec = spec_of(tmp_path, "a.toml", text.format(f'expert_parallel_comm_backend = "{kind}"'), "data_parallel=8")
        kinds[kind] = [limit.feature for limit in spec.origin.limits]

    assert kinds == {"standard": [], "deepep": ["DeepEP's exchange of tokens"]}


def test_checkpointing_by_operator_has_no_note_on_small_savings(tmp_path: Path) -> None:
    notes = memcalc.estimate(spec_of(tmp_path, "run.toml", LLAMA_TITAN, "data_parallel=8")).notes

    assert not any("saves little" in note for note in notes)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_torchtune_shards_bases_below_adapters(kind: str, tmp_path: Path) -> None:
    """recipes/lora_finetune_distributed.py: FSDP2 as for a full model, over as many GPUs as are said."""
    text = TORCHTUNE.replace("lora_llama3_1_8b", f"{kind}_llama3_1_8b").replace(
        "bitsandbytes.optim.PagedAdamW8bit", "torch.optim.AdamW"
    )
    spec = spec_of(tmp_path, "run.yaml", text, "data_parallel=8")

    assert (spec.training.finetune, spec.parallelism.zero_stage, spec.parallelism.engine) == (kind, 3, "fsdp2")


FACTORY = LLAMA + "cutoff_len: 1024\nper_device_train_batch_size: 1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("finetuning_type: full\npure_bf16: true\n", {"dtype": "bf16", "recipe": "pure"}),
        ("finetuning_type: full\n", {"dtype": "fp32", "recipe": "fp32"}),  # cast up, and nothing casts down
        ("finetuning_type: lora\n", {"dtype": "bf16", "recipe": "pure", "adapter_dtype": "fp32"}),
        ("finetuning_type: lora\npure_bf16: true\n", {"dtype": "bf16", "recipe": "pure", "adapter_dtype": "fp32"}),
        ("finetuning_type: lora\nbf16: true\n", {"dtype": "bf16", "recipe": "amp", "adapter_dtype": "fp32"}),
        ("finetuning_type: full\nbf16: true\nuse_muon: true\n", {"optimizer": "muon", "recipe": "amp"}),
    ],
)
def test_precisions_of_llama_factory(text: str, expected: dict[str, str], tmp_path: Path) -> None:
    training = spec_of(tmp_path, "run.yaml", FACTORY + text).training

    for name, value in expected.items():
        assert getattr(training.lora if name == "adapter_dtype" else training, name) == value, name


def test_adapters_of_trl(tmp_path: Path) -> None:
    """ModelConfig's rank, PEFT's layers, scales that are not quantized again, and adapters in bf16 above 4 bits."""
    text = LLAMA + "per_device_train_batch_size: 1\nmax_length: 1024\nuse_peft: true\ndtype: bfloat16\nbf16: true\n"
    lora = spec_of(tmp_path, "run.yaml", text, "framework=sft").training
    qlora = spec_of(tmp_path, "run.yaml", text + "load_in_4bit: true\nlora_r: 8\n", "framework=sft").training

    assert (lora.lora.rank, lora.lora.dropout, lora.lora.adapter_dtype) == (16, 0.05, "fp32")
    assert lora.lora.target_modules == ("q_proj", "v_proj")
    assert (qlora.lora.rank, qlora.lora.adapter_dtype, qlora.qlora.double_quantization) == (8, "compute", False)
    gpt = spec_of(tmp_path, "run.yaml", text.replace(LLAMA, "model_name_or_path: gpt2\n")).training
    assert gpt.lora.target_modules == ("qkv_proj",)


SCRIPT = "python pretrain_gpt.py --bf16 --num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
SCRIPT += "--max-position-embeddings 64 --micro-batch-size 1 --tensor-model-parallel-size 8 "


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ("--vocab-size 50257", 51200),  # 128 for each of 8 ranks
        ("--vocab-size 50257 --make-vocab-size-divisible-by 1", 50264),
        ("--vocab-size 51200", 51200),
        ("--padded-vocab-size 50264", 50264),
        ("--vocab-size 51200 --tokenizer-type NullTokenizer", 52224),  # and an end
        ("--tokenizer-type GPT2BPETokenizer --vocab-file $VOCABULARY", 51200),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER}", 32768),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B-Instruct", 129024),
    ],
)
def test_megatrons_vocabulary_is_padded_for_its_ranks(more: str, rows: int, tmp_path: Path) -> None:
    assert spec_of(tmp_path, "run.sh", SCRIPT + more + "\n").model.vocab_size == rows


def test_a_tokenizer_that_the_script_leaves_open_is_asked_for_by_its_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(missing vocab_size\)"):
        spec_of(tmp_path, "run.sh", SCRIPT + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model ${MODEL}\n")


def test_nemos_vocabulary_is_padded_for_its_ranks(tmp_path: Path) -> None:
    text = NEMO.replace(
        "  megatron_amp_O2", "  tokenizer: {library: megatron, type: GPT2BPETokenizer}\n  megatron_amp_O2"
    )
    found = spec_of(tmp_path, "run.yaml", text)

    assert found.model.vocab_size == 50688  # 128 for each of 4 ranks
    assert any("the vocabulary is that of GPT2BPETokenizer, padded to 50,688" in note for note in found.origin.notes)


def test_deepspeeds_batch_is_one_step_where_nothing_else_is_said(tmp_path: Path) -> None:
    """runtime/config.py: a batch alone is dealt out to the GPUs, in one forward each."""
    text = '{"train_batch_size": 64, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    given = ("preset=gpt2", "data_parallel=8", "s=128")
    alone = spec_of(tmp_path, "run.json", text, *given)
    cut = spec_of(tmp_path, "run.json", text, *given, "b=2")

    assert (alone.training.micro_batch_size, alone.training.gradient_accumulation_steps) == (8, 1)
    assert (cut.training.micro_batch_size, cut.training.gradient_accumulation_steps) == (2, 4)
    assert not any("sequences per forward" in note for note in alone.origin.notes)
    assert any("no optimizer in the DeepSpeed config; assuming adamw" in note for note in alone.origin.notes)


def test_optimizers_of_deepspeed_that_compress_are_reported(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "OneBitLamb"}}'
    spec = spec_of(tmp_path, "run.json", text, "preset=gpt2", "data_parallel=8", "s=128")

    assert spec.training.optimizer == "lamb"
    assert any("the compression errors" in note for note in spec.origin.notes)


def test_settings_in_accelerates_script_are_reported(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n"
    given = ("preset=gpt2", "b=1", "s=128")
    notes = " ".join(spec_of(tmp_path, "run.yaml", text, *given).origin.notes)
    quiet = " ".join(spec_of(tmp_path, "run.yaml", text, *given, "recipe=pure", "optimizer=sgd").origin.notes)

    assert "assuming adamw" in notes
    assert "loads fp32 weights" in notes
    assert "the script" not in quiet


def test_gpt_neoxs_own_tokenizer_says_its_vocabulary(tmp_path: Path) -> None:
    text = GPT_NEOX.replace(
        '"a_field_of_tomorrow": 3,', '"vocab-file": "data/20B_tokenizer.json", "tokenizer-type": "HFTokenizer"'
    )

    assert spec_of(tmp_path, "20B.yml", text).model.vocab_size == 50432  # 128 for each of 2 ranks


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ("--fp16", "fp16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", None),  # the recipe's: fp32
        ("--bf16", None),
        ("--bf16 --grad-reduce-in-bf16", "bf16"),
    ],
)
def test_what_megatron_sums_gradients_in(more: str, dtype: str | None, tmp_path: Path) -> None:
    text = SCRIPT.replace("--bf16", more) + "--vocab-size 1024\n"

    assert spec_of(tmp_path, "run.sh", text).training.gradient_dtype == dtype


def test_words_of_nemos_launcher(tmp_path: Path) -> None:
    """Products of other fields, the dtype that gradients are summed in, and blocks that are what is counted anyway."""
    text = NEMO.replace(
        "ffn_hidden_size: 3072", "ffn_hidden_size: ${multiply:4, ${.hidden_size}}\n  transformer_block_type: pre_ln"
    )
    text = text.replace("    lr: 2e-4", "    grad_sync_dtype: bf16")
    found = imported(tmp_path, "run.yaml", text)

    assert found.blocks["model"]["intermediate_size"] == 3072
    assert found.blocks["training"]["gradient_dtype"] == "bf16"
    assert found.not_modelled == ()
    post = imported(tmp_path, "run.yaml", text.replace("pre_ln", "normformer"))
    assert any("blocks of type normformer" in note for note in post.notes)


def test_deepspeeds_file_is_looked_for_where_programs_are_started(tmp_path: Path) -> None:
    """`deepspeed: examples/deepspeed/...` is seen from the repository's root; its optimizer overrides the Trainer's."""
    inner = tmp_path / "examples" / "train_full"
    inner.mkdir(parents=True)
    text = FACTORY + "finetuning_type: full\nbf16: true\ndeepspeed: examples/deepspeed/z3_offload.json\n"
    given = ("data_parallel=8",)
    named = spec_of(inner, "run.yaml", text, *given)
    (tmp_path / "examples" / "deepspeed").mkdir()
    (tmp_path / "examples" / "deepspeed" / "z3_offload.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}'
    )
    read = spec_of(inner, "run.yaml", text, *given)
    (tmp_path / "examples" / "deepspeed" / "z3_offload.json").write_text(
        '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lion"}}'
    )
    lion = spec_of(inner, "run.yaml", text, *given)

    assert (named.parallelism.zero_stage, named.parallelism.offload) == (3, "none")
    assert any("may offload" in note for note in named.origin.notes)
    assert (read.parallelism.zero_stage, read.parallelism.offload) == (3, "all")
    assert (lion.parallelism.zero_stage, lion.training.optimizer) == (2, "lion")


def test_accelerate_leaves_precision_and_batch_to_deepspeeds_file(tmp_path: Path) -> None:
    """As its own templates do: nothing is said of precision beside the file's name."""
    (tmp_path / "zero1.json").write_text(
        '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2, '
        '"gradient_accumulation_steps": 4}'
    )
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero1.json}\nnum_processes: 2\n"
    spec = spec_of(tmp_path, "run.yaml", text, "preset=gpt2", "s=128")

    assert (spec.training.dtype, spec.training.recipe, spec.parallelism.zero_stage) == ("fp16", "mixed-16", 1)
    assert (spec.training.micro_batch_size, spec.training.gradient_accumulation_steps) == (2, 4)


def test_training_arguments_without_a_batch_size_have_eight_sequences(tmp_path: Path) -> None:
    """transformers/training_args.py, per_device_train_batch_size; TRL's configs keep it."""
    spec = spec_of(tmp_path, "a.yaml", LLAMA + "output_dir: out\nmax_length: 1024\nbf16: true\n")

    assert (spec.training.framework, spec.training.micro_batch_size) == ("trainer", 8)


@pytest.mark.parametrize("model", [LLAMA + "output_dir: out\n", "base_model: gpt2\nmicro_batch_size: 1\n"])
def test_bf16_and_fp16_together_are_refused(model: str, tmp_path: Path) -> None:
    """TrainingArguments.__post_init__ refuses both, and axolotl hands them on."""
    with pytest.raises(InputError, match=r"bf16 and fp16 are both true\. Set one of them\."):
        spec_of(tmp_path, "a.yaml", model + "bf16: true\nfp16: true\n")


def test_switches_are_listed_once_in_a_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Choose from false, offload, true, unsloth, or set"):
        spec_of(tmp_path, "a.yaml", LLAMA + "per_device_train_batch_size: 1\ngradient_checkpointing: perhaps\n")


@pytest.mark.parametrize(
    ("name", "text", "model"),
    [
        ("a.toml", '[model]\nname = "llama3"\nflavor = "9B"\n[training]\nseq_len = 128\n', "llama3 9b"),
        ("b.yaml", TORCHTUNE.replace("llama3_1_8b", "llama9_8b"), "lora_llama9_8b"),
        ("c.yml", "base_model: nothing-known\nmicro_batch_size: 1\n", "nothing-known"),
    ],
)
def test_a_model_that_is_not_known_is_named(name: str, text: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"names the model '{model}', which memcalc does not know .missing num_layers"):
        spec_of(tmp_path, name, text)


def test_launched_gpus_that_no_copy_of_the_model_divides_are_refused(tmp_path: Path) -> None:
    """32 GPUs are not a multiple of tensor 4 x pipeline 3 = 12; 36 are three copies."""
    sizes = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 3 --num-layers 9 --nnodes 4"
    command = f"torchrun --nproc_per_node {{}} pretrain_gpt.py {GPT} {sizes}".replace("--num-layers 8 ", "")
    with pytest.raises(InputError, match=r"GPUs launched: 32, which is not a multiple of tensor x pipeline x"):
        spec_of(tmp_path, "a.sh", command.format(8))

    assert spec_of(tmp_path, "b.sh", command.format(9)).parallelism.data_parallel == 3
    assert spec_of(tmp_path, "a.sh", command.format(8), "data_parallel=2").parallelism.data_parallel == 2
    assert spec_of(tmp_path, "a.sh", command.format(8), "pipeline_parallel=1").parallelism.data_parallel == 8
