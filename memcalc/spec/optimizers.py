"""Optimizers of a configuration, their options, and valid combinations."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from memcalc.spec.model import ConfigBlock, Probability, Size

Optimizer = Literal[
    "sgd",
    "momentum",
    "adam",
    "adamw",
    "adagrad",
    "adadelta",
    "adamax",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "asgd",
    "adafactor",
    "adafactor-hf",
    "muon",
    "lion",
    "lamb",
    "adam-8bit",
    "lion-8bit",
    "adam-4bit",
    "galore",
]
OptimizerImplementation = Literal["foreach", "fused", "for-loop"]
Average = Literal["none", "weights", "fp32"]
Decay = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Norm = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

ALIASES = {
    "sgd-momentum": "momentum",
    "adamw-8bit": "adam-8bit",
    "adamw8bit": "adam-8bit",
    "adamw-4bit": "adam-4bit",
    "adamw4bit": "adam-4bit",
    "galore-adamw": "galore",
}


class OptimizerOptions(ConfigBlock):
    """Options that change an optimizer's states or temporaries; learning rates and similar do not."""

    amsgrad: bool = Field(
        False, description="whether a third state holds the maximum of the second moment (adam, adamw)"
    )
    nesterov: bool | None = Field(None, description="Nesterov momentum; default: true for muon, else false")
    centered: bool = Field(False, description="whether a further state holds the mean gradient (rmsprop)")
    momentum: Probability | None = Field(None, description="default: 0.9 for momentum, 0.95 for muon, 0 for rmsprop")
    weight_decay: Decay | None = Field(
        None, description="default: 0.01 for adamw and its variants, 0.1 for muon, else 0"
    )
    rank: Size | None = Field(None, description="rank of the projected gradients (galore); default: 128")
    paged: bool = Field(
        False, description="optimizer state in paged memory, which moves between GPU and host (bitsandbytes)"
    )
    embeddings_32bit: bool = Field(
        False,
        description="embedding weights have fp32 states, as under Hugging Face's Trainer (adam-8bit, lion-8bit)",
    )


class Facts(NamedTuple):
    """Implementations of an optimizer, the default first, its options and their defaults."""

    implementations: tuple[OptimizerImplementation, ...]
    options: tuple[str, ...] = ("weight_decay",)
    weight_decay: float = 0.0
    momentum: float = 0.0


_LISTS: tuple[OptimizerImplementation, ...] = ("foreach", "for-loop")
_ALL: tuple[OptimizerImplementation, ...] = ("foreach", "fused", "for-loop")
_ALONE: tuple[OptimizerImplementation, ...] = ("for-loop",)

# torch.optim 2.13; lion is memcalc's; lamb, the 8-bit and the paged optimizers are from bitsandbytes (0.50), adam-4bit
# from torchao (0.18), galore from galore_torch (1.0), adafactor-hf from transformers (5.23): these update one parameter
# at a time. Excluded: SparseAdam, which needs sparse gradients, and L-BFGS, with a history of a hundred copies.
OPTIMIZERS: dict[str, Facts] = {
    "sgd": Facts(_ALL),
    "momentum": Facts(_ALL, ("momentum", "nesterov", "weight_decay"), momentum=0.9),
    "adam": Facts(_ALL, ("amsgrad", "weight_decay", "paged")),
    "adamw": Facts(_ALL, ("amsgrad", "weight_decay", "paged"), weight_decay=0.01),
    "adagrad": Facts(_ALL),
    "adadelta": Facts(_LISTS),
    "adamax": Facts(_LISTS),
    "nadam": Facts(_LISTS),
    "radam": Facts(_LISTS),
    "rmsprop": Facts(_LISTS, ("centered", "momentum", "weight_decay")),
    "rprop": Facts(_LISTS, ()),
    "asgd": Facts(_LISTS),
    "adafactor": Facts(_LISTS),
    "adafactor-hf": Facts(_ALONE),
    "muon": Facts(_ALL, ("momentum", "nesterov", "weight_decay"), weight_decay=0.1, momentum=0.95),
    "lion": Facts(_LISTS, ("weight_decay", "paged")),
    "lamb": Facts(_ALONE),
    "adam-8bit": Facts(_ALONE, ("weight_decay", "paged", "embeddings_32bit")),
    "lion-8bit": Facts(_ALONE, ("weight_decay", "paged", "embeddings_32bit")),
    "adam-4bit": Facts(_ALONE, weight_decay=0.01),
    "galore": Facts(_ALONE, ("rank", "weight_decay")),
}

# Optimizers that can step one parameter at a time with temporaries of that parameter's size.
IN_BACKWARD = (
    *("sgd", "momentum", "adam", "adamw", "adagrad", "adadelta", "adamax", "nadam", "radam", "rmsprop", "asgd"),
    *("lion", "lamb", "adam-8bit", "lion-8bit"),
)

# Of bitsandbytes, without paged states.
BITSANDBYTES = ("lamb", "adam-8bit", "lion-8bit")

GALORE_RANK = 128  # galore_torch 1.0, README.md


def default_optimizer(training: dict[str, Any]) -> dict[str, Any]:
    """Return a training block with the optimizer's canonical name and its default implementation.

    Validation rejects values of a wrong type.
    """
    filled = dict(training)
    name = filled.get("optimizer", "adamw")
    if not isinstance(name, str):
        return filled
    name = ALIASES.get(name, name)
    if "optimizer" in filled:
        filled["optimizer"] = name
    options = filled.get("optimizer_options")
    paged = isinstance(options, dict) and options.get("paged") is True
    known = OPTIMIZERS[name].implementations if name in OPTIMIZERS else _ALL
    filled.setdefault("optimizer_implementation", "for-loop" if paged else known[0])
    return filled


def weight_decay(optimizer: str, options: OptimizerOptions) -> float:
    """Return the weight decay of a run; default: the library's."""
    return OPTIMIZERS[optimizer].weight_decay if options.weight_decay is None else options.weight_decay


def momentum(optimizer: str, options: OptimizerOptions) -> float:
    """Return the momentum of a run; default: the library's."""
    return OPTIMIZERS[optimizer].momentum if options.momentum is None else options.momentum


def nesterov(optimizer: str, options: OptimizerOptions) -> bool:
    """Return whether the optimizer uses Nesterov momentum."""
    return optimizer == "muon" if options.nesterov is None else options.nesterov
