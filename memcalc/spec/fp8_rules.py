"""The rules of matrix products in 8 bits: whose modules, which cards, which sizes."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.errors import InputError
from memcalc.spec.broken import Broken
from memcalc.spec.cards import Card, find_card
from memcalc.spec.spec import Spec

# Transformer Engine 2.11 pytorch/quantization.py, check_fp8_support, check_mxfp8_support.
LEAST_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "mxfp8": (10, 0)}
# pytorch/utils.py, assert_dim_for_fp8_exec; pytorch/tensor/mxfp8_tensor.py, make_empty.
MULTIPLE_OF_WIDTH = {"delayed": 16, "tensorwise": 16, "mxfp8": 32}
MULTIPLE_OF_TOKENS = {"delayed": 8, "tensorwise": 8, "mxfp8": 32}


def fp8(spec: Spec) -> Iterator[Broken]:
    """All of them."""
    training, recipe = spec.training, spec.training.fp8
    if recipe == "none":
        return
    key = ("training", "fp8")
    if training.implementation != "megatron":
        yield Broken(
            key,
            f"fp8 = {recipe} with implementation = {training.implementation}; what is modelled are "
            "Transformer Engine's matrices.",
            "Set implementation: megatron, or fp8: none.",
        )
    if training.dtype == "fp32":
        yield Broken(key, f"fp8 = {recipe} with dtype = fp32.", "Set dtype: bf16 or fp16.")
    card, least = _card(spec), LEAST_CAPABILITY[recipe]
    if card is not None and card.compute_capability is not None and card.compute_capability < least:
        found, needed = (".".join(map(str, each)) for each in (card.compute_capability, least))
        yield Broken(
            key,
            f"fp8 = {recipe} needs compute capability {needed}; {card.label} has {found}.",
            "Name a newer card, or set fp8: none.",
        )
    yield from _sizes(spec, recipe)


def _card(spec: Spec) -> Card | None:
    try:
        return None if spec.hardware.gpu is None else find_card(spec.hardware.gpu)
    except InputError:  # which is told with its own place
        return None


def _sizes(spec: Spec, recipe: str) -> Iterator[Broken]:
    model, ranks = spec.model, spec.parallelism.tensor_parallel
    widths = {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size // ranks}
    step = MULTIPLE_OF_WIDTH[recipe]
    for name, width in widths.items():
        if width % step:
            yield Broken(
                ("training", "fp8"),
                f"fp8 = {recipe} takes matrices whose sides are multiples of {step}; {name} is {width} on a rank.",
                "Choose other sizes, or set fp8: none.",
            )
    tokens = spec.training.micro_batch_size * (spec.training.sequence_length // spec.parallelism.context_parallel)
    if tokens % MULTIPLE_OF_TOKENS[recipe]:
        yield Broken(
            ("training", "fp8"),
            f"fp8 = {recipe} takes a multiple of {MULTIPLE_OF_TOKENS[recipe]} tokens; b·s is {tokens} on a rank.",
            "Choose another sequence_length, or set fp8: none.",
        )
