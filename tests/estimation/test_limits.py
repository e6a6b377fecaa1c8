"""What an estimate leaves out: which of it holds memory that a run asks for."""

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.estimation.limits import TRAINING, limits_of, resolved, spec_limits
from memcalc.importers.loading import load
from memcalc.layout.parameters import count_parameters
from memcalc.spec.limits import Limit
from memcalc.spec.origin import Origin

REFERENCE = Limit("the reference model", holds_memory=True, bytes_per_parameter=4)
QLORA = ("finetune=qlora", "attention=flash", "implementation=huggingface")
RING = "the ring buffers of keys and values under context parallelism"


@pytest.mark.parametrize(
    ("preset", "words", "expected"),
    [
        ("gpt2", (), []),
        ("mixtral-8x7b", (), []),  # imbalance is not asked for
        ("llama-3-8b", ("context_parallel=2",), []),
        ("llama-3-8b", ("context_parallel=2", "implementation=megatron", "recipe=mixed-18"), [RING]),
        ("llama-3-8b", ("context_parallel=2", "context_parallel_method=all-to-all"), []),
        ("llama-3-8b", ("optimizer=adam-4bit",), []),
        (
            "llama-3-8b",
            ("optimizer=galore",),
            ["cuSOLVER's workspace when GaLore decomposes a gradient"],
        ),
        ("llama-3-8b", ("fp8=rowwise",), []),
        ("gemma-2-2b", ("implementation=plain",), ["the soft-capping of Gemma 2's attention scores and logits"]),
        ("gemma-2-2b", ("implementation=huggingface",), []),
        ("deepseek-v3", (), []),
        (
            "falcon-7b",
            (*QLORA, "framework=trainer"),
            ["16-bit weights of falcon's linear layers, which transformers 5 does not quantize"],
        ),
        ("falcon-7b", (*QLORA, "framework=trainer", "versions.transformers=v4.57.6"), []),
        ("falcon-7b", QLORA, []),  # no program of transformers
    ],
)
def test_what_our_own_fields_ask_for(preset: str, words: tuple[str, ...], expected: list[str]) -> None:
    assert [limit.feature for limit in limits_of(load(preset, words)) if limit.holds_memory] == expected


@pytest.mark.parametrize("words", [(), ("context_parallel=2",), ("optimizer=galore", "data_parallel=8")])
def test_they_are_what_a_result_lists(words: tuple[str, ...]) -> None:
    result = memcalc.estimate("mixtral-8x7b", *words)

    assert result.not_modelled == tuple(limit.feature for limit in spec_limits(result.spec))
    assert set(TRAINING) < set(result.not_modelled)


def test_generation_has_its_own() -> None:
    result = memcalc.estimate({"preset": "gpt2", "inference": {"batch_size": 1}})

    assert result.not_modelled == tuple(limit.feature for limit in limits_of(result.spec))
    assert not any(limit.holds_memory for limit in limits_of(result.spec))


@pytest.mark.parametrize(
    ("words", "bytes_per_parameter"),
    [
        (("recipe=fp32", "dtype=fp32"), 4),
        (("recipe=amp",), 4),
        (("recipe=pure",), 2),
        (("recipe=mixed-16", "zero_stage=2", "data_parallel=4"), 2),  # whole on each GPU
        (("recipe=mixed-16", "zero_stage=2", "engine=fsdp2", "data_parallel=4"), 2 / 4),
        (("recipe=mixed-16", "zero_stage=3", "data_parallel=4"), 2 / 4),
        (("recipe=mixed-16", "zero_stage=3", "data_parallel=4", "data_parallel_replicate=2"), 2 / 2),
        (("recipe=mixed-16", "zero_stage=3", "engine=deepspeed", "data_parallel=4", "offload=all"), 0),
        (("recipe=pure", "finetune=lora"), 0),  # adapters are switched off in its place
        (("recipe=pure", "tensor_parallel=2"), 0),  # nothing is known of how it is split
    ],
)
def test_a_copy_of_the_model_is_sharded_as_the_run_is(words: tuple[str, ...], bytes_per_parameter: float) -> None:
    spec = load("gpt2", words)

    assert resolved(spec, REFERENCE).at_least_bytes == int(bytes_per_parameter * count_parameters(spec.model))


def test_a_copy_is_part_of_what_the_run_leaves_out() -> None:
    spec = load("gpt2", ("recipe=pure",)).with_origin(Origin(limits=(REFERENCE,)))

    assert limits_of(spec)[-1].at_least_bytes == 2 * count_parameters(spec.model)
    assert limits_of(load(spec, ("recipe=amp",)))[-1].at_least_bytes == 4 * count_parameters(spec.model)


@pytest.mark.parametrize(
    ("words", "holds"),
    [(("b=8",), False), (("b=7",), True), (("b=9", "loss=chunked"), False)],
)
def test_a_forward_pass_of_more_sequences_than_a_step_holds_memory(words: tuple[str, ...], holds: bool) -> None:
    evaluation = Limit("evaluation during training", holds_memory=True, sequences=8)

    assert resolved(load("gpt2", words), evaluation).holds_memory is holds


@pytest.mark.parametrize(("gpu", "name"), [("t4", "Tesla T4"), ("v100-16gb", "Tesla V100 16GB")])
def test_what_the_gpu_lacks_is_said(gpu: str, name: str) -> None:
    """Turing and Volta have no bf16 matrix units, and FlashAttention-2 needs Ampere; fp16 and eager attention do."""
    said = memcalc.estimate("gpt2", gpu=gpu).notes
    for lack in ("bf16 matrix units", "flash attention"):
        assert f"{name} has no {lack}; the estimate is for bf16 and flash attention." in said
    assert not [
        note for note in memcalc.estimate("gpt2", "dtype=fp16", "attention=eager", gpu=gpu).notes if name in note
    ]
    assert not [note for note in memcalc.estimate("gpt2", gpu="a100-40gb").notes if " has no " in note]


def test_sequences_beyond_the_models_positions_are_said() -> None:
    """Llama 3 8B has rotary positions up to 8,192, which a longer sequence may pass; GPT-2's 1,024 are a matrix."""
    said = "sequence_length = 8,193 is beyond the model's 8,192 positions."
    assert said in memcalc.estimate("llama-3-8b", "s=8193").notes
    assert said not in memcalc.estimate("llama-3-8b", "s=8192").notes
    with pytest.raises(InputError, match="longer than the 1024 learned positions"):
        memcalc.load("gpt2", "s=1025")


@pytest.mark.parametrize(
    ("preset", "words", "expected"),
    [
        ("gemma-2-2b", ("kernels=liger",), "Liger's kernels in modules of gemma2: PyTorch's are counted"),
        ("llama-3-8b", ("kernels=liger",), ""),
        (
            "Qwen/Qwen3-Coder-Next",  # its first layers have linear attention
            ("lora.target_modules=attention",),
            "layers before the first one with an adapter, which save nothing: their activations are counted",
        ),
        ("Qwen/Qwen3-Coder-Next", ("lora.target_modules=all-linear",), ""),
        ("Qwen/Qwen3-Coder-Next", ("lora.target_modules=attention", "recompute=full"), ""),
        ("llama-3-8b", ("lora.target_modules=mlp",), ""),
    ],
)
def test_activations_that_are_counted_too_high(preset: str, words: tuple[str, ...], expected: str) -> None:
    found = limits_of(load(preset, ("implementation=huggingface", *words)))

    assert [limit.feature for limit in found if limit.overcounts == "activations"] == [expected] * bool(expected)


@pytest.mark.parametrize(
    ("words", "raises"),
    [
        (("zero_stage=3", "data_parallel=8", "optimizer=adam-8bit"), True),
        (("zero_stage=3", "data_parallel=8", "optimizer_options.paged=true"), True),
        (("tensor_parallel=4", "optimizer=adafactor"), True),
        (("zero_stage=3", "data_parallel=8", "optimizer=adam"), False),
        (("zero_stage=3", "data_parallel=8", "engine=fsdp1", "recipe=amp", "optimizer=adam-8bit"), False),
        (("data_parallel=8", "optimizer=adam-8bit"), False),
    ],
)
def test_optimizers_that_cannot_update_dtensors_never_fit_for_sure(words: tuple[str, ...], *, raises: bool) -> None:
    found = limits_of(memcalc.load("llama-3.2-1b", *words))
    assert any("cannot update DTensors" in limit.feature and limit.holds_memory for limit in found) == raises
