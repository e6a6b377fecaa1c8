"""The classes of transformers, built from a spec with random weights."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from memcalc.errors import InputError, Unavailable
from memcalc.spec.hardware.kernels import kernel_for_heads
from memcalc.spec.layers import masks_images
from memcalc.spec.model import ModelSpec
from memcalc.spec.model_families.conversion import family_of, put_at, rules_of
from memcalc.spec.model_families.field_types import PROBABILITIES
from memcalc.spec.model_families.files import family_named
from memcalc.spec.model_families.inverse import write_hf_config
from memcalc.spec.model_families.multimodal import LANGUAGE_FAMILIES
from memcalc.spec.model_families.transformers_fallback import configuration, fallback_family, sizes_of
from memcalc.spec.recompute_plan import Segment, has_segments, leaves
from memcalc.spec.spec import Spec
from memcalc.spec.towers import tower_trains
from memcalc.step.causal_lm import CausalLM
from memcalc.step.dtypes import weight_dtype
from memcalc.step.recompute import plan_of, recomputed_layers, run_plan
from memcalc.step.reference.attention import CPU_BACKENDS, CUDA_BACKENDS
from memcalc.step.unsupported import stopped


def _widen(module: torch.nn.Module, modules: tuple[str, ...]) -> None:
    """Upcast modules to fp32, given by their names in a memcalc configuration."""
    ends = {"embed_tokens": "get_input_embeddings", "lm_head": "get_output_embeddings"}
    found = [getattr(module, ends[name])() for name in modules if name in ends]
    if "norm" in modules:
        found += [part for part in module.modules() if type(part).__name__.endswith("Norm")]
    for part in found:
        part.to(torch.float32)


def build_huggingface(spec: Spec, place: torch.device, device: torch.device) -> CausalLM:
    """Return AutoModelForCausalLM for the spec's architecture, with weights on `place`, to be run on `device`.

    With a vision tower, AutoModelForImageTextToText for text alone.

    Raises:
        InputError: the architecture is unknown, or does not support the requested settings.
    """
    training = spec.training
    config = build_config(spec)
    kernel = "eager" if training.attention == "eager" else "sdpa"
    sees = spec.model.vision_config is not None
    automatic = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    with place:
        try:
            module = automatic.from_config(config, dtype=weight_dtype(training), attn_implementation=kernel)
        except Exception as error:
            if kernel == "eager" or not isinstance(error, ValueError):
                if spec.model.transformers_config is not None:
                    raise stopped(spec, error) from error
                raise
            raise InputError(
                f"transformers' {config.model_type} does not support PyTorch's fused attention kernels.",
                "Set training.attention: eager, or use `memcalc estimate`.",
                "training.attention",
            ) from error
    _widen(module, training.fp32_modules)
    module.train()
    if sees and not tower_trains(spec.model, training):
        freeze_tower(module)
    replaced = liger_modules(module) if training.kernels == "liger" else nullcontext
    if getattr(module, "loss_type", None) is None:
        module.loss_type = "ForCausalLM"  # the fallback of transformers, without its warning
    switch_recompute(module, spec)
    backends = CPU_BACKENDS
    if kernel == "sdpa" and device.type == "cuda":
        backends = list(dict.fromkeys((CUDA_BACKENDS[training.attention], SDPBackend.EFFICIENT_ATTENTION)))
        others = needs_masks(config, spec) or masks_images(spec.model) or other_kernel_for_full_heads(spec)
        backends = backends if others else backends[:1]
    windows = windows_of_the_kernel if training.attention_windows == "kernel" else nullcontext

    @contextmanager
    def surroundings() -> Iterator[None]:
        kernels = nullcontext() if kernel == "eager" else sdpa_kernel(backends)
        with one_sequence_a_row(), windows(), replaced(), kernels:
            yield

    def of_text(input_ids: Tensor) -> dict[str, Tensor]:
        # Gemma 3 wants to know in training which tokens are those of images.
        return {"token_type_ids": torch.zeros_like(input_ids)} if config.model_type == "gemma3" else {}

    def logits(input_ids: Tensor) -> Tensor:
        return module(input_ids=input_ids, use_cache=False, **of_text(input_ids)).logits  # type: ignore[no-any-return]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = module.loss_function(logits=logits, labels=labels, vocab_size=spec.model.vocab_size)
        return found

    # the prefix of Llama4ForCausalLM is that of the vision-language model, which it is not
    decoder = module.model if module.base_model is module else module.base_model

    def hidden(input_ids: Tensor) -> Tensor:
        found = decoder(input_ids=input_ids, use_cache=False, **of_text(input_ids))
        return found.last_hidden_state  # type: ignore[no-any-return]

    return CausalLM(module, logits, loss, surroundings, hidden, module.get_output_embeddings)


def freeze_tower(module: nn.Module) -> None:
    """Freeze everything but the language model and the LM head."""
    for name, parameter in module.named_parameters():
        if "language_model." not in name and not name.startswith("lm_head."):
            parameter.requires_grad_(False)


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Skip the search of transformers for several packed sequences in one row.

    The search copies position ids to the CPU. Its result is known. On a device that computes no values it would find
    packed sequences, and the resulting mask would rule out the flash kernel.
    """
    name = "find_packed_sequence_indices"
    search = getattr(masking_utils, name, None)
    if search is None:  # older transformers does not search
        yield
        return
    setattr(masking_utils, name, lambda _: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, search)


def needs_masks(config: Any, spec: Spec) -> bool:
    """Return whether the sequence fills a window implemented by a mask, which flash attention does not support."""
    window: int | None = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    masks = spec.training.attention_windows == "mask"
    return masks and window is not None and spec.training.sequence_length >= window


def other_kernel_for_full_heads(spec: Spec) -> bool:
    """Return whether layers with the heads of `full_attention` cannot use the requested kernel."""
    full, attention = spec.model.full_attention, spec.training.attention
    return full is not None and kernel_for_heads(attention, full.head_dim) != attention


@contextmanager
def windows_of_the_kernel() -> Iterator[None]:
    """Make no mask for a window, as with kernels that take the window's length."""
    name = "_ignore_causal_mask_sdpa"
    decide = getattr(masking_utils, name)

    def unwindowed(mask: Any, queries: int, keys: int, first: int, kept: int, window: int | None = None) -> bool:  # noqa: ARG001
        return decide(mask, queries, keys, first, kept)  # type: ignore[no-any-return]

    setattr(masking_utils, name, unwindowed)
    try:
        yield
    finally:
        setattr(masking_utils, name, decide)


def switch_recompute(module: nn.Module, spec: Spec) -> None:
    """Enable the gradient checkpointing of transformers on the layers that the spec selects."""
    if spec.training.recompute == "selective":
        raise InputError(
            "transformers recomputes whole layers, but recompute = selective.",
            "Set recompute: none, full, every-k or a list of layers, or implementation: plain.",
            "training.recompute",
        )
    recomputed = recomputed_layers(spec.training, spec.model.num_layers)
    if not recomputed:
        return
    every = spec.training.recompute == "full"  # includes encoders, which num_layers does not count
    layers = layers_of_text(module, sees=spec.model.vision_config is not None)
    if has_segments(spec.training.recompute):
        join_layers(layers, plan_of(spec.training, spec.model.num_layers))
        return
    options = {"use_reentrant": spec.training.reentrant_checkpoints}
    # The second name is the one before transformers 5.23.
    new_name = hasattr(module, "activation_checkpointing_enable")
    enable = getattr(module, "activation_checkpointing_enable" if new_name else "gradient_checkpointing_enable")
    enable(options)
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = every or index in recomputed


def layers_of_text(module: nn.Module, *, sees: bool) -> list[GradientCheckpointingLayer]:
    """Return the layers that transformers can recompute; of a vision-language model, those of its language model."""
    return [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, GradientCheckpointingLayer) and (not sees or "language_model." in name)
    ]


def join_layers(layers: Sequence[nn.Module], plan: Segment) -> None:
    """Group layers into checkpoint segments: the first layer runs the segment, the others return their input.

    Raises:
        InputError: the layers have several types, which get different masks from their caller.
    """
    kinds = {getattr(getattr(layer, "self_attn", None), "is_sliding", None) for layer in layers}
    if len(kinds) > 1:
        raise InputError(
            "recompute has a segment of different layers: some use a sliding window, some full attention.",
            "Recompute each layer separately, or set implementation: plain.",
            "training.recompute",
        )
    forwards: list[Callable[..., Any]] = [layer.forward for layer in layers]
    for item in plan:
        if isinstance(item, tuple):
            first, *others = leaves(item)
            layers[first].forward = partial(_run_segment, item, forwards)
            for other in others:
                layers[other].forward = _hand_on


def _run_segment(
    item: Segment, forwards: list[Callable[..., Any]], hidden: Tensor, *rest: Any, **options: Any
) -> Tensor:
    def run(layer: int, x: Tensor) -> Tensor:
        made = forwards[layer](x, *rest, **options)
        return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]

    return run_plan((item,), hidden, run)


def _hand_on(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def build_config(spec: Spec) -> Any:
    """Return the transformers configuration with the spec's sizes, from the data used to read its family.

    Raises:
        InputError: the class of transformers has no such variant.
    """
    model, rate = spec.model, spec.training.dropout
    if model.transformers_config is not None:
        return foreign_config(model)
    if rate is not None and model.architecture is not None:
        dropouts = PROBABILITIES & rules_of(family_of(model.architecture)).keys()
        model = model.model_copy(update=dict.fromkeys(dropouts, rate))
    keys = write_hf_config(model)
    family = keys.pop("model_type")
    further = FURTHER[family](spec) if family in FURTHER else {}
    # No text is generated, and the default token ids may be outside a small vocabulary.
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if model.vision_config is not None:
        tokens["pad_token_id"] = 0  # Gemma4Model.forward writes it in place of image tokens
        return vision_language_config(
            model.vision_config, {**keys, **further, **tokens, "use_cache": False}, model.rotary_dim or model.head_dim
        )
    try:
        return transformers.AutoConfig.for_model(family, **keys, **further, **tokens, use_cache=False)
    except Exception as error:
        if not isinstance(error.__cause__, TypeError):  # of a field's value (huggingface_hub/dataclasses.py)
            raise
        raise InputError(
            f"transformers' {family} has no such configuration: {error.__cause__}.",
            "Change the field, or set implementation: plain.",
            "model",
        ) from error


def vision_language_config(text: str, language: dict[str, Any], rotary_dim: int) -> Any:
    """Return the configuration of a vision-language model with these keys of its language model.

    Args:
        text: its config.json.
        language: keys of the language model.
        rotary_dim: the rotated features of a head; the sections of a multimodal RoPE divide half of them.
    """
    whole = json.loads(text)
    family = whole.pop("model_type")
    own = whole.get("text_config") or {}
    if "model_type" in own and family not in LANGUAGE_FAMILIES:
        language["model_type"] = own["model_type"]
    if family in LANGUAGE_FAMILIES:  # the keys lack values equal to the defaults of the family, not of the class
        filled: dict[str, Any] = {}
        for key, value in family_named(LANGUAGE_FAMILIES[family]).defaults.items():
            if value is not None:
                put_at(filled, key, value)
        language = filled | language
    third = rotary_dim // 2 // 3  # any sections take the same memory
    if family in SECTIONED:
        sections = [rotary_dim // 2 - 2 * third, third, third]
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        language["rope_parameters"] = language.get("rope_parameters", {}) | rope
    tied = language.pop("tie_word_embeddings", None)
    kept = {key: whole[key] for key in ("vision_config", *PROJECTOR) if key in whole}
    built = transformers.AutoConfig.for_model(family, text_config=language, **kept)
    if tied is not None:
        for each in (built, built.text_config):
            each.tie_word_embeddings = tied
    return built


# Families with RoPE over time, height and width, and the keys of a projector at the top level of config.json.
SECTIONED = ("glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
PROJECTOR = (
    *("spatial_merge_size", "multimodal_projector_bias", "projector_hidden_act"),
    *("vision_feature_layer", "projection_hidden_size"),
)


def foreign_config(model: ModelSpec) -> Any:
    """Return the configuration of a family without formulas, as in its config.json.

    Raises:
        InputError: the spec's sizes differ from those in the file.
    """
    assert model.transformers_config is not None
    config = configuration(model.transformers_config, "model.transformers_config")
    for field, theirs in sizes_of(config, model.transformers_config, "model").items():
        if (ours := getattr(model, field)) != theirs:
            raise InputError(
                f"{field} = {ours}, but the config.json of {fallback_family(model)} says {theirs}.",
                "Change the config.json: other values may follow in that family's own code.",
                f"model.{field}",
            )
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if each is not None:
            each.use_cache = False
    return config


# Keys that change no size of the spec, but select a kernel or must agree with the number of layers.
FURTHER: dict[str, Callable[[Spec], dict[str, Any]]] = {
    "gpt_neo": lambda spec: {"attention_types": [[["global"], spec.model.num_layers]]},
}


def liger_modules(module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Give a model Liger's norms and MLPs; return a context that also gives its source module Liger's RoPE.

    Liger replaces names in the transformers module, which all other models of the process use too. They are restored
    immediately, and replaced again only while this model runs.

    Raises:
        Unavailable: liger-kernel is not installed.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unavailable("kernels = liger needs Liger, which is not installed. Run: pip install liger-kernel")
    theirs: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    file = vars(sys.modules[type(module).__module__])
    own = dict(file)
    theirs._apply_liger_kernel_to_instance(model=module, fused_linear_cross_entropy=False)  # noqa: SLF001 -- as Trainer
    patched = {name: value for name, value in file.items() if own.get(name) is not value}
    original = {name: own[name] for name in patched}
    file.update(original)

    @contextmanager
    def replaced() -> Iterator[None]:
        file.update(patched)
        try:
            yield
        finally:
            file.update(original)

    return replaced
