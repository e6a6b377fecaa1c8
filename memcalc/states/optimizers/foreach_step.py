"""The foreach implementation of the optimizer step: lists of tensors as large as all parameters together.

Each entry follows the function _multi_tensor_* of torch/optim/<optimizer>.py (torch 2.13); all were compared with the
allocator of the CUDA build.
"""

from __future__ import annotations

from memcalc.layout.local_parameters import LocalParameters
from memcalc.states.optimizers.step_buffers import Buffer, LiveTensor, StepPoint
from memcalc.states.optimizers.update_rule import UpdateRule

DECAYED = "gradient with weight decay"

# Lists that are live together at the peak: without weight decay, and with it.
LISTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sgd": ((), (DECAYED,)),
    "momentum": ((), (DECAYED,)),
    "adam": (("sqrt of second moment",), ("sqrt of second moment",)),  # decayed gradients are freed before
    "adamw": (("sqrt of second moment",), ("sqrt of second moment",)),  # weight decay changes the weights in place
    "adagrad": (("sqrt of the sum", "scaled gradient"), ("sqrt of the sum", DECAYED)),
    "adadelta": (("sqrt of mean square", "update"), (DECAYED, "sqrt of mean square", "update")),
    "adamax": (("absolute gradient",), (DECAYED,)),
    "nadam": (("sqrt of second moment",), (DECAYED, "sqrt of second moment")),
    "radam": (("sqrt of second moment",), ("sqrt of second moment",)),  # decayed gradients are freed before
    "rmsprop": (("sqrt of mean square",), (DECAYED, "sqrt of mean square")),
    "rprop": (("sign",), ("sign",)),
    "asgd": (("gradient with decay",), (DECAYED,)),
    "adafactor": (("update",), ("update",)),
    "lion": (("update",), ("update",)),  # memcalc/step/lion.py
}

# A list that is allocated after those have been freed.
LAST_LISTS = {"asgd": "weight minus its average", "rprop": "sign of gradient"}
DROPPED_BEFORE = ("adam", "radam")  # decayed gradients are freed before any other list is allocated


def foreach_lists(update: UpdateRule) -> tuple[str, ...]:
    """Return the names of the lists, each as large as all parameters, that foreach has live at once."""
    if update.implementation != "foreach" or update.optimizer not in LISTS:
        return ()
    return LISTS[update.optimizer][update.decays]


def foreach_points(parameters: LocalParameters, update: UpdateRule) -> list[StepPoint]:
    """Return the points that may be the peak of a step that updates all parameters at once."""
    lists = [LiveTensor(held, Buffer(name)) for name in foreach_lists(update) for held in parameters]
    if update.optimizer == "rprop":  # torch.where of one gradient, and its condition
        largest = max(parameters, key=lambda parameter: parameter.elements)._replace(count=1)
        lists += [
            LiveTensor(largest, Buffer("condition", dtype="bool")),
            LiveTensor(largest, Buffer("selected gradient")),
        ]
    if update.optimizer == "adafactor":  # norms of the columns, for one parameter at a time
        matrices = [parameter._replace(count=1) for parameter in parameters if len(parameter.axes) == 2]
        columns = Buffer("norms of the columns", "stage", "uint8")
        return [StepPoint(lists), *(StepPoint([LiveTensor(held, columns)]) for held in matrices)]
    return [StepPoint(lists)]
