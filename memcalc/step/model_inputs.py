"""Batch for any class of transformers, made from its configuration, in the shapes of its processor.

Batches are full, without padding, so no mask is given. The inputs follow from the names of forward's arguments; the
labels follow from the class's task, the end of its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memcalc.errors import InputError
from memcalc.spec.training import TrainingSpec

IMAGE_SIDE = 448  # pixels, for a model that takes any size: 28·16, a whole number of merged patches
CHOICES = 4  # of ForMultipleChoice, as in SWAG
PIXELS, MELS, SAMPLES, TOKENS = "pixel_values", "input_features", "input_values", "input_ids"
OTHERS = "Give the batch with --inputs FILE.py:NAME, a function that returns a mapping of arguments."

# Ends of class names by their labels: one per sequence, or one per position.
OF_SEQUENCES = ("SequenceClassification", "ImageClassification", "AudioClassification", "VideoClassification")
OF_POSITIONS = (
    *("MaskedLM", "TokenClassification", "ConditionalGeneration", "CausalLM", "SpeechSeq2Seq", "Seq2SeqLM"),
    *("PreTraining", "CTC", "ImageTextToText", "LMHeadModel"),
)


def batch_for(model: Any, training: TrainingSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return arguments of a model's forward by name, with labels if it has a loss. Tensors on the CPU.

    Args:
        model: a transformers model, on any device.
        training: has the batch size b and the sequence length s, in text tokens or audio frames.
        dtype: of images and audio.

    Raises:
        InputError: the inputs cannot be derived from the configuration, or s is too short.
    """
    names = inspect.signature(model.forward).parameters
    config, b, s = model.config, training.micro_batch_size, training.sequence_length
    inputs: dict[str, Tensor] = {}
    if PIXELS in names and (model.main_input_name == PIXELS or _image_token(config) is not None):
        inputs |= _images(config, b, dtype)
    if MELS in names and hasattr(config, "max_source_positions"):
        inputs[MELS] = torch.rand(b, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
    if SAMPLES in names and model.main_input_name == SAMPLES and hasattr(config, "inputs_to_logits_ratio"):
        inputs[SAMPLES] = torch.rand(b, s * config.inputs_to_logits_ratio, dtype=dtype)
    if model.main_input_name == TOKENS:
        inputs |= _tokens(config, names, b, s, inputs, type(model).__name__)
    if not inputs:
        raise InputError(
            f"the inputs of {type(model).__name__} do not follow from its config.json.", OTHERS, "architectures"
        )
    return inputs | _labels(model, names, b, s, inputs)


def _tokens(
    config: Any, names: Mapping[str, Any], b: int, s: int, inputs: Mapping[str, Tensor], name: str
) -> dict[str, Tensor]:
    vocabulary = config.get_text_config(decoder=True).vocab_size
    if name.endswith("MultipleChoice"):
        return {TOKENS: torch.randint(vocabulary, (b, CHOICES, s))}
    tokens = torch.randint(vocabulary, (b, s))
    image = _image_token(config)
    if image is None or PIXELS not in inputs:
        return {TOKENS: tokens}
    length = _image_tokens(config, inputs)
    if length >= s:
        raise InputError(
            f"sequence_length = {s} is not longer than the {length} tokens of an image.",
            f"Set training.sequence_length to more than {length}, or give smaller images with --inputs.",
            "training.sequence_length",
        )
    # Text tokens must not be image or video tokens: those come first, one image per sequence.
    special = [getattr(config, key, None) for key in ("video_token_id", "image_token_id", "image_token_index")]
    ordinary = next(token for token in range(vocabulary) if token not in special)
    tokens[sum((tokens == token for token in special if token is not None), torch.zeros_like(tokens)).bool()] = ordinary
    tokens[:, :length] = image
    kinds = torch.zeros_like(tokens)
    kinds[:, :length] = 1
    extra = {key: kinds.clone() for key in ("mm_token_type_ids", "token_type_ids") if key in names}
    return {TOKENS: tokens, **extra}


def _images(config: Any, b: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return one image per sequence."""
    vision = getattr(config, "vision_config", config)
    channels: Any = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    merge = getattr(vision, "spatial_merge_size", None)
    side: Any = getattr(vision, "image_size", None)
    if merge is not None and side is None:  # Qwen's format: patches as rows, and the grid that they form
        patch, frames = vision.patch_size, vision.temporal_patch_size
        rows = IMAGE_SIDE // patch
        rows -= rows % merge
        grid = torch.tensor([[1, rows, rows]] * b)
        return {
            PIXELS: torch.rand(b * rows * rows, channels * frames * patch * patch, dtype=dtype),
            "image_grid_thw": grid,
        }
    if side is None:
        side = IMAGE_SIDE // 2  # 224, the training size of convolutional networks
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return {PIXELS: torch.rand(b, channels, height, width, dtype=dtype)}


def _image_token(config: Any) -> int | None:
    found: int | None = getattr(config, "image_token_id", None)
    return found if found is not None else getattr(config, "image_token_index", None)


def _image_tokens(config: Any, inputs: Mapping[str, Tensor]) -> int:
    """Return the number of tokens that represent one image."""
    vision = config.vision_config
    if "image_grid_thw" in inputs:
        return int(inputs["image_grid_thw"][0].prod()) // int(vision.spatial_merge_size) ** 2
    fixed = getattr(config, "mm_tokens_per_image", None)
    if fixed is not None:
        return int(fixed)
    height, width = inputs[PIXELS].shape[-2:]
    patches: int = (height // vision.patch_size) * (width // vision.patch_size)
    # LLaVA's "default" drops the class token, "full" keeps it.
    keeps_class = getattr(config, "vision_feature_select_strategy", "default") == "full"
    return patches + 1 if keeps_class else patches


def _labels(model: Any, names: Mapping[str, Any], b: int, s: int, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    config, name = model.config, type(model).__name__
    if name.endswith("QuestionAnswering") and "start_positions" in names:
        return {key: torch.zeros(b, dtype=torch.long) for key in ("start_positions", "end_positions")}
    if name.endswith("MaskedImageModeling"):
        patches = (config.image_size // config.patch_size) ** 2
        return {"bool_masked_pos": torch.ones(b, patches, dtype=torch.bool)}
    if "labels" not in names:
        return {}
    found: dict[str, Tensor] = {}
    if name.endswith(OF_SEQUENCES):
        one = config.num_labels == 1
        found["labels"] = torch.zeros(b, dtype=torch.float if one else torch.long)
    elif name.endswith(("MultipleChoice", "NextSentencePrediction")):
        found["labels"] = torch.zeros(b, dtype=torch.long)
    elif name.endswith(OF_POSITIONS):
        text = config.get_text_config(decoder=True)
        length = s if TOKENS in inputs else min(s, getattr(config, "max_target_positions", s))
        classes = config.num_labels if name.endswith("TokenClassification") else text.vocab_size
        found["labels"] = torch.randint(classes, (b, length))
    for further in ("next_sentence_label", "sentence_order_label"):
        if further in names and "labels" in found:
            found[further] = torch.zeros(b, dtype=torch.long)
    return found
