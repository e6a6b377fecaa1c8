"""The parameter groups of an optimizer: ZeRO flattens, reduces and updates each group separately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memcalc.layout.local_parameters import LocalParameter
from memcalc.spec.zero import ZeroSpec


def parameter_groups(ordered: Sequence[LocalParameter], trained: Iterable[int], zero: ZeroSpec) -> list[list[int]]:
    """Return the positions of the trained parameters by group, each in registration order; no group is empty.

    Args:
        ordered: all parameters, in registration order.
        trained: the positions of those that train.
        zero: whether parameters without weight decay are a group of their own.
    """
    found: tuple[list[int], list[int]] = ([], [])
    for number in trained:
        found[zero.separate_no_decay and not has_weight_decay(ordered[number])].append(number)
    # DeepSpeed 0.19 runtime/engine.py, _configure_optimizer: groups without parameters are removed.
    return [group for group in found if group]


def has_weight_decay(parameter: LocalParameter) -> bool:
    """Return whether transformers' Trainer gives a parameter weight decay: all but norms and biases.

    Source: transformers 5.23 trainer.py, get_decay_parameter_names.
    """
    return not (parameter.module.endswith("norm") or "bias" in parameter.tensor)
