"""UNets and diffusion transformers of diffusers, built from their config.json with random weights.

The step is that of diffusers' training scripts: the model predicts the noise of latents, and the loss is the mean
squared error in fp32 (examples/text_to_image/train_text_to_image_sdxl.py at 0.35).
"""

from __future__ import annotations

import inspect
import json
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memcalc.errors import InputError
from memcalc.spec.model_families.transformers_fallback import diffusers_class
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec
from memcalc.step.causal_lm import CausalLM
from memcalc.step.dtypes import weight_dtype
from memcalc.step.model_inputs import OTHERS
from memcalc.step.unsupported import stopped

TEXT_TOKENS = 77  # prompt length of CLIP, the text encoder of Stable Diffusion
LONG_TEXT_TOKENS = 512  # prompt length of T5 in Flux; Stable Diffusion 3 joins CLIP and T5 to 333
JOINT_TEXT_TOKENS = 333
TIME_IDS = 6  # original size, crop and target size of an image: two numbers each
TARGET = "target"  # key in the batch of the noise, which is no argument of forward


def build_diffusion(spec: Spec, place: torch.device, device: torch.device) -> CausalLM:
    """Return the class of diffusers that the spec's config.json names, with weights on `place`, to be run on `device`.

    Raises:
        InputError: the code of diffusers fails, or it does not support the requested settings.
    """
    from memcalc.step.any_model import attention_backends  # imported late: that module imports this one
    from memcalc.step.causal_lm import default_dtype

    training, text = spec.training, spec.model.transformers_config
    assert text is not None
    kind = diffusers_class(text, "model.transformers_config")
    config = {key: value for key, value in json.loads(text).items() if not key.startswith("_")}
    with place, default_dtype(weight_dtype(training)):
        try:
            module = kind.from_config(config)
        except Exception as error:
            raise stopped(spec, error) from error
    module.train()
    if training.recompute not in ("none", "full"):
        raise InputError(
            f"diffusers recomputes all blocks or none, but recompute = {training.recompute}.",
            "Set recompute: none or full.",
            "training.recompute",
        )
    if training.recompute == "full":
        module.enable_gradient_checkpointing()
    if training.attention == "eager" and hasattr(module, "set_attn_processor"):
        from diffusers.models.attention_processor import AttnProcessor

        module.set_attn_processor(AttnProcessor())
    targets: list[Tensor] = []  # of the current step

    def predict(batch: dict[str, Any]) -> Tensor:
        targets[:] = [batch[TARGET]]
        found: Tensor = module(**{key: value for key, value in batch.items() if key != TARGET}).sample
        return found

    def loss(predicted: Tensor, _: Tensor) -> Tensor:
        return functional.mse_loss(predicted.float(), targets.pop().float())

    return CausalLM(
        module,
        predict,
        loss,
        partial(attention_backends, training, device),
        batch=lambda: latents_for(module, training, weight_dtype(training)),
    )


def latents_for(module: Any, training: TrainingSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Return noisy latents and their conditions by the names of forward's arguments, and the noise. On the CPU.

    Args:
        module: a model of diffusers, on any device.
        training: has the batch size.
        dtype: of all floating-point tensors.

    Raises:
        InputError: the inputs cannot be derived from the configuration.
    """
    names, config, b = inspect.signature(module.forward).parameters, module.config, training.micro_batch_size
    latents = "sample" if "sample" in names else "hidden_states"
    side: Any = getattr(config, "sample_size", None)
    channels: Any = getattr(config, "in_channels", None)
    if channels is None or (side is None and "img_ids" not in names):
        raise InputError(f"the inputs of {type(module).__name__} do not follow from its config.json.", OTHERS, "model")
    made: dict[str, Any] = {"timestep": torch.zeros(b, dtype=torch.long)}
    if "img_ids" in names:  # Flux: latents of a 1024 x 1024 image, a sequence of 64 x 64 patches
        patches = 64 * 64
        made[latents] = torch.rand(b, patches, channels, dtype=dtype)
        made |= {"img_ids": torch.zeros(patches, 3), "txt_ids": torch.zeros(LONG_TEXT_TOKENS, 3)}
        made["timestep"] = torch.zeros(b, dtype=dtype)
        if getattr(config, "guidance_embeds", False):
            made["guidance"] = torch.ones(b)
    else:
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        made[latents] = torch.rand(b, channels, height, width, dtype=dtype)
    out = getattr(config, "out_channels", None) or channels
    shape = (*made[latents].shape[:2], out) if "img_ids" in names else (b, out, *made[latents].shape[2:])
    made[TARGET] = torch.rand(shape, dtype=dtype)
    return made | _conditions(names, config, b, dtype)


def _conditions(names: Any, config: Any, b: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the text embeddings, classes and image sizes that the model takes."""
    made: dict[str, Any] = {}
    joint: Any = getattr(config, "joint_attention_dim", None)
    cross: Any = getattr(config, "cross_attention_dim", None)
    if "encoder_hidden_states" in names and (joint or cross):
        tokens = LONG_TEXT_TOKENS if "img_ids" in names else JOINT_TEXT_TOKENS if joint else TEXT_TOKENS
        size = joint or (cross[0] if isinstance(cross, (list, tuple)) else cross)
        made["encoder_hidden_states"] = torch.rand(b, tokens, size, dtype=dtype)
    if "pooled_projections" in names:
        made["pooled_projections"] = torch.rand(b, config.pooled_projection_dim, dtype=dtype)
    if getattr(config, "addition_embed_type", None) == "text_time":
        pooled = config.projection_class_embeddings_input_dim - TIME_IDS * config.addition_time_embed_dim
        text, times = torch.rand(b, pooled, dtype=dtype), torch.zeros(b, TIME_IDS, dtype=dtype)
        made["added_cond_kwargs"] = {"text_embeds": text, "time_ids": times}
    if getattr(config, "num_embeds_ada_norm", None) and "class_labels" in names:
        made["class_labels"] = torch.zeros(b, dtype=torch.long)
    return made
