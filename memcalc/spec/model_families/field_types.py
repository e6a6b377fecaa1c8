"""Types of the fields of a model family, and their validation."""

from __future__ import annotations

from memcalc.errors import InputError

# Types of fields; all other fields are sizes: whole numbers from 1. Choices result from `translate`.
BOOLEANS = frozenset(
    {
        "norm_weight",
        "norm_bias",
        "final_norm",
        "embedding_norm",
        "qkv_bias",
        "output_bias",
        "mlp_bias",
        "lm_head_bias",
        "attention_sinks",
        "qk_norm",
        "attention_gate",
        "qk_norm_weight",
        "tie_word_embeddings",
        "parallel_block",
        "fused_qkv",
        "fused_gate_up",
        "moe.shared_expert_gate",
        "linear_attention.fused_projections",
        "full_attention.keys_as_values",
        "moe.dense_mlp",
        "moe.expert_bias",
        "moe.router_bias",
        "moe.router_correction_bias",
        "moe.router_correction_parameter",
        "mamba.conv_bias",
        "mamba.projection_bias",
    }
)
PROBABILITIES = frozenset({"attention_dropout", "residual_dropout", "embedding_dropout"})
COUNTS = frozenset(
    {
        "position_embedding_offset",
        "sliding_window",
        "full_attention_interval",
        "unrotated_interval",
        "moe.shared_expert_intermediate_size",
        "moe.first_dense_layers",
        "moe.latent_size",
        "mla.q_lora_rank",
    }
)
CHOICES = frozenset(
    {
        "architecture",
        "position_embedding",
        "normalization",
        "norms_per_layer",
        "norm_placement",
        "qk_norm_width",
        "mlp",
        "gelu",
    }
)
# Sizes of the family rather than of one of its checkpoints.
WINDOWS = frozenset({"sliding_window", "full_attention_interval", "unrotated_interval"})
LAYERS = frozenset({"moe.dense_layers", "full_attention_layers", "unrotated_layers"})

_LARGEST_SIZE = 2**40


def kind_of(field: str) -> str:
    """Return the type of one of memcalc's fields; see `checked`."""
    if field in BOOLEANS:
        return "boolean"
    if field in PROBABILITIES:
        return "probability"
    if field in LAYERS:
        return "layers"
    return "count" if field in COUNTS else "size"


def checked(key: str, value: object, value_type: str, where: str) -> object:
    """Return `value` if it has the type; Booleans are not numbers, and strings are never converted."""
    if value_type == "boolean":
        if isinstance(value, bool):
            return value
        rule, remedy = "is neither true nor false.", "Write true or false, without quotes."
    elif value_type == "probability":
        # NaN fails both comparisons.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
            return float(value)
        rule, remedy = "is not a dropout rate: a number from 0 to below 1.", "Write a number such as 0.1."
    elif value_type == "share":
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
            return float(value)
        rule, remedy = "is not a fraction: a number above 0, up to 1.", "Write a number such as 0.5."
    elif value_type == "layers":
        if isinstance(value, list) and all(type(layer) is int and 0 <= layer <= _LARGEST_SIZE for layer in value):
            return value
        rule, remedy = "is not a list of layers.", "Write their numbers, counted from 0, in brackets."
    else:
        least = 0 if value_type == "count" else 1
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST_SIZE:
            return value
        rule = f"is not a whole number from {least} to 2^40."
        remedy = "Write the size as digits, without quotes."
    raise InputError(f"{shown(value)} {rule}", remedy, f"{where}: {key}")


def shown(value: object) -> str:
    """Return a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python cannot print an int of more than 4300 digits
        return "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
