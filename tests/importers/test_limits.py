"""What files of frameworks ask for and the estimate does not count: each is a limit, and says whether it holds memory."""

import re
from pathlib import Path

import pytest

from memcalc.errors import InputError
from memcalc.estimation.limits import limits_of, resolved
from memcalc.importers import axolotl, llama_factory, trl
from memcalc.importers.file_format import FileFormat
from memcalc.importers.loading import load
from memcalc.importers.registry import FRAMEWORKS
from memcalc.layout.parameters import count_parameters
from memcalc.simulation.simulated_run import unsupported_reason
from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec
from memcalc.verdict.judge import judge

FOLDER = Path(trl.__file__).parent
LLAMA = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 2\nbf16: true\n"
DPO = LLAMA + "beta: 0.1\nmax_length: 1024\n"
FACTORY = LLAMA + "cutoff_len: 1024\nstage: dpo\n"
AXOLOTL = "base_model: meta-llama/Meta-Llama-3-8B\nsequence_len: 1024\nmicro_batch_size: 2\ndatasets: []\n"
AXOLOTL += "flash_attention: true\n"
INT4 = "qat:\n  activation_dtype: int8\n  weight_dtype: int4\n"
REFERENCE = "the reference model"


def loaded(folder: Path, text: str, *overrides: str, name: str = "run.yaml") -> Spec:
    """A run of a framework's file."""
    (folder / name).write_text(text)
    return load(folder / name, overrides)


def limits(spec: Spec) -> dict[str, Limit]:
    """Return the limits of a run by feature."""
    return {limit.feature: resolved(spec, limit) for limit in spec.origin.limits}


def holding(spec: Spec) -> set[str]:
    """Return the limits that need memory which is not counted."""
    return {what for what, limit in limits(spec).items() if limit.holds_memory}


def test_every_sentence_of_that_kind_comes_from_a_limit() -> None:
    """Only `Draft.limit`, the field tables and rejected candidates write "not modelled: ": a sentence alone would change no verdict."""
    paths = [*FOLDER.glob("*.py"), *(FOLDER.parent / "frameworks").glob("*.py")]
    writers = {path.name for path in paths if re.search(r"[\"']not modelled: ", path.read_text())}

    assert writers == {"assumptions.py", "draft.py", "field_tables.py"}


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_fields_that_are_not_modelled_say_whether_they_hold_memory(framework: FileFormat) -> None:
    """Fields without a separate limit are TRL's and axolotl's, where the trainer decides what exists."""
    without = {
        path for path, meaning in framework.fields.items() if meaning.kind == "not modelled" and meaning.limit is None
    }

    known = {path for fields in (trl.FIELDS, axolotl.FIELDS) for path in fields}
    assert without <= known
    assert framework.name in ("axolotl", "LLaMA-Factory", "Hugging Face TrainingArguments") or without == set()


def test_the_reference_model_of_dpo_holds_the_weights_once_more(tmp_path: Path) -> None:
    spec = loaded(tmp_path, DPO)

    assert (spec.training.pairs, spec.training.reference_model) == (True, True)
    assert holding(spec) == set()
    assert holding(loaded(tmp_path, DPO + "ref_model_init_kwargs: {dtype: float32}\n")) == {REFERENCE}  # of its own


def test_its_dtype_and_its_shards_are_those_of_the_run(tmp_path: Path) -> None:
    """Of KTO, which is not estimated: at least the frozen copy, which FSDP shards in fp32."""
    kto = DPO.replace("beta: 0.1", "desirable_weight: 1.5")
    pure, sharded = (
        loaded(tmp_path, kto + "dtype: bfloat16\n"),
        loaded(tmp_path, kto + "fsdp: full_shard\n", "data_parallel=8"),
    )
    count = count_parameters(pure.model)

    assert limits(pure)[REFERENCE].at_least_bytes == 2 * count
    assert limits(load(pure, ("recipe=amp",)))[REFERENCE].at_least_bytes == 4 * count
    assert limits(sharded)[REFERENCE].at_least_bytes == 4 * count // 8
    assert limits(loaded(tmp_path, kto, "zero_stage=2", "data_parallel=8"))[REFERENCE].at_least_bytes == 2 * count


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("use_peft: true\n", set()),  # adapters are switched off in its place
        ("precompute_ref_log_probs: true\n", set()),
        ("loss_type: simpo\n", set()),
        ("loss_type: ipo\n", set()),
        ("num_generations: 8\n", set()),  # GRPO
        ("num_generations: 8\nuse_vllm: true\n", {"vLLM on the GPUs that train"}),
        ("num_generations: 8\nuse_vllm: true\nvllm_mode: server\n", set()),
        ("num_generations: 8\nreward_funcs: [org/reward-model]\n", {"a reward model"}),
        (
            "num_generations: 8\nsteps_per_generation: 2\ngradient_accumulation_steps: 4\n",
            {"generation between micro-batches"},
        ),
        ("torch_compile: true\n", set()),  # its interval has the errors of compiled runs
        ("torch_compile: true\ntorch_compile_mode: reduce-overhead\n", {"CUDA graphs"}),
    ],
)
def test_what_trls_trainers_hold_beside_the_policy(more: str, expected: set[str], tmp_path: Path) -> None:
    assert holding(loaded(tmp_path, DPO + more)) == expected


@pytest.mark.parametrize("sharding", ["fsdp: full_shard", "deepspeed: {zero_optimization: {stage: 3}}"])
def test_generation_with_sharded_weights_is_not_counted(sharding: str, tmp_path: Path) -> None:
    spec = loaded(tmp_path, f"{DPO}num_generations: 8\n{sharding}\n", "data_parallel=2")

    assert holding(spec) == {"generation with sharded weights"}
    assert spec.training.completion_length is None


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_generates_with_whole_weights_below_stage_3(stage: int, tmp_path: Path) -> None:
    text = f"{DPO}num_generations: 8\ndeepspeed: {{zero_optimization: {{stage: {stage}}}}}\n"
    spec = loaded(tmp_path, text, "data_parallel=2")

    assert holding(spec) == set()
    assert spec.training.completion_length == 256  # trl/trainer/grpo_config.py, max_completion_length
    assert unsupported_reason(spec) == ""


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("desirable_weight: 1.5", {REFERENCE, "pairs of sequences"}),  # KTO
        ("center_rewards_coefficient: 0.01", set()),
        ("reward_model_path: another", {"reinforcement learning"}),  # PPO
        ("teacher_model_name_or_path: another", {"a teacher model"}),
        ("cast_lm_head_to_fp32: true", {"a head in fp32"}),
    ],
)
def test_fields_of_trls_other_trainers(field: str, expected: set[str], tmp_path: Path) -> None:
    assert holding(loaded(tmp_path, DPO.replace("beta: 0.1", field))) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", set()),
        ("--num-experts 4 --moe-expert-capacity-factor 1.25", set()),  # no more rows than so, and balanced are fewer
        (
            "--num-experts 4 --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
            {"expert inputs padded to a capacity"},
        ),
        ("--num-experts 4 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", set()),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", set()),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            {"several layers in one checkpoint segment"},
        ),
        ("--optimizer-cpu-offload --distribute-saved-activations", set()),
        ("--enable-cuda-graph --mtp-num-layers 1", {"CUDA graphs", "multi-token prediction"}),
        ("--attention-backend unfused", set()),
        ("--attention-backend unfused --num-experts 4", {"unfused attention"}),
        ("--transformer-impl local --no-masked-softmax-fusion", set()),
        (
            "--transformer-impl local --no-masked-softmax-fusion --attention-softmax-in-fp32",
            {"the softmax of attention in fp32"},
        ),
    ],
)
def test_what_megatrons_arguments_ask_for(arguments: str, expected: set[str], tmp_path: Path) -> None:
    text = f"python pretrain_gpt.py --num-layers 2 --hidden-size 128 --num-attention-heads 2 --bf16 {arguments}\n"
    spec = loaded(tmp_path, text, "vocab_size=512", "sequence_length=64", "max_position_embeddings=64", name="run.sh")

    assert holding(spec) == expected


def test_megatron_in_fp32_attends_in_separate_operators(tmp_path: Path) -> None:
    text = "python pretrain_gpt.py --num-layers 2 --hidden-size 128 --num-attention-heads 2 --vocab-size 512"
    spec = loaded(tmp_path, text, "sequence_length=64", name="run.sh")

    assert (spec.training.dtype, spec.training.recipe, spec.training.attention) == ("fp32", "fp32-main", "eager")
    assert holding(spec) == set()
    assert holding(loaded(tmp_path, f"{text} --num-experts 4", "sequence_length=64", name="run.sh")) == {
        "unfused attention",
        "Megatron-LM in fp32",
    }


@pytest.mark.parametrize(
    ("arguments", "attention", "step"),
    [
        ("--bf16", "flash", "fused"),
        ("--bf16 --attention-backend unfused", "eager", "fused"),
        ("--bf16 --transformer-impl local", "eager", "fused"),
        ("--bf16 --transformer-impl local --no-gradient-accumulation-fusion", "eager", "foreach"),
        ("--bf16 --deepspeed --nproc_per_node 2 --nnodes 1", "eager", "fused"),
        ("--bf16 --deepspeed --use-flash-attn --nproc_per_node 2 --nnodes 1", "flash", "fused"),
    ],
)
def test_which_of_megatrons_modules_attend(arguments: str, attention: str, step: str, tmp_path: Path) -> None:
    text = "python pretrain_gpt.py --num-layers 2 --hidden-size 128 --num-attention-heads 2 --vocab-size 512 "
    training = loaded(tmp_path, text + arguments, "sequence_length=64", name="run.sh").training

    assert (training.attention, training.optimizer_implementation) == (attention, step)


def test_sft_holds_nothing_beside(tmp_path: Path) -> None:
    assert holding(loaded(tmp_path, LLAMA + "max_length: 1024\npacking: true\nbeta:\n")) == set()
    assert holding(loaded(tmp_path, DPO.replace("beta: 0.1", "num_generations: 8\nbeta: 0.0"))) == set()


@pytest.mark.parametrize(
    ("more", "reference"),
    [
        ("finetuning_type: full\n", True),
        ("finetuning_type: lora\n", False),
        ("finetuning_type: full\npref_loss: orpo\n", False),
        ("finetuning_type: full\nref_model: another\n", False),  # stated as another model, of no known size
    ],
)
def test_stages_of_llama_factory(more: str, reference: bool, tmp_path: Path) -> None:
    spec = loaded(tmp_path, FACTORY + more)

    assert (f"{REFERENCE} of stage dpo" in holding(spec)) is reference
    assert "pairs of sequences" in holding(spec)
    assert ("a second model" in holding(spec)) is ("ref_model" in more)
    if reference:  # in the step's dtype: hparams/model_args.py, compute_dtype
        assert limits(spec)[f"{REFERENCE} of stage dpo"].at_least_bytes == 2 * count_parameters(spec.model)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("rl: dpo\n", set()),
        ("rl: dpo\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n", set()),
        ("rl: dpo\ndpo_use_weighting: true\n", {"other losses of pairs"}),
        ("rl: dpo\ndpo_loss_type: [sigmoid, sft]\n", {"other losses of pairs"}),
        ("rl: dpo\ndpo_padding_free: true\n", set()),
        ("rl: orpo\n", {"sequences of ORPO"}),
        ("rl: grpo\ntrl: {beta: 0.001}\n", {"reinforcement learning", "the reference model of GRPO"}),
        ("rl: grpo\n", {"reinforcement learning"}),
        ("load_in_8bit: true\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n", set()),
        ("qat:\n  weight_dtype: int8\n", {"quantization-aware training with int8 weights"}),
        (INT4, {"quantization-aware training with an LM head that is called"}),
        (INT4 + "liger_fused_linear_cross_entropy: true\n", set()),
        ("qat:\n  weight_dtype: nvfp4\n", {"quantization-aware training with nvfp4 weights"}),
        ("use_kernels: true\n", set()),
    ],
)
def test_what_axolotl_is_asked_for(more: str, expected: set[str], tmp_path: Path) -> None:
    assert holding(loaded(tmp_path, AXOLOTL + more)) == expected


def test_of_the_hubs_kernels_megablocks_experts_may_need_more(tmp_path: Path) -> None:
    text = AXOLOTL.replace("meta-llama/Meta-Llama-3-8B", "openai/gpt-oss-20b").replace("flash_attention: true\n", "")

    assert holding(loaded(tmp_path, text + "use_kernels: true\n")) == {"MegaBlocks' experts from the hub"}
    assert holding(loaded(tmp_path, text + "use_kernels: false\n")) == set()


def test_kinds_of_training_that_axolotl_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"rl = .dpoo. is not a supported value of axolotl\. Choose from dpo, ipo, orpo"
    ):
        loaded(tmp_path, AXOLOTL + "rl: dpoo\n")


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ("eval_strategy: steps\n", 8),  # TrainingArguments' default
        ("eval_strategy: steps\nper_device_eval_batch_size: 2\n", 2),
        ("eval_strategy: 'no'\n", None),
        ("", None),
    ],
)
def test_an_evaluation_is_sized_by_its_batch(more: str, batch: int | None, tmp_path: Path) -> None:
    spec = loaded(tmp_path, LLAMA + "max_length: 1024\n" + more)

    assert spec.training.evaluation_batch_size == batch
    assert holding(spec) == set()


KERNELS = "fused kernels of adapters"


@pytest.mark.parametrize(
    ("more", "fused"),
    [
        ("", ("qkv", "o", "mlp")),
        ("lora_mlp_kernel: false\nlora_qkv_kernel: false\nlora_o_kernel: false\n", ()),
        ("lora_mlp_kernel: true\n", ("mlp",)),  # a file that sets one gets no other
        ("load_in_8bit: true\n", ()),
        ("rl: dpo\n", ()),
        ("trust_remote_code: true\n", ()),
    ],
)
def test_axolotl_enables_its_kernels_of_adapters(more: str, fused: tuple[str, ...], tmp_path: Path) -> None:
    spec = loaded(tmp_path, AXOLOTL + "adapter: lora\n" + more)

    assert spec.training.lora is not None
    assert spec.training.lora.fused == fused
    assert spec.training.lora.input_require_grads
    assert KERNELS not in limits(spec)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("microsoft/Phi-3-mini-4k-instruct", ""),
        (
            "meta-llama/Meta-Llama-3-8B",
            "fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\ndp_shard_size: 2\n",
        ),
    ],
)
def test_axolotls_kernels_are_noted_where_they_are_not_modelled(model: str, more: str, tmp_path: Path) -> None:
    text = AXOLOTL.replace("meta-llama/Meta-Llama-3-8B", model)
    spec = loaded(tmp_path, text + "adapter: lora\n" + more)

    assert spec.training.lora is not None
    assert not spec.training.lora.fused
    assert not limits(spec)[KERNELS].holds_memory


@pytest.mark.parametrize(("more", "mask"), [("", "boolean"), ("pad_to_sequence_len: false\n", "none")])
def test_axolotl_rounds_lengths_up_so_a_single_sequence_is_padded(more: str, mask: str, tmp_path: Path) -> None:
    text = (
        AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 1").replace("flash", "sdp") + "adapter: lora\n" + more
    )

    assert loaded(tmp_path, text).training.padding_mask == mask


@pytest.mark.parametrize(
    ("model", "more", "copies_and_mask"),
    [
        ("meta-llama/Meta-Llama-3-8B", "", (True, False)),
        ("meta-llama/Meta-Llama-3-8B", "sdpa_varlen: false\n", (False, True)),
        ("mistralai/Mistral-7B-v0.1", "", (False, True)),  # it has a sliding window
    ],
)
def test_axolotl_keeps_packed_samples_apart(
    model: str, more: str, copies_and_mask: tuple[bool, bool], tmp_path: Path
) -> None:
    text = AXOLOTL.replace("meta-llama/Meta-Llama-3-8B", model).replace("flash", "sdp")
    training = loaded(tmp_path, f"{text}sample_packing: true\n{more}").training

    assert (training.repeat_kv, training.padding_mask != "none") == copies_and_mask


def test_flash_attention_2_needs_neither_mask_nor_copies_for_packed_samples(tmp_path: Path) -> None:
    training = loaded(tmp_path, f"{AXOLOTL}sample_packing: true\n").training

    assert (training.repeat_kv, training.padding_mask) == (False, "none")


@pytest.mark.parametrize(
    ("more", "modules"),
    [
        ("adapter: lora\n", ()),
        ("adapter: qlora\nload_in_4bit: true\n", ("embed_tokens", "lm_head", "norm")),
        ("adapter: qlora\nload_in_4bit: true\nembeddings_skip_upcast: true\n", ("norm",)),
    ],
)
def test_axolotl_casts_modules_of_a_4_bit_model(more: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    spec = loaded(tmp_path, AXOLOTL + more)

    assert spec.training.lora is not None
    assert spec.training.lora.fp32_on_load == modules


def test_trls_dpo_casts_adapters_on_a_4_bit_base_of_axolotl(tmp_path: Path) -> None:
    """Gradients and optimizer states have their dtype, so the recipe has no fp32 copies."""
    training = loaded(tmp_path, AXOLOTL + "rl: dpo\nadapter: qlora\nload_in_4bit: true\n").training

    assert training.lora is not None
    assert (training.lora.adapter_dtype, training.recipe) == ("compute", "pure")
    assert training.logits_until == "loss"


def test_axolotl_does_not_find_gpt_neoxs_renamed_lm_head(tmp_path: Path) -> None:
    file = AXOLOTL.replace("flash_attention: true\n", "").replace(
        "meta-llama/Meta-Llama-3-8B", "EleutherAI/pythia-410m"
    )

    def in_fp32(release: str) -> tuple[str, ...]:
        return loaded(tmp_path, file, f"versions.transformers={release}").training.fp32_modules

    assert in_fp32("5.16.1") == ("embed_tokens", "norm")
    assert in_fp32("5.8.0") == ("embed_tokens", "lm_head", "norm")


def test_axolotl_holds_embeddings_in_fp32_without_flash_attention(tmp_path: Path) -> None:
    without = AXOLOTL.replace("flash_attention: true\n", "")
    modules = ("embed_tokens", "lm_head", "norm")
    assert loaded(tmp_path, AXOLOTL).training.fp32_modules == ()
    assert loaded(tmp_path, without).training.fp32_modules == modules
    assert loaded(tmp_path, without + "adapter: lora\n").training.fp32_modules == ()
    assert loaded(tmp_path, without + "cut_cross_entropy: true\n").training.fp32_modules == ()


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("openai-community/gpt2", ("embed_tokens", "lm_head")),  # norms are called ln_1, wte is tied to lm_head
        ("EleutherAI/gpt-j-6b", ("lm_head",)),  # wte is not
        ("EleutherAI/pythia-410m", ("embed_tokens", "lm_head", "norm")),  # embed_in, embed_out, input_layernorm
    ],
)
def test_axolotl_finds_modules_by_name(model: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    text = AXOLOTL.replace("flash_attention: true\n", "")
    name = next(line for line in text.splitlines() if line.startswith("base_model:"))

    assert loaded(tmp_path, text.replace(name, f"base_model: {model}")).training.fp32_modules == modules


@pytest.mark.parametrize(
    ("more", "batch"),
    [("val_set_size: 0.1\neval_batch_size: 8\n", 8), ("val_set_size: 0\neval_batch_size: 8\n", None)],
)
def test_axolotls_evaluation_needs_data(more: str, batch: int | None, tmp_path: Path) -> None:
    assert loaded(tmp_path, AXOLOTL + more).training.evaluation_batch_size == batch


def test_what_is_counted_too_high_is_a_limit_that_holds_no_memory(tmp_path: Path) -> None:
    spec = loaded(
        tmp_path,
        '[model]\nname = "qwen3"\nflavor = "0.6B"\n[training]\nseq_len = 1024\n',
        "preset=qwen3-0.6b",
        "data_parallel=8",
        name="run.toml",
    )

    name = "selective per-operator checkpointing"
    assert limits(spec) == {name: Limit(name, holds_memory=False, overcounts="activations")}


@pytest.mark.parametrize(
    ("base", "more", "least"),
    [
        ("NousResearch/Llama-2-13b-hf", "load_in_8bit: true\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n", 8),
        ("NousResearch/Llama-2-13b-hf", "unfrozen_parameters: ['model.layers.3[0-9]+.*']\n", 1),
        ("NousResearch/Llama-2-7b-hf", "unfrozen_parameters: ['model.layers.3[0-9]+.*']\n", 1),
    ],
)
def test_a_run_that_is_counted_too_high_may_fit(base: str, more: str, least: int, tmp_path: Path) -> None:
    """Published cards with 24 GB train adapters on an 8-bit 13B model: 13.0 GB, counted as 26.0 GB.

    Frozen layers have no gradients and states, but weights: 24.2 GiB of 16-bit weights of 13B do not fit 24 GB.
    """
    text = f"base_model: {base}\nsequence_len: 2048\nmicro_batch_size: 1\noptimizer: adamw_torch\n"
    text += "bf16: auto\ngradient_checkpointing: true\nflash_attention: true\ndatasets: []\n" + more
    spec = loaded(tmp_path, text, "hardware.gpu=rtx-4090")
    found = judge(spec)
    weights = 2 * count_parameters(spec.model) // least

    assert found.answer == ("does-not-fit" if weights > found.limit_bytes else "unknown")
    assert found.least_bytes > weights
    assert found.device_bytes is None or found.device_bytes > found.limit_bytes


@pytest.mark.parametrize(
    ("value", "holds"), [("1.0e9", False), ("2.0e8", False), ("auto", False), ("2000000000", True), ("2e9", True)]
)
def test_more_live_parameters_than_the_default_hold_more(value: str, holds: bool, tmp_path: Path) -> None:
    text = f'{{"zero_optimization": {{"stage": 3, "max_live_parameters": "{value}"}}, "train_batch_size": 8}}'
    spec = loaded(tmp_path, text, "preset=gpt2", "data_parallel=8", "b=1", name="ds.json")

    assert ("gathered weights that are kept" in holding(spec)) is holds


def test_files_of_one_field_that_is_asked_for_twice_name_it_once(tmp_path: Path) -> None:
    text = f"{AXOLOTL}use_scattermoe: true\nuse_sonicmoe: true\n"

    assert [limit.feature for limit in loaded(tmp_path, text).origin.limits] == ["expert kernels"]


def test_unknown_fields_are_no_limits(tmp_path: Path) -> None:
    spec = loaded(tmp_path, LLAMA + "max_length: 1024\nno_such_field: 3\n")

    assert any("no_such_field" in note for note in spec.origin.notes)
    assert spec.origin.limits == ()


def test_a_runs_own_limits_come_first(tmp_path: Path) -> None:
    text = DPO + "cast_lm_head_to_fp32: true\n"
    spec = loaded(tmp_path, text, "optimizer=galore", "optimizer_implementation=for-loop")
    found = limits_of(spec)

    assert found[0].feature.startswith("cuSOLVER's workspace when GaLore decomposes a gradient")
    assert found[0].holds_memory
    assert found[-1].feature == "a head in fp32"


def test_stages_that_train_one_sequence_at_a_time_are_no_pairs(tmp_path: Path) -> None:
    for stage in ("sft", "pt"):
        assert holding(loaded(tmp_path, FACTORY.replace("dpo", stage) + "finetuning_type: full\n")) == set()
    assert llama_factory.LLAMA_FACTORY.name == "LLaMA-Factory"


@pytest.mark.parametrize(
    ("release", "more", "loss", "noted"),
    [
        ("1.16", "", "tiled", False),
        ("1.14.2", "", "selective", False),
        ("1.14.2", "loss_type: [sigmoid, sft]\n", None, True),  # a cross-entropy besides
        ("1.13", "", None, True),
    ],
)
def test_the_loss_of_pairs_by_release(release: str, more: str, loss: str | None, noted: bool, tmp_path: Path) -> None:
    spec = loaded(tmp_path, DPO + more, f"versions.trl=v{release}")

    assert spec.training.loss == (loss or "materialized")
    assert ("log-probabilities of pairs" in limits(spec)) is noted
    assert spec.training.logits_dtype == ("fp32" if loss == "selective" else "compute")
