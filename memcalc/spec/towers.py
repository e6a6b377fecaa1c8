"""Parameters of vision towers and their projectors, from the config.json of a vision-language model.

Names and shapes are those of transformers 5.23, models/<model_type>/modeling_<model_type>.py, and of the encoders that
it builds: models/siglip, models/pixtral and models/clip. Defaults are those of the configuration classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from memcalc.errors import InputError

if TYPE_CHECKING:
    from memcalc.spec.model import ModelSpec
    from memcalc.spec.training import TrainingSpec

VISION = "vision."  # prefix of the modules


class TowerParameter(NamedTuple):
    """One parameter tensor of a vision tower, and the number of layers that have one of this shape."""

    module: str  # its module; `layers.*` stands for all layers of the tower
    tensor: Literal["weight", "bias", "table"]  # "weight" or "bias"; "table" for a matrix that is no linear layer's
    shape: tuple[int, ...]  # sizes of its axes; of a linear layer [out, in]
    layers: int = 1  # number of such tensors


class _Tower:
    """Collects the parameters of one tower.

    Args:
        vision: the object `vision_config`, with the defaults of its class.
        config: of the whole model.
        text: the config of the language model.
    """

    def __init__(self, vision: Mapping[str, Any], whole: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        self.vision, self.config, self.text = vision, whole, text
        self.parameters: list[TowerParameter] = []

    def size(self, key: str) -> int:
        """Return a size of the tower.

        Raises:
            InputError: it is not a whole number from 1.
        """
        return _checked(self.vision.get(key), f"vision_config.{key}")

    @property
    def text_size(self) -> int:
        """The hidden size of the language model."""
        return _checked(self.text.get("hidden_size"), "text_config.hidden_size")

    @property
    def layers(self) -> int:
        """The number of the tower's layers."""
        return self.size("depth" if "depth" in self.vision else "num_hidden_layers")

    def tensor(self, module: str, *shape: int, layers: int = 1, tensor: Literal["weight", "bias"] = "weight") -> None:
        """Add one tensor that belongs to no linear layer, or a bias."""
        kind = "table" if len(shape) == len(("rows", "columns")) else tensor
        self.parameters.append(TowerParameter(VISION + module, kind, shape, layers))

    def linear(self, module: str, out: int, into: int, *, layers: int = 1, bias: bool = True) -> None:
        """Add torch.nn.Linear."""
        self.parameters.append(TowerParameter(VISION + module, "weight", (out, into), layers))
        if bias:
            self.tensor(module, out, layers=layers, tensor="bias")

    def conv(self, module: str, out: int, *kernel: int, bias: bool = True) -> None:
        """Add torch.nn.Conv2d or Conv3d; `kernel` begins with the input channels."""
        self.tensor(module, out, *kernel)
        if bias:
            self.tensor(module, out, tensor="bias")

    def layer_norm(self, module: str, width: int, *, layers: int = 1) -> None:
        """Add torch.nn.LayerNorm."""
        self.tensor(module, width, layers=layers)
        self.tensor(module, width, layers=layers, tensor="bias")

    def plain_layers(
        self,
        width: int,
        inner: int,
        attention: tuple[str, ...],
        *,
        norm: str = "layernorm",
        order: tuple[str, ...] = ("norm1", "norm2", "attention", "mlp"),
    ) -> None:
        """Add layers with two norms, attention, and an MLP of two linear layers (three with RMSNorm).

        `attention` names the projections; "qkv" is one of all three. RMSNorm layers have no bias unless it is stated.
        `order` is that of the constructor.
        """
        layers = self.layers
        gated = norm != "layernorm"
        bias = norm in ("layernorm", "rmsnorm with biases")
        for part in order:
            if part == "attention":
                for name in attention:
                    out = 3 * width if name == "qkv" else width
                    self.linear(f"layers.*.attention.{name}", out, width, layers=layers, bias=bias)
            elif part == "mlp":
                for name in ("gate_proj", "up_proj") if gated else ("fc1",):
                    self.linear(f"layers.*.mlp.{name}", inner, width, layers=layers, bias=bias)
                down = "down_proj" if gated else "fc2"
                self.linear(f"layers.*.mlp.{down}", width, inner, layers=layers, bias=bias)
            elif gated:
                self.tensor(f"layers.*.{part}", width, layers=layers)
            else:
                self.layer_norm(f"layers.*.{part}", width, layers=layers)


APART = ("k_proj", "v_proj", "q_proj", "out_proj")
# Parts of a layer in the order of its constructor.
CLIPS = ("attention", "norm1", "mlp", "norm2")
LLAMA4S = ("attention", "mlp", "norm1", "norm2")
PIXTRALS = ("norm1", "mlp", "attention", "norm2")
SIGLIPS = ("norm1", "attention", "norm2", "mlp")
JOINED = ("qkv", "proj")


def _patches(tower: _Tower, width: int, *, bias: bool) -> None:
    """Qwen's patch embedding: a three-dimensional convolution over frames, height and width."""
    patch = tower.size("patch_size")
    tower.conv(
        "patch_embed", width, tower.size("in_channels"), tower.size("temporal_patch_size"), patch, patch, bias=bias
    )


def _merger(tower: _Tower, module: str, width: int, out: int, *, norm: int) -> None:
    """Qwen's PatchMerger: a LayerNorm (of `norm` features) and two linear layers over a square of patches."""
    joined = width * tower.size("spatial_merge_size") ** 2
    tower.layer_norm(f"{module}.norm", norm)
    tower.linear(f"{module}.linear_fc1", joined, joined)
    tower.linear(f"{module}.linear_fc2", out, joined)


def _qwen2(tower: _Tower) -> None:
    width = tower.size("embed_dim")
    _patches(tower, width, bias=False)
    tower.plain_layers(width, int(width * tower.size("mlp_ratio")), JOINED)
    _merger(tower, "merger", width, tower.size("hidden_size"), norm=width)


def _qwen2_5(tower: _Tower) -> None:
    width = tower.size("hidden_size")
    _patches(tower, width, bias=False)
    tower.plain_layers(width, tower.size("intermediate_size"), JOINED, norm="rmsnorm with biases")
    joined = width * tower.size("spatial_merge_size") ** 2
    tower.tensor("merger.ln_q", width)
    tower.linear("merger.mlp.0", joined, joined)
    tower.linear("merger.mlp.2", tower.size("out_hidden_size"), joined)


def _qwen3(tower: _Tower) -> None:
    width, out = tower.size("hidden_size"), tower.size("out_hidden_size")
    _patches(tower, width, bias=True)
    tower.tensor("pos_embed", tower.size("num_position_embeddings"), width)
    tower.plain_layers(width, tower.size("intermediate_size"), JOINED)
    _merger(tower, "merger", width, out, norm=width)
    joined = width * tower.size("spatial_merge_size") ** 2
    for index in range(len(tower.vision["deepstack_visual_indexes"])):
        _merger(tower, f"deepstack_merger_list.{index}", width, out, norm=joined)


def _gemma3(tower: _Tower) -> None:
    width = tower.size("hidden_size")
    _siglip(tower, width)
    tower.tensor("projector.mm_input_projection_weight", width, tower.text_size)
    tower.tensor("projector.mm_soft_emb_norm", width)


def _gemma4(tower: _Tower) -> None:
    """Gemma4VisionModel and Gemma4MultimodalEmbedder.

    Raises:
        InputError: there is an audio tower.
    """
    if tower.config.get("audio_config") is not None:
        raise InputError("memcalc models towers without audio.", "", "audio_config")
    width, inner, head = tower.size("hidden_size"), tower.size("intermediate_size"), tower.size("head_dim")
    layers = tower.layers
    tower.linear("patch_embedder.input_proj", width, 3 * tower.size("patch_size") ** 2, bias=False)
    tower.tensor("patch_embedder.position_embedding_table", 2, tower.size("position_embedding_size"), width)
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        tower.tensor(f"layers.*.{name}_layernorm", width, layers=layers)
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        tower.linear(f"layers.*.attention.{name}_proj", tower.size(heads) * head, width, layers=layers, bias=False)
    for name in ("q_norm", "k_norm"):
        tower.tensor(f"layers.*.attention.{name}", head, layers=layers)
    query = tower.size("num_attention_heads") * head
    tower.linear("layers.*.attention.o_proj", width, query, layers=layers, bias=False)
    for name in ("gate_proj", "up_proj"):
        tower.linear(f"layers.*.mlp.{name}", inner, width, layers=layers, bias=False)
    tower.linear("layers.*.mlp.down_proj", width, inner, layers=layers, bias=False)
    tower.linear("projector.embedding_projection", tower.text_size, width, bias=False)


def _siglip(tower: _Tower, width: int) -> None:
    """SiglipVisionModel without its pooling head.

    Raises:
        InputError: it has the head.
    """
    if tower.vision["vision_use_head"]:
        raise InputError("memcalc models towers without a pooling head.", "", "vision_config.vision_use_head")
    patch = tower.size("patch_size")
    tower.conv("patch_embedding", width, tower.size("num_channels"), patch, patch)
    tower.tensor("position_embedding", (tower.size("image_size") // patch) ** 2, width)
    tower.plain_layers(width, tower.size("intermediate_size"), APART, order=SIGLIPS)
    tower.layer_norm("post_layernorm", width)


def _mistral3(tower: _Tower) -> None:
    width, out = tower.size("hidden_size"), tower.text_size
    patch = tower.size("patch_size")
    tower.conv("patch_conv", width, tower.size("num_channels"), patch, patch, bias=False)
    tower.tensor("ln_pre", width)
    tower.plain_layers(width, tower.size("intermediate_size"), APART, norm="rmsnorm", order=PIXTRALS)
    tower.tensor("projector.norm", width)
    merged = width * _checked(tower.config.get("spatial_merge_size", 2), "spatial_merge_size") ** 2
    tower.linear("projector.patch_merger", width, merged, bias=False)
    bias = bool(tower.config.get("multimodal_projector_bias", False))
    tower.linear("projector.linear_1", out, width, bias=bias)
    tower.linear("projector.linear_2", out, out, bias=bias)


def _llava(tower: _Tower) -> None:
    width, out, patch = tower.size("hidden_size"), tower.text_size, tower.size("patch_size")
    tower.tensor("class_embedding", width)
    tower.conv("patch_embedding", width, tower.size("num_channels"), patch, patch, bias=False)
    tower.tensor("position_embedding", (tower.size("image_size") // patch) ** 2 + 1, width)
    tower.layer_norm("pre_layrnorm", width)
    tower.plain_layers(width, tower.size("intermediate_size"), APART, order=CLIPS)
    tower.layer_norm("post_layernorm", width)
    chosen = tower.config.get("vision_feature_layer", -2)
    bias = bool(tower.config.get("multimodal_projector_bias", True))
    tower.linear("projector.linear_1", out, width * (len(chosen) if isinstance(chosen, list) else 1), bias=bias)
    tower.linear("projector.linear_2", out, out, bias=bias)


def _llama4(tower: _Tower) -> None:
    width, patch = tower.size("hidden_size"), tower.size("patch_size")
    tower.tensor("class_embedding", width)
    tower.tensor("positional_embedding_vlm", (tower.size("image_size") // patch) ** 2 + 1, width)
    tower.linear("patch_embedding", width, tower.size("num_channels") * patch**2, bias=False)
    tower.layer_norm("layernorm_pre", width)
    tower.layer_norm("layernorm_post", width)
    tower.plain_layers(width, tower.size("intermediate_size"), APART, order=LLAMA4S)
    out = tower.size("projector_output_dim")
    tower.linear(
        "vision_adapter.mlp.fc1", tower.size("projector_input_dim"), tower.size("intermediate_size"), bias=False
    )
    tower.linear("vision_adapter.mlp.fc2", out, out, bias=False)
    tower.linear("projector.linear_1", tower.text_size, tower.size("vision_output_dim"), bias=False)


def _glm4(tower: _Tower) -> None:
    width, out, inner = tower.size("hidden_size"), tower.size("out_hidden_size"), tower.size("intermediate_size")
    patch, merge = tower.size("patch_size"), tower.size("spatial_merge_size")
    tower.tensor("position_embedding", (tower.size("image_size") // patch) ** 2, width)
    _patches(tower, width, bias=True)
    tower.plain_layers(width, out, JOINED, norm="rmsnorm")
    tower.linear("merger.proj", out, out, bias=False)
    tower.layer_norm("merger.post_projection_norm", out)
    for name in ("gate_proj", "up_proj"):
        tower.linear(f"merger.{name}", inner, out, bias=False)
    tower.linear("merger.down_proj", out, inner, bias=False)
    tower.tensor("post_conv_layernorm", width)
    tower.conv("downsample", out, width, merge, merge)
    tower.tensor("post_layernorm", width)


def _kimi(tower: _Tower) -> None:
    width, patch = tower.size("hidden_size"), tower.size("patch_size")
    tower.conv("patch_embed", width, 3, patch, patch)
    tower.tensor("position_embeddings", tower.size("pos_emb_height"), tower.size("pos_emb_width"), width)
    tower.plain_layers(width, tower.size("intermediate_size"), ("proj", "q_proj", "k_proj", "v_proj"))
    tower.layer_norm("final_layernorm", width)
    joined = width * prod(tower.vision["merge_kernel_size"])
    tower.layer_norm(
        "projector.pre_norm", _checked(tower.config.get("projection_hidden_size", 1152), "projection_hidden_size")
    )
    tower.linear("projector.in_proj", joined, joined)
    tower.linear("projector.out_proj", tower.text_size, joined)


_QWEN = {"depth": 32, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3 = {
    **_QWEN,
    "depth": 27,
    "patch_size": 16,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
# The writer of each model's tower, and the defaults of its vision configuration.
TOWERS: dict[str, tuple[Callable[[_Tower], None], dict[str, Any]]] = {
    "gemma3": (
        _gemma3,
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_channels": 3,
            "image_size": 224,
            "patch_size": 16,
            "vision_use_head": True,
        },
    ),
    "gemma4": (
        _gemma4,
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "patch_size": 16,
            "position_embedding_size": 10240,
        },
    ),
    "glm4v": (
        _glm4,
        {
            **_QWEN,
            "depth": 24,
            "hidden_size": 1536,
            "image_size": 336,
            "out_hidden_size": 4096,
            "intermediate_size": 13696,
        },
    ),
    "kimi_k25": (
        _kimi,
        {
            "patch_size": 14,
            "pos_emb_height": 64,
            "pos_emb_width": 64,
            "num_hidden_layers": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "merge_kernel_size": (2, 2),
        },
    ),
    "llama4": (
        _llama4,
        {
            "hidden_size": 768,
            "num_hidden_layers": 34,
            "num_channels": 3,
            "intermediate_size": 5632,
            "vision_output_dim": 7680,
            "image_size": 448,
            "patch_size": 14,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
        },
    ),
    "llava": (
        _llava,
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_channels": 3,
            "image_size": 336,
            "patch_size": 14,
        },
    ),
    "mistral3": (
        _mistral3,
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_channels": 3,
            "patch_size": 14,
        },
    ),
    "qwen2_vl": (_qwen2, {**_QWEN, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4}),
    "qwen2_5_vl": (
        _qwen2_5,
        {**_QWEN, "hidden_size": 3584, "intermediate_size": 3420, "out_hidden_size": 3584},
    ),
    "qwen3_vl": (_qwen3, {**_QWEN3, "deepstack_visual_indexes": (8, 16, 24)}),
    "qwen3_vl_moe": (_qwen3, {**_QWEN3, "deepstack_visual_indexes": (8, 16, 24)}),
    "qwen3_5": (_qwen3, {**_QWEN3, "deepstack_visual_indexes": ()}),
    "qwen3_5_moe": (_qwen3, {**_QWEN3, "deepstack_visual_indexes": ()}),
}


def tower_trains(model: ModelSpec, training: TrainingSpec) -> bool:
    """Return whether a run trains a vision tower; the activations of the tower are not modelled."""
    return model.vision_config is not None and training.vision_tower == "trained" and training.finetune == "full"


@lru_cache(maxsize=64)
def makes_masks(config: str) -> bool:
    """Return whether the whole model always makes masks, in which tokens of one image attend to each other.

    transformers 5.23 models/gemma3/modeling_gemma3.py, create_masks_for_vision_model: in training, with or without
    images.
    """
    return bool(json.loads(config).get("model_type") == "gemma3")


@lru_cache(maxsize=64)
def masks_given_images(config: str) -> bool:
    """Return whether the whole model makes such masks for layers with a window where a batch has images.

    transformers 5.23 models/gemma4/modeling_gemma4.py, Gemma4Model.forward.
    """
    whole = json.loads(config)
    text = whole.get("text_config") or {}
    return bool(whole.get("model_type") == "gemma4" and text.get("use_bidirectional_attention") == "vision")


@lru_cache(maxsize=64)
def tower_parameters(config: str) -> tuple[TowerParameter, ...]:
    """Return the parameters of a vision tower and its projector.

    Args:
        config: the config.json of the whole model, as text.

    Raises:
        InputError: the model_type has no tower here, or a size of it is invalid.
    """
    whole = json.loads(config)
    model_type = whole.get("model_type")
    if model_type not in TOWERS:
        raise InputError(
            f"the vision tower of model_type = {str(model_type)[:60]!r} is not modelled.",
            f"Use one of {', '.join(TOWERS)}.",
            "model_type",
        )
    write, defaults = TOWERS[model_type]
    given = {key: value for key, value in (whole.get("vision_config") or {}).items() if value is not None}
    text = whole.get("text_config") or whole
    if model_type in ("qwen3_5", "qwen3_5_moe"):  # these classes have no such field
        given.pop("deepstack_visual_indexes", None)
    tower = _Tower(defaults | given, whole, text)
    write(tower)
    return tuple(tower.parameters)


def _checked(value: object, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 2**40:
        return value
    raise InputError(f"{str(value)[:60]!r} is not a whole number from 1 to 2^40.", "Write the size as digits.", key)
