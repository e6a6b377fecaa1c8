"""Megatron-LM's arguments in scripts: of the command that trains, of the branches that are taken, and no others."""

from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.importers.field_tables import ImportedConfig
from memcalc.importers.loading import import_file, load
from memcalc.importers.megatron.arguments import arguments_of

SIZES = "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --vocab-size 1024"
SIZES += " --max-position-embeddings 256"
SMALL = f"{SIZES} --seq-length 256 --micro-batch-size 1 --bf16"


def script(folder: Path, text: str) -> Path:
    path = folder / "train.sh"
    path.write_text(text)
    return path


def imported(folder: Path, text: str, *overrides: str) -> ImportedConfig:
    found = import_file(script(folder, text), overrides)
    assert found is not None
    return found


@pytest.mark.parametrize(("dtype", "fp8"), [("fp8", "delayed"), ("bf16", "none")])
def test_a_branch_that_is_not_taken_says_nothing(dtype: str, fp8: str, tmp_path: Path) -> None:
    text = f"""
    DTYPE="{dtype}"
    DTYPE_ARGS=()
    if [[ "$DTYPE" == "fp8" ]]; then
        DTYPE_ARGS+=("--fp8-format hybrid")
    fi
    torchrun pretrain_gpt.py {SMALL} ${{DTYPE_ARGS[@]}}
    """

    assert load(script(tmp_path, text)).training.fp8 == fp8


CHAIN = """
if [ $MODEL_SIZE = 7B ]; then
    NUM_LAYERS=2
    tie_option=""
elif [ $MODEL_SIZE = 72B ]; then
    NUM_LAYERS=4
    tie_option=" \\
        --untie-embeddings-and-output-weights \\
        "
fi
if [ -z ${MP_VP} ]; then
    vp_option=""
else
    vp_option=" --num-layers-per-virtual-pipeline-stage ${MP_VP}"
fi
megatron_options=" \\
    --num-layers ${NUM_LAYERS} \\
    --seq-length ${SEQ_LEN} \\
    --tensor-model-parallel-size ${TP} \\
    "
run_cmd="torchrun --nnodes $NNODES pretrain_qwen.py --micro-batch-size 1 --bf16 --lr ${LR}
 ${megatron_options} ${tie_option} ${vp_option} \\
 --hidden-size 512 --num-attention-heads 8 --vocab-size 1024 --max-position-embeddings 256"
echo ${run_cmd}
eval ${run_cmd}
"""


def test_a_chain_of_sizes_is_decided_by_the_size(tmp_path: Path) -> None:
    text = "MODEL_SIZE=7B; SEQ_LEN=256; TP=2; MP_VP=''" + CHAIN
    spec = load(script(tmp_path, text))

    assert (spec.model.num_layers, spec.model.tie_word_embeddings) == (2, True)
    assert spec.parallelism.tensor_parallel == 2
    assert load(script(tmp_path, text.replace("SIZE=7B", "SIZE=72B"))).model.num_layers == 4


def test_what_the_caller_gives_is_asked_for_by_name(tmp_path: Path) -> None:
    """It was the last size of the chain, 1 and 2048."""
    text = "MODEL_SIZE=$1; SEQ_LEN=$2; TP=$3" + CHAIN
    with pytest.raises(InputError) as caught:
        load(script(tmp_path, text))

    assert "leaves num-layers, seq-length, tensor-model-parallel-size, " in caught.value.problem
    assert "untie-embeddings-and-output-weights, num-layers-per-virtual-pipeline-stage to" in caught.value.problem
    settings = [word for word in caught.value.remedy.split() if word.endswith("=")]
    assert settings == [
        "model.num_layers=",
        "training.sequence_length=",
        "parallelism.tensor_parallel=",
        "model.tie_word_embeddings=",
        "parallelism.virtual_stages=",
    ]
    values = ("2", "128", "1", "false", "1")
    spec = load(script(tmp_path, text), [setting + value for setting, value in zip(settings, values, strict=True)])
    assert (spec.model.num_layers, spec.training.sequence_length, spec.model.tie_word_embeddings) == (2, 128, False)


def test_a_model_that_is_named_says_what_the_script_leaves_open(tmp_path: Path) -> None:
    """Not Megatron-LM's silence: learned positions, tied embeddings, biases, four times the width."""
    text = """
    if [ $1 = 8B ]; then MORE="--untie-embeddings-and-output-weights --disable-bias-linear"; fi
    python pretrain_gpt.py --num-layers $L --hidden-size 4096 --ffn-hidden-size $F --normalization $N --bf16 ${MORE}
    """
    ours = load(script(tmp_path, text), ["preset=llama-3-8b"]).model

    assert ours == load("llama-3-8b").model


def test_every_field_that_is_left_open_is_in_a_note(tmp_path: Path) -> None:
    found = imported(tmp_path, "TP=$1\nNNODES=$SLURM_NNODES" + CHAIN)
    paths = [path for path, _ in found.elsewhere]

    assert paths[:3] == ["nnodes", "num-layers", "seq-length"]
    assert (
        "tensor-model-parallel-size = $1 is set elsewhere; repeat the value with --set parallelism.tensor_parallel="
        in found.notes
    )
    assert "parallelism.data_parallel" in [path for path, _ in found.missing]
    assert "lr" in [path for path, _ in found.no_effect]


@pytest.mark.parametrize(
    "how",
    [
        "TP=4",
        ": ${TP:=4}",
        "readonly TP=4",
        "declare -i TP=4",
        "export TP=${TP:-4}",
        "TP=$(( 2 * 2 ))",
        "A=2; let x=1; TP=$((A * A))",
        "TP=$1; TP=${TP:-4}",
        "case big in small) TP=1;; big) TP=4;; esac",
        "tp() { TP=$1; }; tp 4",
    ],
)
def test_ways_to_say_a_value(how: str, tmp_path: Path) -> None:
    text = f"{how}\npython pretrain_gpt.py {SMALL} --tensor-model-parallel-size $TP"

    assert load(script(tmp_path, text)).parallelism.tensor_parallel == 4


def test_texts_and_other_programs_say_nothing(tmp_path: Path) -> None:
    text = f"""
    echo "train.py --num-layers 7 --fp16"
    python preprocess_data.py --seq-length 512 --num-layers 3
    nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi -o out \\
        python -u pretrain_gpt.py {SMALL} --data-path "/data/with space --num-layers 7" --split '9,1,0' | tee --append log
    """
    found = imported(tmp_path, text)

    assert found.unknown == ()
    assert found.blocks["model"]["num_layers"] == 2
    assert found.blocks["training"]["sequence_length"] == 256
    assert [path for path, _ in found.no_effect] == ["data-path", "split"]
    assert import_file(script(tmp_path, f"python generate_samples.py {SMALL}")) is None


def test_several_commands_that_train_must_agree(tmp_path: Path) -> None:
    text = f"python pretrain_gpt.py {SMALL}\npython pretrain_gpt.py {SMALL.replace('batch-size 1', 'batch-size 2')}"
    with pytest.raises(InputError, match="leaves micro-batch-size"):
        load(script(tmp_path, text))

    assert load(script(tmp_path, text), ["b=2"]).training.micro_batch_size == 2


def test_options_with_an_unset_variable_are_reported(tmp_path: Path) -> None:
    found = imported(tmp_path, f'python pretrain_gpt.py {SMALL} --swiglu $EXTRA_ARGS "$@"')

    assert found.unknown == ("$EXTRA_ARGS", "$@")
    assert found.blocks["model"]["mlp"] == "swiglu"


def test_options_within_one_word(tmp_path: Path) -> None:
    path = script(
        tmp_path, f'A=" {SMALL}"\nmpirun -np 8 bash entry.sh pretrain_llama.py "${{A}} --swiglu $more_options"'
    )

    assert load(path).model.mlp == "swiglu"


def test_slurms_nodes_are_those_of_the_script(tmp_path: Path) -> None:
    text = (
        f'#SBATCH --nodes=4\nN=$SLURM_NNODES\nsrun bash -c "torchrun --nproc_per_node 8 --nnodes $N train.py {SMALL}"'
    )

    assert load(script(tmp_path, text)).parallelism.data_parallel == 32


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--grad-reduce-in-bf16", "training.gradient_dtype", "bf16"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "parallelism.context_parallel_method", "all-to-all"),
        ("--context-parallel-size 2 --cp-comm-type p2p", "parallelism.context_parallel_method", "ring"),
        ("--pad-vocab-size-to 2048", "model.vocab_size", 2048),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "training.loss", "fused"),
        ("--cross-entropy-loss-fusion", "training.loss", "vocab-parallel"),
        ("--cross-entropy-fusion-impl te", "training.loss", "vocab-parallel"),
        (
            "--num-experts 4 --moe-layer-freq '([0]*1+[1]*1)' --moe-ffn-hidden-size 64",
            "model.moe.dense_layers",
            (0,),
        ),
    ],
)
def test_fields_that_were_unknown(words: str, path: str, value: Any, tmp_path: Path) -> None:
    found: Any = load(script(tmp_path, f"python pretrain_gpt.py {SMALL} {words}"))
    for name in path.split("."):
        found = getattr(found, name)

    assert found == value


def test_files_without_a_command(tmp_path: Path) -> None:
    """A file of arguments, and one of variables that another script reads."""
    assert arguments_of("--num-layers 2\n--bf16\n--lr 1e-4")["num-layers"] == 2
    assert arguments_of('MODEL_ARGS=" --num-layers 2 \\\n --bf16"\nOTHER="see --num-layers 3"') == {
        "num-layers": 2,
        "bf16": True,
    }
