"""The step of foreach: lists of tensors as large as all parameters together.

Each entry follows the function _multi_tensor_* of torch/optim/<optimizer>.py (torch 2.13); all were compared with the
allocator of the CUDA build.
"""

from __future__ import annotations

from memcalc.estimation.optimizers.buffers import Alive, Buffer, Moment
from memcalc.estimation.optimizers.update import Update
from memcalc.estimation.sharding import Parameters

DECAYED = "gradient with weight decay"

# The lists that are alive together at the highest moment: without weight decay, and with it.
LISTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sgd": ((), (DECAYED,)),
    "momentum": ((), (DECAYED,)),
    "adam": (("sqrt of second moment",), ("sqrt of second moment",)),  # decayed gradients are dropped before
    "adamw": (("sqrt of second moment",), ("sqrt of second moment",)),  # decay is of the weights, in place
    "adagrad": (("sqrt of the sum", "scaled gradient"), ("sqrt of the sum", DECAYED)),
    "adadelta": (("sqrt of mean square", "update"), (DECAYED, "sqrt of mean square", "update")),
    "adamax": (("absolute gradient",), (DECAYED,)),
    "nadam": (("sqrt of second moment",), (DECAYED, "sqrt of second moment")),
    "radam": (("sqrt of second moment",), ("sqrt of second moment",)),  # decayed gradients are dropped before
    "rmsprop": (("sqrt of mean square",), (DECAYED, "sqrt of mean square")),
    "rprop": (("sign",), ("sign",)),
    "asgd": (("gradient with decay",), (DECAYED,)),
    "adafactor": (("update",), ("update",)),
    "lion": (("update",), ("update",)),  # memcalc/step/lion.py
}

DROPPED_BEFORE = ("adam", "radam")  # where decayed gradients are let go before any other list is made


def foreach_lists(update: Update) -> tuple[str, ...]:
    """The names of the lists as large as all parameters that foreach has alive at once."""
    if update.implementation != "foreach" or update.optimizer not in LISTS:
        return ()
    return LISTS[update.optimizer][update.decays]


def foreach_moments(parameters: Parameters, update: Update) -> list[Moment]:
    """The moments that may be the highest of a step that handles all parameters at once."""
    lists = [Alive(held, Buffer(name)) for name in foreach_lists(update) for held in parameters]
    if update.optimizer == "rprop":  # torch.where of one gradient, and its condition
        largest = max(parameters, key=lambda held: held.elements)._replace(count=1)
        lists += [Alive(largest, Buffer("condition", dtype="bool")), Alive(largest, Buffer("selected gradient"))]
    if update.optimizer == "adafactor":  # the norms of the columns, one parameter after the other
        matrices = [held._replace(count=1) for held in parameters if len(held.axes) == 2]
        columns = Buffer("norms of the columns", "stage", "uint8")
        return [Moment(lists), *(Moment([Alive(held, columns)]) for held in matrices)]
    return [Moment(lists)]
