"""Any class of transformers that `architectures` names: its batch is made, its step runs, as on the CPU to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.api import load_to_run
from memcalc.cli.app import main
from memcalc.errors import InputError
from memcalc.ledger.component import Component
from memcalc.measuring.job import Job, encoded, job_from
from memcalc.measuring.measure import measured as measured_by
from memcalc.recorder.recording import Recording
from memcalc.spec.model_families import conversion, transformers_fallback
from memcalc.spec.spec import Spec

transformers = pytest.importorskip("transformers")

from memcalc.measuring.run_process import answer  # noqa: E402 -- needs torch

TEXT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
VISION = TEXT | {"image_size": 28, "patch_size": 7}
LLAMA = TEXT | {"model_type": "llama", "vocab_size": 256, "num_key_value_heads": 2}
BERT = TEXT | {"model_type": "bert", "vocab_size": 256}
QWEN_VISION = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64}
WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 256}
WHISPER |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 50}
SPEECH = TEXT | {"conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": BERT,
    "BertForSequenceClassification": BERT,
    "BertForTokenClassification": BERT,
    "BertForQuestionAnswering": BERT,
    "BertForMultipleChoice": BERT,
    "BertForPreTraining": BERT,
    "BertModel": BERT,
    "ModernBertForMaskedLM": TEXT | TOKENS | {"model_type": "modernbert", "vocab_size": 256},
    "T5ForConditionalGeneration": {"model_type": "t5", "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    | {"d_kv": 16, "vocab_size": 256, "decoder_start_token_id": 0},
    "BartForConditionalGeneration": {"model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2}
    | {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    | {"vocab_size": 256}
    | TOKENS,
    "WhisperForConditionalGeneration": WHISPER | TOKENS | {"model_type": "whisper"},
    "ViTForImageClassification": VISION | {"model_type": "vit"},
    "LlavaForConditionalGeneration": {"model_type": "llava", "image_token_index": 200, "text_config": LLAMA}
    | {"vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 64}, "vision_feature_layer": -1},
    "Qwen2_5_VLForConditionalGeneration": TEXT
    | {"model_type": "qwen2_5_vl", "vocab_size": 256, "num_key_value_heads": 2, "image_token_id": 200}
    | {"video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203}
    | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_config": QWEN_VISION},
    "Gemma3ForConditionalGeneration": {"model_type": "gemma3", "mm_tokens_per_image": 4, "image_token_index": 200}
    | {"text_config": LLAMA | {"model_type": "gemma3_text", "head_dim": 16}}
    | {"vision_config": VISION | {"model_type": "siglip_vision_model"}},
}
WAV2VEC2 = SPEECH | {"model_type": "wav2vec2", "vocab_size": 32, "num_conv_pos_embeddings": 16}
QUICK = {"BertForMaskedLM"}
LENGTHS = {"Qwen2_5_VLForConditionalGeneration": 288}  # an image of 448 x 448 has 256 tokens
RUN = ("b=2", "recipe=fp32", "attention=eager")


def config(folder: Path, data: dict[str, Any], architecture: str | None) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(data | ({} if architecture is None else {"architectures": [architecture]})))
    return str(path)


def once(record: Callable[[Spec, int], Recording]) -> Callable[[Spec, int], Recording]:
    """Return a function that records equal runs once."""
    recorded: dict[tuple[str, int], Recording] = {}

    def recording(spec: Spec, steps: int) -> Recording:
        key = (spec.model_dump_json(), steps)
        if key not in recorded:
            recorded[key] = record(spec, steps)
        return recorded[key]

    return recording


def without_model(totals: dict[str, int]) -> dict[str, int]:
    return {phase: size for phase, size in totals.items() if phase != "model"}


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CONFIGS]
)
def test_the_step_on_fake_tensors_is_the_one_on_the_cpu(architecture: str, tmp_path: Path) -> None:
    """Real tensors and fake ones hold the same in every phase, with the kernels of the CPU.

    But for "model": how often random weights are drawn again depends on them. The measurement runs in this process.
    """
    source = config(tmp_path, CONFIGS[architecture], architecture)
    run = (*RUN, f"s={LENGTHS.get(architecture, 32)}")

    traced = memcalc.trace(source, *run, steps=1, semantics="cpu").result
    job = job_from(Job(load_to_run(source, *run), 1, "cpu", "", str(tmp_path / "events.jsonl")).line())
    measured = measured_by(job, json.loads(encoded(answer(job))), "")

    assert measured.analysis is not None
    assert traced.parameters == measured.parameters > 0
    assert without_model(traced.ledger.totals) == without_model(measured.analysis.ledger.totals)
    assert traced.textbook is None


@pytest.mark.parametrize("architecture", ["ViTForImageClassification", "Qwen2_5_VLForConditionalGeneration"])
def test_on_a_gpu_all_values_that_are_read_are_known(architecture: str, tmp_path: Path) -> None:
    source = config(tmp_path, CONFIGS[architecture], architecture)

    traced = memcalc.trace(source, "b=2", f"s={LENGTHS.get(architecture, 32)}", gpu="a100-40gb", steps=2)

    assert not any("read values" in note for note in traced.notes)
    held = traced.result.ledger.components("optimizer_step_2")
    assert held[Component.OPTIMIZER_STATE] == 8 * traced.result.parameters
    assert "Inputs made from the config.json: pixel_values (" in traced.notes[0]


def test_log_alpha_of_ctc_is_as_long_as_the_longest_target(tmp_path: Path) -> None:
    """32 frames of 20 samples, labels of 32: log alpha is fp32, b x frames x (2 · 32 + 1)."""
    source = config(tmp_path, WAV2VEC2, "Wav2Vec2ForCTC")

    events = memcalc.trace(source, "b=2", "s=32", gpu="a100-40gb", steps=1).events

    (frames,) = {event.shape[1] for event in events if event.operator == "aten._ctc_loss" and len(event.shape) == 3}
    shapes = {event.shape for event in events if event.operator == "aten._ctc_loss"}
    assert 0 < frames <= 32
    assert shapes == {(2,), (2, frames, 2 * 32 + 1)}


def test_recomputation_covers_encoder_and_decoder(tmp_path: Path) -> None:
    source = config(tmp_path, CONFIGS["T5ForConditionalGeneration"], "T5ForConditionalGeneration")

    def saved(recompute: str) -> int:
        traced = memcalc.trace(source, "b=8", "s=128", f"recompute={recompute}", gpu="a100-40gb", steps=1)
        return traced.result.ledger.components("loss_1")[Component.ACTIVATIONS]

    assert saved("full") < saved("none") / 4


INPUTS = """
import torch
def batch():
    return {"input_ids": torch.zeros(3, 17, dtype=torch.long), "labels": torch.zeros(3, 17, dtype=torch.long)}
def number():
    return 3
"""


def test_inputs_of_the_user_take_the_place_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "inputs.py"
    file.write_text(INPUTS)
    source = config(tmp_path, BERT, "BertForMaskedLM")

    traced = memcalc.trace(source, inputs=f"{file}:batch", gpu="a100-40gb", steps=1)

    assert traced.result.ledger.components("loss_1")[Component.INPUTS] == 2 * 3 * 17 * 8
    assert main(["trace", source, "--inputs", f"{file}:number"]) == 2
    assert "the function returns int, not a mapping of forward's arguments by name." in capsys.readouterr().err


def test_estimate_traces_in_a_child_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One child for both estimates of the same run: it imports torch and transformers."""
    child = import_module("memcalc.tracing.child")
    monkeypatch.setattr(child, "record_in_child", once(child.record_in_child))
    source = config(tmp_path, CONFIGS["ViTForImageClassification"], "ViTForImageClassification")

    estimated = memcalc.estimate(source, "b=2")

    assert estimated.source == "trace"
    assert estimated.notes[0] == "memcalc has no formulas for vit: its real step was traced on fake tensors"
    assert estimated.ledger.totals == memcalc.trace(source, "b=2", steps=2).result.ledger.totals
    assert main(["estimate", source, "--set", "b=2"]) == 0
    assert f"{estimated.notes[0]}.\n" in capsys.readouterr().out
    assert main(["estimate", source, "--no-trace"]) == 2
    assert "no formulas for vit. Run its real step: `memcalc trace`." in capsys.readouterr().err
    with pytest.raises(InputError, match="no formulas for vit"):
        memcalc.estimate(source, trace=False)


def test_check_never_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = config(tmp_path, CONFIGS["ViTForImageClassification"], "ViTForImageClassification")
    monkeypatch.setattr(import_module("memcalc.tracing.child"), "record_in_child", pytest.fail)

    assert main(["check", source, "--gpu", "a100-40gb"]) == 2
    assert "no formulas for vit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "architecture", "overrides", "message"),
    [
        (BERT, "BertForDreaming", (), "architectures = 'BertForDreaming' is not a model class of transformers"),
        (BERT, "pipeline", (), "architectures = 'pipeline' is not a model class of transformers"),
        (VISION | {"model_type": "vit"}, None, (), "has no causal language model of this type"),
        (BERT, "BertForMaskedLM", ("s=1024",), "sequence_length = 1024 is longer than the 512 positions"),
        (
            CONFIGS["LlavaForConditionalGeneration"],
            "LlavaForConditionalGeneration",
            ("s=16",),
            "sequence_length = 16 is not longer than the 16 tokens of an image. Set training.sequence_length to more",
        ),
        (
            VISION | {"model_type": "vit"},
            "ViTForImageClassification",
            ("recompute=selective",),
            "transformers recomputes whole layers, but recompute = selective",
        ),
        ({"model_type": "timesformer"}, "TimesformerForDreams", (), "is not a model class of transformers"),
    ],
)
def test_an_invalid_run_prints_one_message(
    data: dict[str, Any],
    architecture: str | None,
    overrides: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [word for override in overrides for word in ("--set", override)]

    assert main(["trace", config(tmp_path, data, architecture), *given]) == 2

    err = " ".join(capsys.readouterr().err.split())
    assert message in err


def test_code_of_a_repository_is_never_run(tmp_path: Path) -> None:
    """auto_map names a file beside the config.json, which must not be imported."""
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('it ran')")
    data = BERT | {"auto_map": {"AutoModelForMaskedLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"}}

    assert memcalc.trace(config(tmp_path, data, "BertForMaskedLM"), "s=32", steps=1).result.parameters > 0
    with pytest.raises(InputError, match="memcalc runs no code of a model's repository"):
        memcalc.trace(config(tmp_path, data, "Evil"), "s=32", steps=1)


def test_without_transformers_models_of_several_modalities_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (conversion, transformers_fallback):
        monkeypatch.setattr(module, "can_read_with_transformers", lambda: False)

    with pytest.raises(InputError, match=r"multimodal model.*pip install .*'transformers>="):
        load_to_run(config(tmp_path, CONFIGS["LlavaForConditionalGeneration"], "LlavaForConditionalGeneration"))


def test_formulas_read_the_language_model_and_a_trace_the_whole(tmp_path: Path) -> None:
    source = config(tmp_path, CONFIGS["LlavaForConditionalGeneration"], "LlavaForConditionalGeneration")

    assert memcalc.load(source).model.architecture == "llama"
    assert load_to_run(source).model.transformers_config is not None
    assert load_to_run("gpt2") == memcalc.load("gpt2")


def test_a_configuration_chooses_no_code() -> None:
    """`ORG/NAME` as a kernel would be downloaded from the hub and run, where the package `kernels` is installed."""
    evil: dict[str, Any] = {"attn_implementation": "evil/kernel", "_attn_implementation_internal": "evil/kernel"}
    evil |= {"auto_map": {"AutoModel": "evil--model.Model"}, "experts_implementation": "evil/kernel"}
    text = LLAMA | evil
    file = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text} | evil

    built = transformers_fallback.configuration(json.dumps(file), "config.json")

    assert "evil" not in json.dumps(built.to_dict(), default=str)
    assert built._attn_implementation is None
    assert built.text_config._attn_implementation is None


def test_a_class_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(transformers)
    ours = module.__getattr__

    def broken(self: Any, name: str) -> Any:
        if name == "BertBroken":
            raise ModuleNotFoundError(f"Could not import module {name!r}")
        return ours(self, name)

    monkeypatch.setattr(module, "__getattr__", broken)
    with pytest.raises(InputError, match="cannot import 'BertBroken': Could not import module 'BertBroken'"):
        transformers_fallback.configuration(json.dumps(BERT | {"architectures": ["BertBroken"]}), "config.json")
