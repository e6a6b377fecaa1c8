"""Keys of a Hugging Face config.json by type: keys that its family reads, keys with no effect, unknown keys.

The families themselves are data (`memcalc.spec.model_families.conversion`); here their keys are only listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from memcalc.frameworks.draft import Draft
from memcalc.importers.field_tables import ImportedConfig, unique_limits
from memcalc.importers.file_format import FileFormat, nothing, overcounted
from memcalc.spec.limits import Limit
from memcalc.spec.model_families.conversion import keys_of, known_families

_OTHER_HEADS = re.compile(
    r"For(?:SequenceClassification|TokenClassification|QuestionAnswering|Reward\w*)$|(?<!LMHead)Model$"
)
_GENERATION = "generation is not estimated"
_ROTARY = "positions are computed, not stored"

# PretrainedConfig of transformers 5.23, and keys that the families' own classes share.
FIELDS = {
    **nothing("model_type sets it").at("architectures auto_map"),
    "quantization_config": overcounted("precision", "quantized weights", "weights in the run's dtype are counted"),
    "compression_config": overcounted("precision", "quantized weights", "weights in the run's dtype are counted"),
    "num_labels": nothing("a small classification head"),
    "norm_topk_prob": nothing("weighting of expert outputs"),
    **nothing().at(
        "_name_or_path name_or_path transformers_version rms_norm_eps layer_norm_eps* norm_eps* norm_epsilon",
        "layernorm_* pretraining_tp output_* return_* use_return_dict torchscript is_* finetuning_task id2label*",
        "label2id* problem_type summary_*",
    ),
    **dict.fromkeys(("torch_dtype", "dtype"), nothing("training.dtype and the recipe set it")),
    **dict.fromkeys(("bos_*", "eos_*", "pad_*", "sep_*", "*_token_id", "decoder_start_*"), nothing("data")),
    **nothing("initialization of weights").at("initializer_* init_* *_init_range use_depth_scaled_init"),
    **dict.fromkeys(("rope_*", "rotary_*", "partial_rotary_factor", "original_max_*", "mscale*"), nothing(_ROTARY)),
    **nothing(_GENERATION).at(
        "use_cache cache_* do_sample temperature top_k top_p max_length max_new_tokens task_specific_params",
        "generation_* max_sequence_length",
    ),
    **dict.fromkeys(("*_alpha", "*_multiplier", "*_coef", "*_scaling", "scale_*", "*_scale"), nothing("a factor")),
    **dict.fromkeys(("sliding_window*", "use_sliding_window", "max_window_layers", "layer_types"), nothing("masks")),
}


def _nothing_follows(draft: Draft) -> None:
    """Do nothing: the family reads a config.json, and the table only describes the remaining keys."""


CONFIG_JSON = FileFormat(
    "Hugging Face config.json", "transformers 5.23", FIELDS, _nothing_follows, lambda data: "model_type" in data
)


def listed(data: Mapping[str, Any]) -> ImportedConfig | None:
    """Return the keys of a config.json by type; None if the family is unknown, which the loader reports."""
    model_type = data.get("model_type")
    if model_type not in known_families():
        return None
    keys = keys_of(model_type)
    mapped, no_effect, not_modelled, unknown = [], [], [], []
    limits = []
    for key, value in _leaves(data, frozenset(keys)):
        meaning = CONFIG_JSON.meaning(key)
        if key in keys:
            mapped.append((key, value, ", ".join(f"model.{field}" for field in keys[key])))
        elif meaning is None:
            unknown.append(key)
        elif key == "architectures" and (other := _other_head(value)):
            not_modelled.append((key, f"{other}, which has another head: the head of a language model is counted"))
            limits.append(Limit(f"the head of {other}", holds_memory=False))  # a head with a few rows, or none
        elif meaning.kind == "not modelled":
            not_modelled.append((key, meaning.meaning))
            limits += meaning.limits_of(value)
        else:
            no_effect.append((key, meaning.meaning))
    return ImportedConfig(
        CONFIG_JSON,
        {},
        tuple(mapped),
        tuple(no_effect),
        tuple(not_modelled),
        tuple(unknown),
        (),
        (),
        limits=unique_limits(limits),
    )


def _other_head(architectures: Any) -> str:
    """Return the class that is not a language model, such as LlamaForSequenceClassification; "" if there is none."""
    names = architectures if isinstance(architectures, list) else [architectures]
    return next((str(name) for name in names if _OTHER_HEADS.search(str(name))), "")


def _leaves(data: Mapping[str, Any], read: frozenset[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted path, except null; an object without a known key is one value."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        if value is None:
            continue
        if isinstance(value, Mapping) and any(key.startswith(f"{path}.") for key in read):
            yield from _leaves(value, read, f"{path}.")
        else:
            yield path, value
