"""Families without formulas: transformers reads their config.json and builds them, the step runs, estimate traces."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers

import memcalc
from memcalc.cli.app import main
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.spec.loading import load
from memcalc.spec.model_families import conversion, transformers_fallback
from memcalc.tracing.trace import record

SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
BIOGPT = SMALL | {"model_type": "biogpt", "num_attention_heads": 4, "intermediate_size": 256}
RWKV = SMALL | {"model_type": "rwkv", "context_length": 128}
RUN = ("b=2", "s=64", "recipe=pure", "attention=eager")


def config(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return path


def parameters_of(data: dict[str, Any]) -> int:
    """As transformers' own module counts them."""
    rest = {key: value for key, value in data.items() if key != "model_type"}
    built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(data["model_type"], **rest))
    return sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("data", [BIOGPT, RWKV], ids=lambda data: data["model_type"])
def test_its_step_runs_and_its_states_are_those_of_its_module(data: dict[str, Any], tmp_path: Path) -> None:
    """bf16 weights and gradients, two moments: 2 bytes per parameter each, and what the allocator rounds up."""
    traced = memcalc.trace(str(config(tmp_path, data)), *RUN, "s=8", gpu="h100-80gb", steps=2)  # RWKV is a loop over s

    assert traced.result.parameters == parameters_of(data)
    held = traced.result.ledger.components("optimizer_step_2")
    assert held[Component.OPTIMIZER_STATE] == 2 * 2 * traced.result.parameters
    assert traced.result.ledger.components("loss_2")[Component.ACTIVATIONS] > 0
    assert traced.result.fits


LINEAR = 2 * 8 * (4 * (64 + 64) + 2 * (64 + 256))  # BioGPT: 2 layers, rank 8: q, k, v, out_proj, fc1 and fc2


@pytest.mark.parametrize(
    ("targets", "adapters"),
    [("all-linear", LINEAR), ("[fc1, self_attn.q_proj, other]", 2 * 8 * (64 + 256 + 64 + 64))],
)
def test_its_adapters_are_on_the_layers_of_its_module(targets: str, adapters: int, tmp_path: Path) -> None:
    """By its own names, as PEFT finds them: all-linear has every linear layer but the head."""
    source = str(config(tmp_path, BIOGPT))
    traced = memcalc.trace(source, *RUN, "finetune=lora", f"lora.target_modules={targets}", steps=1)

    assert traced.result.trainable_parameters == adapters


def test_layers_that_its_module_lacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"target_modules names w1, which .* Choose from fc1, fc2, k_proj, out_proj"):
        memcalc.trace(str(config(tmp_path, BIOGPT)), *RUN, "finetune=lora", "lora.target_modules=[w1]", steps=1)


@pytest.mark.long
def test_the_trace_equals_the_measurement_on_the_cpu(tmp_path: Path) -> None:
    source = str(config(tmp_path, BIOGPT))

    traced = memcalc.trace(source, *RUN, steps=2, semantics="cpu").result.ledger.totals
    measured = memcalc.measure(source, *RUN, steps=2, device="cpu")

    assert measured.analysis is not None
    assert measured.analysis.ledger.totals == traced


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`estimate` traces without a child, which would import torch and transformers again; test_any_model starts one."""
    monkeypatch.setattr(import_module("memcalc.tracing.child"), "record_in_child", record)


@pytest.mark.usefixtures("in_this_process")
def test_estimate_traces_and_says_so(tmp_path: Path) -> None:
    source = str(config(tmp_path, BIOGPT))

    estimated = memcalc.estimate(source, *RUN)

    assert estimated.source == "trace"
    assert estimated.notes[0] == "memcalc has no formulas for biogpt: its real step was traced on fake tensors"
    assert estimated.ledger.totals == memcalc.trace(source, *RUN, steps=2).result.ledger.totals


UNWRITTEN = (
    "glm-4.5-air",
    "l=2",
    "d=64",
    "h=2",
    "num_key_value_heads=2",
    "V=512",
    "s=32",
    "moe.num_experts=8",
    "finetune=lora",
    "implementation=huggingface",
)  # PEFT moves adapters of dense MLPs to stacked experts


@pytest.mark.long  # of a model without formulas it is in the quick tests, above
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # PEFT's own
def test_modules_without_formulas_are_traced_by_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    """On one GPU and under FSDP2; another engine's ranks cannot be traced, so the message says what there is."""
    estimated = memcalc.estimate(*UNWRITTEN)

    assert estimated.source == "trace"
    assert estimated.notes[0] == (
        "memcalc has no formulas for transformers' modules of glm4_moe: their real step was traced on fake tensors"
    )
    assert estimated.ledger.totals == memcalc.trace(*UNWRITTEN, steps=2).result.ledger.totals
    with pytest.raises(InputError, match=r"PEFT puts them on the stacked experts.* On one GPU and under FSDP2"):
        memcalc.estimate(*UNWRITTEN, "data_parallel=2", "engine=ddp")
    words = [word for override in UNWRITTEN[1:] for word in ("--set", override)]
    assert main(["trace", UNWRITTEN[0], *words, "--compare"]) == 2
    assert (
        "--compare: the estimate of a model without formulas is the same trace. Leave --compare out."
        in capsys.readouterr().err
    )


def test_without_transformers_modules_without_formulas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("memcalc.tracing.trace"), "can_read_with_transformers", lambda: False)

    with pytest.raises(
        InputError, match=r"or set implementation: plain\. .* pip install 'torch>=2\.6' .*'transformers>=4\.51'"
    ):
        memcalc.estimate(*UNWRITTEN)


def test_the_spec_that_a_record_holds_is_the_run(tmp_path: Path) -> None:
    spec = memcalc.load(str(config(tmp_path, RWKV)), *RUN)

    again = memcalc.load(spec.model_dump(mode="json"))

    assert again.model == spec.model
    assert (spec.model.num_layers, spec.model.hidden_size, spec.model.max_position_embeddings) == (2, 64, 128)
    assert spec.model.num_attention_heads == 1  # it has none
    assert spec.training.implementation == "huggingface"


@pytest.mark.usefixtures("in_this_process")
def test_a_variant_of_a_known_family_that_has_no_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT of 350m size keeps no final norm; the option that asks for it is another model."""
    odd = {"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 256}
    odd |= {"_remove_final_layer_norm": True, "vocab_size": 512, "word_embed_proj_dim": 64}

    assert memcalc.estimate(str(config(tmp_path, odd)), *RUN).parameters == parameters_of(odd)

    monkeypatch.setattr(conversion, "can_read_with_transformers", lambda: False)
    with pytest.raises(InputError, match=r"_remove_final_layer_norm.*variant of opt.*False, the only modelled value"):
        memcalc.load(str(config(tmp_path, odd)))


@pytest.mark.parametrize(
    ("data", "overrides", "message"),
    [
        (
            BIOGPT,
            ("attention=flash",),
            "no kernel for the attention of biogpt. Set training.attention: memory-efficient",
        ),
        (RWKV, ("attention=flash",), "transformers' rwkv does not support PyTorch's fused attention kernels"),
        (BIOGPT, ("l=3",), "num_layers = 3, but the config.json of biogpt says 2. Change the config.json"),
        (RWKV, ("s=256",), "sequence_length = 256 is longer than the 128 positions of the config.json"),
        (BIOGPT, ("dropout=0.1",), "biogpt takes its rates from config.json only"),
        (BIOGPT, ("implementation=plain",), "only transformers knows biogpt. Set implementation: huggingface"),
        (BIOGPT | {"hidden_act": "sillu"}, (), "transformers' code of biogpt stops: KeyError: 'sillu'"),
        (BIOGPT | {"num_attention_heads": 7}, (), "transformers' code of biogpt stops: ValueError: "),
        (BIOGPT | {"num_hidden_layers": "two"}, (), "transformers rejects the configuration: "),
        (SMALL | {"model_type": "t5"}, (), "memcalc has no formulas for the model family 't5', and transformers"),
    ],
)
def test_what_cannot_be_is_said_once(
    data: dict[str, Any],
    overrides: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [word for override in (*RUN, *overrides) for word in ("--set", override)]

    assert main(["trace", str(config(tmp_path, data)), *given]) == 2

    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "verb", [["fit", "--gpu", "h100-80gb"], ["sweep", "--vary", "b=1..2"], ["recompute", "--gpu", "h100-80gb"]]
)
def test_commands_with_formulas_only_name_the_trace(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(config(tmp_path, BIOGPT))

    assert main([verb[0], source, *verb[1:]]) == 2

    assert "no formulas for biogpt. Run its real step: `memcalc trace`" in capsys.readouterr().err


def test_without_transformers_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_fallback, "can_read_with_transformers", lambda: False)

    with pytest.raises(
        InputError, match=r"for the model family 'rwkv'.* pip install 'torch>=2\.6' .*'transformers>=4\.51', then"
    ):
        memcalc.load(str(config(tmp_path, RWKV)))


@pytest.mark.parametrize(("data", "kernel"), [(BIOGPT, "flash"), (RWKV, "eager")], ids=["biogpt", "rwkv"])
def test_a_family_without_fused_attention_runs_eagerly_by_default(
    data: dict[str, Any], kernel: str, tmp_path: Path
) -> None:
    """RwkvForCausalLM._supports_sdpa is false: transformers builds it with eager attention only."""
    assert load(config(tmp_path, data)).training.attention == kernel


def test_an_encoder_decoder_without_its_class_is_not_counted_as_its_decoder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the config\.json does not name the class"):
        load(config(tmp_path, {"model_type": "whisper", "d_model": 64}))
    named = {"model_type": "whisper", "d_model": 64, "architectures": ["WhisperForCausalLM"]}

    assert load(config(tmp_path, named)).model.transformers_config is not None
