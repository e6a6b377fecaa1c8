"""What files of frameworks ask for and the estimate does not count: each is a limit, and says whether it holds memory."""

import re
from pathlib import Path

import pytest

from memcalc.estimation.limits import limits_of, resolved
from memcalc.estimation.parameters import count_parameters
from memcalc.importers import axolotl, llama_factory, trl
from memcalc.importers.file_format import FileFormat
from memcalc.importers.loading import load
from memcalc.importers.registry import FRAMEWORKS
from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec

FOLDER = Path(trl.__file__).parent
LLAMA = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nper_device_train_batch_size: 2\nbf16: true\n"
DPO = LLAMA + "beta: 0.1\nmax_length: 1024\n"
FACTORY = LLAMA + "cutoff_len: 1024\nstage: dpo\n"
AXOLOTL = "base_model: meta-llama/Meta-Llama-3-8B\nsequence_len: 1024\nmicro_batch_size: 2\ndatasets: []\n"
REFERENCE = "the reference model"


def loaded(folder: Path, text: str, *overrides: str, name: str = "run.yaml") -> Spec:
    """A run of a framework's file."""
    (folder / name).write_text(text)
    return load(folder / name, overrides)


def limits(spec: Spec) -> dict[str, Limit]:
    """What the file asks for, by its name."""
    return {limit.what: resolved(spec, limit) for limit in spec.origin.limits}


def holding(spec: Spec) -> set[str]:
    """What of it holds memory that is not counted."""
    return {what for what, limit in limits(spec).items() if limit.holds_memory}


def test_every_sentence_of_that_kind_comes_from_a_limit() -> None:
    """Only `Draft.limit` and the engine write "not modelled: ": a sentence alone would change no verdict."""
    paths = [*FOLDER.glob("*.py"), *(FOLDER.parent / "frameworks").glob("*.py")]
    writers = {path.name for path in paths if re.search(r"[\"']not modelled: ", path.read_text())}

    assert writers == {"draft.py", "engine.py"}


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_fields_that_are_not_modelled_say_whether_they_hold_memory(framework: FileFormat) -> None:
    """Those without a limit of their own are TRL's and axolotl's, whose trainers decide what exists."""
    without = {
        path for path, meaning in framework.fields.items() if meaning.kind == "not modelled" and meaning.limit is None
    }

    known = {path for fields in (trl.FIELDS, axolotl.FIELDS) for path in fields}
    assert without <= known
    assert framework.name in ("axolotl", "LLaMA-Factory", "Hugging Face TrainingArguments") or without == set()


def test_the_reference_model_of_dpo_holds_the_weights_once_more(tmp_path: Path) -> None:
    spec = loaded(tmp_path, DPO)

    assert holding(spec) == {REFERENCE, "pairs of sequences"}
    assert limits(spec)[REFERENCE].at_least_bytes == 4 * count_parameters(spec.model)  # as the policy's: in fp32
    assert any(note == f"not modelled: {REFERENCE}: a frozen copy" for note in spec.origin.notes)


def test_its_dtype_and_its_shards_are_those_of_the_run(tmp_path: Path) -> None:
    pure, sharded = (
        loaded(tmp_path, DPO + "dtype: bfloat16\n"),
        loaded(tmp_path, DPO + "fsdp: full_shard\n", "data_parallel=8"),
    )
    count = count_parameters(pure.model)

    assert limits(pure)[REFERENCE].at_least_bytes == 2 * count
    assert limits(load(pure, ("recipe=amp",)))[REFERENCE].at_least_bytes == 4 * count
    assert limits(sharded)[REFERENCE].at_least_bytes == 2 * count // 8
    assert limits(loaded(tmp_path, DPO, "zero_stage=2", "data_parallel=8"))[REFERENCE].at_least_bytes == 2 * count


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("use_peft: true\n", {"pairs of sequences"}),  # adapters are switched off in its place
        ("precompute_ref_log_probs: true\n", {"pairs of sequences"}),
        ("loss_type: simpo\n", {"pairs of sequences"}),
        ("loss_type: ipo\n", {"pairs of sequences", REFERENCE}),
        ("num_generations: 8\n", {"reinforcement learning", REFERENCE}),  # GRPO, whose beta is not 0
        ("num_generations: 8\nuse_vllm: true\n", {"reinforcement learning", REFERENCE, "vLLM on the GPUs that train"}),
        ("num_generations: 8\nuse_vllm: true\nvllm_mode: server\n", {"reinforcement learning", REFERENCE}),
        ("torch_compile: true\n", {"pairs of sequences", REFERENCE, "torch.compile"}),
    ],
)
def test_what_trls_trainers_hold_beside_the_policy(more: str, expected: set[str], tmp_path: Path) -> None:
    assert holding(loaded(tmp_path, DPO + more)) == expected


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("desirable_weight: 1.5", {REFERENCE, "pairs of sequences"}),  # KTO
        ("center_rewards_coefficient: 0.01", {"pairs of sequences"}),
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
            {"experts' rows that are padded to a capacity"},
        ),
        ("--num-experts 4 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", set()),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", set()),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            {"checkpoints of several layers together"},
        ),
        ("--optimizer-cpu-offload --distribute-saved-activations", set()),
        ("--enable-cuda-graph --mtp-num-layers 1", {"CUDA graphs", "multi-token prediction"}),
        ("--attention-backend unfused", {"attention-backend unfused"}),
    ],
)
def test_what_megatrons_arguments_ask_for(arguments: str, expected: set[str], tmp_path: Path) -> None:
    text = f"python pretrain_gpt.py --num-layers 2 --hidden-size 128 --num-attention-heads 2 --bf16 {arguments}\n"
    spec = loaded(tmp_path, text, "vocab_size=512", "sequence_length=64", "max_position_embeddings=64", name="run.sh")

    assert holding(spec) == expected


def test_megatron_in_fp32_takes_twice_what_is_counted(tmp_path: Path) -> None:
    text = "python pretrain_gpt.py --num-layers 2 --hidden-size 128 --num-attention-heads 2 --vocab-size 512\n"

    assert holding(loaded(tmp_path, text, "sequence_length=64", name="run.sh")) == {"Megatron-LM in fp32"}
    assert holding(loaded(tmp_path, text, "sequence_length=64", "dtype=bf16", name="run.sh")) == set()


def test_sft_holds_nothing_beside(tmp_path: Path) -> None:
    assert holding(loaded(tmp_path, LLAMA + "max_length: 1024\npacking: true\nbeta:\n")) == set()
    assert holding(loaded(tmp_path, DPO.replace("beta: 0.1", "num_generations: 8\nbeta: 0.0"))) == {
        "reinforcement learning"
    }


@pytest.mark.parametrize(
    ("more", "reference"),
    [
        ("finetuning_type: full\n", True),
        ("finetuning_type: lora\n", False),
        ("finetuning_type: full\npref_loss: orpo\n", False),
        ("finetuning_type: full\nref_model: another\n", False),  # told as another model, of no known size
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
        ("rl: dpo\n", {"sequences of DPO", "the reference model of DPO"}),
        ("rl: dpo\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n", {"sequences of DPO"}),
        ("rl: orpo\n", {"sequences of ORPO"}),
        ("rl: grpo\ntrl: {beta: 0.001}\n", {"reinforcement learning", "the reference model of GRPO"}),
        ("rl: grpo\n", {"reinforcement learning"}),
        ("val_set_size: 0.1\neval_batch_size: 2\n", set()),
        ("val_set_size: 0.1\neval_batch_size: 8\n", {"evaluation during training"}),
        ("val_set_size: 0\neval_batch_size: 8\n", set()),
        ("val_set_size: 0.1\nliger_fused_linear_cross_entropy: true\n", {"evaluation during training"}),  # all logits
        ("val_set_size: 0.1\ncut_cross_entropy: true\n", set()),
        ("load_in_8bit: true\nadapter: lora\nlora_r: 8\nlora_target_linear: true\n", set()),
        ("qat:\n  weight_dtype: int8\n", {"training that imitates quantization"}),
    ],
)
def test_what_axolotl_is_asked_for(more: str, expected: set[str], tmp_path: Path) -> None:
    assert holding(loaded(tmp_path, AXOLOTL + more)) == expected


def test_evaluation_holds_memory_where_it_has_more_sequences_than_a_step(tmp_path: Path) -> None:
    """TrainingArguments evaluate 8 at once where nothing is said."""
    text = LLAMA + "max_length: 1024\neval_strategy: steps\n"

    assert holding(loaded(tmp_path, text)) == {"evaluation during training"}
    assert holding(loaded(tmp_path, text + "per_device_eval_batch_size: 2\n")) == set()
    assert holding(loaded(tmp_path, text, "b=8")) == set()
    assert holding(load(loaded(tmp_path, text, "b=8"), ("b=4",))) == {"evaluation during training"}
    assert limits(loaded(tmp_path, text.replace("steps", "no"))) == {}


def test_what_is_counted_too_high_changes_no_verdict(tmp_path: Path) -> None:
    spec = loaded(
        tmp_path,
        '[model]\nname = "qwen3"\nflavor = "8B"\n[training]\nseq_len = 1024\n',
        "preset=qwen3-8b",
        "data_parallel=8",
        name="run.toml",
    )

    assert limits(spec) == {"selective checkpointing by operator": Limit("selective checkpointing by operator", False)}


@pytest.mark.parametrize(
    ("value", "holds"), [("5.0e8", False), ("2.0e8", False), ("auto", False), ("1000000000", True), ("1e9", True)]
)
def test_buckets_beyond_the_default_hold_more(value: str, holds: bool, tmp_path: Path) -> None:
    text = f'{{"zero_optimization": {{"stage": 2, "reduce_bucket_size": "{value}"}}, "train_batch_size": 8}}'
    spec = loaded(tmp_path, text, "preset=gpt2", "data_parallel=8", "b=1", name="ds.json")

    assert ("a bucket of its own size" in holding(spec)) is holds


def test_files_of_one_field_that_is_asked_for_twice_name_it_once(tmp_path: Path) -> None:
    text = f"{AXOLOTL}lora_mlp_kernel: true\nlora_qkv_kernel: true\nlora_o_kernel: false\n"

    assert [limit.what for limit in loaded(tmp_path, text).origin.limits] == ["fused kernels of adapters"]


def test_unknown_fields_are_no_limits(tmp_path: Path) -> None:
    spec = loaded(tmp_path, LLAMA + "max_length: 1024\nno_such_field: 3\n")

    assert any("no_such_field" in note for note in spec.origin.notes)
    assert spec.origin.limits == ()


def test_a_runs_own_limits_come_first(tmp_path: Path) -> None:
    spec = loaded(tmp_path, DPO, "optimizer=adam-4bit", "optimizer_implementation=for-loop")
    found = limits_of(spec)

    assert found[0] == Limit("what torchao's compiled update makes and drops", True)
    assert {limit.what for limit in found[-2:]} == {REFERENCE, "pairs of sequences"}


def test_stages_that_train_one_sequence_at_a_time_are_no_pairs(tmp_path: Path) -> None:
    for stage in ("sft", "pt"):
        assert holding(loaded(tmp_path, FACTORY.replace("dpo", stage) + "finetuning_type: full\n")) == set()
    assert llama_factory.LLAMA_FACTORY.name == "LLaMA-Factory"
