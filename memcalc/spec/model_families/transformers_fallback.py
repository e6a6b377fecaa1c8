"""Models without formulas: transformers interprets their config.json and builds their modules.

These are causal language models of other families; all other classes that `architectures` names: encoders with their
heads, encoder-decoders, vision, vision-language and speech; and UNets and transformers of diffusers, with the class
under `_class_name` in their config.json. They are not estimated from formulas. Their real step can be run by trace,
measure, and estimate, which then traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.errors import InputError
from memcalc.extras import installation
from memcalc.spec.model_families.field_types import shown
from memcalc.spec.model_families.files import LISTED, nearest

if TYPE_CHECKING:
    from memcalc.spec.model import ModelSpec
    from memcalc.spec.spec import Spec

# Sizes of every ModelSpec, by their names in transformers; its configuration classes map other names.
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
# Families without attention have no heads, recurrent ones no longest sequence: nothing is derived from these two.
ABSENT = {"num_attention_heads": 1, "max_position_embeddings": 2**40}
# Other classes may lack any of these, such as a vocabulary: only transformers knows what follows from a config.
NEUTRAL = ABSENT | {"num_layers": 1, "hidden_size": 1, "vocab_size": 1}
NOTHING_FOLLOWS = {"head_dim": 1, "rotary_dim": 0, "position_embedding": "none"}
DIFFUSERS = "_class_name"  # key in a config.json of diffusers
CAUSAL = ("ForCausalLM", "LMHeadModel", "WithLMHead")  # ends of class names
# Keys that select code, which is never run: of the model's repository, or a kernel ("ORG/NAME") that transformers
# downloads from the hub if the package `kernels` is installed (modeling_utils.py, PreTrainedModel.__init__).
CODE = ("auto_map", "attn_implementation", "experts_implementation", "_attn_implementation", "_experts_implementation")
POSITIONS = ("max_position_embeddings", "max_target_positions", "n_positions")


def fallback_block(config: dict[str, object], where: str) -> dict[str, object]:
    """Return the raw `model:` block of a config.json that only transformers can read: its sizes, and the file itself.

    Args:
        config: the parsed config.json; its model_type is a string.
        where: its name in errors.

    Raises:
        InputError: transformers is not installed, cannot build the class, or rejects the configuration.
    """
    import json  # imported late, here and below: estimates from formulas do not need it

    text = json.dumps(config, sort_keys=True)
    if DIFFUSERS in config:
        diffusers_class(text, f"{where}: {DIFFUSERS}")
        return {"transformers_config": text, **NEUTRAL, **NOTHING_FOLLOWS}
    built = configuration(text, f"{where}: model_type")
    return {"transformers_config": text, **sizes_of(built, text, where)}


def diffusers_class(text: str, where: str) -> Any:
    """Return the class of diffusers that a config.json names.

    Raises:
        InputError: diffusers is not installed, or has no such model.
    """
    import importlib.util
    import json

    name = json.loads(text)[DIFFUSERS]
    if not can_read_with_transformers() or importlib.util.find_spec("diffusers") is None:
        raise InputError(
            f"memcalc has no formulas for {shown(name)}, a model of diffusers.",
            f"Run its real step: {installation('diffusers')}, then `memcalc trace`.",
            where,
        )
    import diffusers

    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not hasattr(found, "from_config") or not hasattr(found, "enable_gradient_checkpointing"):
        raise InputError(
            f"{DIFFUSERS} = {shown(name)} is not a model class of diffusers {diffusers.__version__}; memcalc runs no "
            "code of a model's repository.",
            "Name a class of diffusers there, or trace the module: memcalc.trace(module, inputs).",
            where,
        )
    return found


def architecture_of(text: str) -> str | None:
    """Return the class that a config.json names, such as "BertForMaskedLM"; None for a causal language model."""
    import json

    config = json.loads(text)
    if DIFFUSERS in config:
        return str(config[DIFFUSERS])
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    return None if first is None or first.endswith(CAUSAL) else first


def with_class(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a vision-language model with its class, if it names none and transformers has one."""
    if config.get("architectures") or not can_read_with_transformers():
        return config
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(str(config.get("model_type")))
    return config if name is None else config | {"architectures": [name]}


def can_read_with_transformers() -> bool:
    """Return whether transformers and torch are installed."""
    import importlib.util

    return all(importlib.util.find_spec(package) is not None for package in ("torch", "transformers"))


def knows_family(model_type: str) -> bool:
    """Return whether the installed transformers has a causal language model of this model_type."""
    if not can_read_with_transformers():
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def configuration(text: str, where: str) -> Any:
    """Return the transformers configuration of a config.json.

    Raises:
        InputError: see `fallback_block`.
    """
    import json

    config = json.loads(text)
    family = config.pop("model_type")
    if not can_read_with_transformers():
        raise InputError(
            f"memcalc has no formulas for the model family {shown(family)}.{nearest(family)}",
            f"{LISTED} To run the real step of other families with transformers: {installation('hf')}, then "
            "`memcalc trace`.",
            where,
        )
    # transformers takes seconds to import, and few runs need it.
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = architecture_of(text)
    if architecture is None and family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"memcalc has no formulas for the model family {shown(family)}, and transformers "
            f"{transformers.__version__} has no causal language model of this type.{nearest(family)}",
            f'{LISTED} For another class of transformers, set "architectures": ["..."] there. For your own module: '
            "memcalc.trace(module, inputs).",
            where,
        )
    if architecture is not None and not hasattr(_class_named(architecture, where), "_from_config"):
        raise InputError(
            f"architectures = {shown(architecture)} is not a model class of transformers {transformers.__version__}; "
            "memcalc runs no code of a model's repository.",
            "Name a class of transformers there, or trace the module: memcalc.trace(module, inputs).",
            where,
        )
    try:
        built = transformers.AutoConfig.for_model(family, **_without_code(config))
    except Exception as error:
        raise InputError(
            f"transformers rejects the configuration: {' '.join(str(error).split()) or type(error).__name__}.",
            "Pass the config.json of the model.",
            where,
        ) from error
    if not config.get("architectures") and getattr(built, "is_encoder_decoder", False):
        raise InputError(
            f"{shown(family)} is a family of encoder-decoders, and the config.json does not name the class: its causal "
            "language model would be the decoder alone.",
            'Set "architectures": ["..."] there.',
            where,
        )
    return built


def attends_eagerly_alone(text: str) -> bool:
    """Return whether the class of transformers that a config.json names has no fused attention."""
    import json

    if DIFFUSERS in json.loads(text) or not can_read_with_transformers():
        return False
    import transformers

    architecture = architecture_of(text)
    built = configuration(text, "")
    automatic = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    named = automatic.get(type(built), None) if architecture is None else _class_named(architecture, "")
    return not getattr(named, "_supports_sdpa", True)


def _class_named(name: str, where: str) -> Any:
    """Return the class of transformers with this name; None: there is none.

    Raises:
        InputError: the class exists, but an import of it fails.
    """
    import transformers

    try:
        return getattr(transformers, name, None)
    except Exception as error:
        raise InputError(
            f"transformers {transformers.__version__} cannot import {shown(name)}: {' '.join(str(error).split())}",
            "Check the other installed packages.",
            where,
        ) from error


def _without_code(config: Any) -> Any:
    """Return the configuration without keys that select code, at any depth."""
    if isinstance(config, dict):
        kept = (key for key in config if key.removesuffix("_internal") not in CODE)
        return {key: _without_code(config[key]) for key in kept}
    return [_without_code(each) for each in config] if isinstance(config, list) else config


def sizes_of(config: Any, text: str, where: str) -> dict[str, object]:
    """Return the fields of a `model:` block in a transformers configuration.

    Args:
        config: the configuration.
        text: the config.json.
        where: its name in errors.

    Raises:
        InputError: it is of a causal language model, and lacks a size that every such model has.
    """
    found: dict[str, object] = {}
    absent = ABSENT if architecture_of(text) is None else NEUTRAL
    for field, name in SIZES.items():
        names = POSITIONS if field == "max_position_embeddings" and absent is NEUTRAL else (name,)
        value = next((size for each in names if (size := _attribute(config, each)) is not None), absent.get(field))
        if value is None:
            raise InputError(
                f"the configuration of {shown(config.model_type)} does not define its {name}.",
                "Trace the module itself: memcalc.trace(module, inputs).",
                where,
            )
        found[field] = value
    # Derived fields of other families are unknown here: these are neutral values that the rules accept.
    return found | NOTHING_FOLLOWS


def _attribute(config: Any, name: str) -> int | None:
    """Return a whole number of the configuration, or of its language model's configuration; None: there is none."""
    for place in (config, config.get_text_config(decoder=True)):
        try:
            value = getattr(place, name, None)
        except AttributeError:  # raised by transformers for values that differ between layers
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def fallback_family(model: ModelSpec) -> str:
    """Return the model_type of a model without formulas."""
    import json

    assert model.transformers_config is not None
    config: dict[str, str] = json.loads(model.transformers_config)
    return config[DIFFUSERS if DIFFUSERS in config else "model_type"]


def has_published_formulas(model: ModelSpec) -> bool:
    """Return whether published formulas of language models apply; they do not for other classes."""
    return model.transformers_config is None or architecture_of(model.transformers_config) is None


def reject_without_formulas(spec: Spec) -> None:
    """Reject models without formulas.

    Raises:
        InputError: there are no formulas for this family.
    """
    if spec.model.transformers_config is not None:
        raise InputError(
            f"memcalc has no formulas for {fallback_family(spec.model)}.",
            "Run its real step: `memcalc trace`.",
            "model",
        )
