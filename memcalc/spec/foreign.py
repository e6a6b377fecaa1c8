"""Families that memcalc has no formulas for: transformers says what their config.json means, and builds their modules.

Such a model is not sized by formula. Its real step can be run: by trace, measure, and estimate, which then traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.errors import InputError
from memcalc.extras import installation
from memcalc.spec.family_files import LISTED, nearest
from memcalc.spec.family_values import shown

if TYPE_CHECKING:
    from memcalc.spec.model import ModelSpec
    from memcalc.spec.spec import Spec

# The sizes that every ModelSpec has, by transformers' names of them; other names are mapped by its configuration class.
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
# Families without attention have no heads, those with recurrence no longest sequence: nothing follows from these two.
ABSENT = {"num_attention_heads": 1, "max_position_embeddings": 2**40}


def foreign_block(config: dict[str, object], where: str) -> dict[str, object]:
    """The raw `model:` block of a config.json that only transformers can read: its sizes, and the file itself.

    Args:
        config: the parsed config.json; its model_type is a text.
        where: what to call it in errors.

    Raises:
        InputError: transformers is not installed, does not know the family as a causal language model, or refuses the
            configuration.
    """
    import json  # here and below: nobody who sizes by formula needs it

    family = config["model_type"]
    text = json.dumps(config, sort_keys=True)
    return {"transformers_config": text, **sizes_of(configuration(text, f"{where}: model_type"), shown(family), where)}


def can_read_foreign() -> bool:
    """Whether transformers and torch are installed."""
    import importlib.util

    return all(importlib.util.find_spec(package) is not None for package in ("torch", "transformers"))


def knows_family(model_type: str) -> bool:
    """Whether the transformers that is installed has a causal language model of this model_type."""
    if not can_read_foreign():
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def configuration(text: str, where: str) -> Any:
    """The configuration of transformers that a config.json stands for.

    Raises:
        InputError: see `foreign_block`.
    """
    import json

    config = json.loads(text)
    family = config.pop("model_type")
    if not can_read_foreign():
        raise InputError(
            f"{shown(family)} is not a model family that memcalc has formulas for.{nearest(family)}",
            f"{LISTED} The real step of others can be run with transformers: "
            f"{installation('hf')}, then `memcalc trace`.",
            where,
        )
    # Imported here: seconds, for the few who need it.
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"{shown(family)} is not a model family that memcalc has formulas for, nor a causal language model that "
            f"transformers {transformers.__version__} knows.{nearest(family)}",
            f"{LISTED} A module of your own: memcalc.trace(module, inputs).",
            where,
        )
    try:
        return transformers.AutoConfig.for_model(family, **config)
    except Exception as error:
        raise InputError(
            f"transformers refuses the configuration: {' '.join(str(error).split()) or type(error).__name__}.",
            "Give the model's own config.json.",
            where,
        ) from error


def sizes_of(config: Any, family: str, where: str) -> dict[str, object]:
    """The fields of a `model:` block that a configuration of transformers tells.

    Raises:
        InputError: it does not name a size that every model has.
    """
    found: dict[str, object] = {}
    for field, name in SIZES.items():
        value = _attribute(config, name)
        if value is None:
            value = ABSENT.get(field)
        if value is None:
            raise InputError(
                f"the configuration of {family} does not say its {name}.",
                "Trace the module itself: memcalc.trace(module, inputs).",
                where,
            )
        found[field] = value
    # What follows from others in our own families is not known here: the neutral value that the rules accept.
    return found | {"head_dim": 1, "rotary_dim": 0, "position_embedding": "none"}


def _attribute(config: Any, name: str) -> int | None:
    """A whole number of the configuration, or of its language model's."""
    for place in (config, config.get_text_config(decoder=True)):
        try:
            value = getattr(place, name, None)
        except AttributeError:  # transformers' own: it differs from layer to layer
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def family_of_foreign(model: ModelSpec) -> str:
    """The model_type of a model that has no formulas."""
    import json

    assert model.transformers_config is not None
    family: str = json.loads(model.transformers_config)["model_type"]
    return family


def refuse_foreign(spec: Spec) -> None:
    """For all who size by formula.

    Raises:
        InputError: there are no formulas for this family.
    """
    if spec.model.transformers_config is not None:
        raise InputError(
            f"memcalc has no formulas for {family_of_foreign(spec.model)}.",
            "Its real step says what it holds: `memcalc trace`.",
            "model",
        )
