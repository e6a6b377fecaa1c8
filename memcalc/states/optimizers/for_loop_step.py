"""The for-loop implementation of the optimizer step: a few buffers of one parameter, and variables of the previous one.

Each script follows the allocating statements of the function _single_tensor_* of torch/optim/<optimizer>.py (torch
2.13); all were compared with the allocator of the CUDA build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from memcalc.layout.local_parameters import LocalParameter, LocalParameters
from memcalc.states.optimizers.foreach_step import DECAYED
from memcalc.states.optimizers.optimizer_states import is_hidden_matrix, is_in_four_bits
from memcalc.states.optimizers.parameter_order import registered
from memcalc.states.optimizers.step_buffers import ALL, PARTS, Buffer, LiveTensor, StepPoint
from memcalc.states.optimizers.update_rule import UpdateRule

TEMPORARY = Buffer("temporary")
NORM = Buffer("partial norms", "norm", "uint8")
OVER_ROWS = Buffer("norms of the columns", "stage", "uint8")
MOMENTS = ("first", "second")


class Assign(NamedTuple):
    """A statement that binds `target` to a new tensor; its old tensor is freed afterwards.

    Without a result, `target` is bound to a persistent tensor. Without a target, nothing stays.
    """

    target: str  # the variable
    result: Buffer | None = None  # the new tensor
    temporaries: tuple[Buffer, ...] = ()  # allocated before the result, and freed after it
    scratch: tuple[Buffer, ...] = ()  # allocated after the result, and freed before the old tensor


class Keep(NamedTuple):
    """A statement that makes the tensor of `variable` the parameter's replaced state; the old state is freed."""

    variable: str


@dataclass(frozen=True)
class CreateStates:
    """A statement that allocates the states that a parameter lacks in the first step, except a replaced one."""


Statement = Assign | Keep | CreateStates
Script = tuple[Statement, ...]
CREATE_STATES = CreateStates()
NEWTON_SCHULZ_STEPS = 5  # torch.optim.Muon, ns_steps


def creates_states_in_loop(update: UpdateRule) -> bool:
    """Return whether the first step creates states parameter by parameter, not all at its start."""
    return update.paged or update.optimizer in (
        "momentum",
        "lamb",
        "adam-8bit",
        "lion-8bit",
        "adam-4bit",
        "galore",
        "adafactor-hf",
    )


def for_loop_points(parameters: LocalParameters, update: UpdateRule) -> Iterator[StepPoint]:
    """Yield every point of a step that updates one parameter at a time."""
    bound: dict[str, LiveTensor] = {}
    if update.paged:
        return  # kernels that update in place
    for held, behind in _in_order(parameters, update):
        made = behind if creates_states_in_loop(update) else ALL
        for statement in script_of(update, held):
            if isinstance(statement, Keep):
                del bound[statement.variable]
            if not isinstance(statement, Assign):
                continue
            made_now = [*statement.temporaries, *statement.scratch]
            if statement.result is not None:
                made_now.append(statement.result)
            if made_now:
                yield StepPoint([*bound.values(), *(LiveTensor(held, buffer) for buffer in made_now)], made)
            bound.pop(statement.target, None)
            if statement.result is not None:
                bound[statement.target] = LiveTensor(held, statement.result)


def _in_order(parameters: LocalParameters, update: UpdateRule) -> Iterator[tuple[LocalParameter, frozenset[str]]]:
    """Yield the parameters in loop order, with the parts of the model that have states by then.

    Two layers represent all: the first follows the embedding, the last follows all other layers.
    """
    embedding, layer, head = registered(parameters, update.family)
    parts = [(embedding, 1), (layer, 1), (layer, 2), (head, 3)]
    if update.optimizer == "galore":
        matrices = [parameter for parameter in layer if is_hidden_matrix(parameter)]
        others = [parameter for parameter in layer if not is_hidden_matrix(parameter)]
        parts = [(embedding, 1), (others, 1), (others, 1), (head, 1), (matrices, 1), (matrices, 2)]
    for part, behind in parts:
        for parameter in part:
            yield parameter._replace(count=1), frozenset(PARTS[:behind])


def in_loop_order(parameters: Iterable[LocalParameter], update: UpdateRule) -> list[LocalParameter]:
    """Return parameters in the order of the loop: GaLore's matrices are its second parameter group."""
    return sorted(parameters, key=is_hidden_matrix) if update.optimizer == "galore" else list(parameters)


def script_of(update: UpdateRule, parameter: LocalParameter) -> Script:
    """Return the statements that update one parameter; unless one of them creates its states, the first does."""
    own = SCRIPTS.get(update.optimizer)
    script = () if own is None else own(update, parameter)
    return script if CREATE_STATES in script else (CREATE_STATES, *script)


def _gradient(update: UpdateRule) -> Script:
    """Return the statement `grad = grads[i]`, which frees the previous gradient, and L2 decay."""
    return (Assign("grad"), Assign("grad", Buffer(DECAYED))) if update.decays else (Assign("grad"),)


def _sgd(update: UpdateRule, _: LocalParameter) -> Script:
    if update.optimizer != "momentum":
        return _gradient(update)
    ahead = Assign("grad", Buffer("gradient ahead")) if update.nesterov else Assign("grad")
    return (*_gradient(update), CREATE_STATES, ahead)  # the momentum is a clone of the gradient


def _adam(update: UpdateRule, _: LocalParameter) -> Script:
    l2 = update._replace(decays=update.decays and update.optimizer == "adam")
    return (*_gradient(l2), Assign("denom", Buffer("denominator"), (TEMPORARY,)))


def _adagrad(update: UpdateRule, _: LocalParameter) -> Script:
    return (*_gradient(update), Assign("std", Buffer("sqrt of the sum")))


def _adadelta(update: UpdateRule, _: LocalParameter) -> Script:
    return (*_gradient(update), Assign("std", Buffer("sqrt of mean square")), Assign("delta", Buffer("update")))


def _adamax(update: UpdateRule, _: LocalParameter) -> Script:
    return (*_gradient(update), Assign("", None, (Buffer("absolute gradient"),)))


def _nadam(update: UpdateRule, _: LocalParameter) -> Script:
    return (*_gradient(update), Assign("denom", Buffer("denominator"), (TEMPORARY,)))


def _radam(update: UpdateRule, _: LocalParameter) -> Script:
    """Return the script from the sixth step on, when the variance is rectified; earlier steps allocate less."""
    return (
        *_gradient(update),
        Assign("bias_corrected_exp_avg", Buffer("corrected first moment")),
        Assign("product", Buffer("scaled first moment")),
        Assign("rates", Buffer("learning rates"), (TEMPORARY, Buffer("reciprocal"))),
        Assign("product", Buffer("update before rectification")),
        Assign("rates"),
        Assign("product", None, (Buffer("update"),)),
    )


def _rmsprop(update: UpdateRule, _: LocalParameter) -> Script:
    return (*_gradient(update), Assign("avg", Buffer("sqrt of mean square")))


def _rprop(_: UpdateRule, __: LocalParameter) -> Script:
    mask = Assign("", None, (Buffer("mask", dtype="bool"),))  # sign.gt(0), sign.lt(0), sign.eq(0); sign.eq(etaminus)
    return (
        Assign("grad"),
        Assign("sign", Buffer("sign"), (TEMPORARY,)),
        *(mask, mask, mask),
        Assign("grad", Buffer("gradient")),
        mask,
        Assign("", None, (Buffer("sign of gradient"),)),
    )


def _asgd(update: UpdateRule, _: LocalParameter) -> Script:
    return _gradient(update)  # up to step t0 = 1,000,000 the average is a copy of the parameter


def _adafactor(_: UpdateRule, parameter: LocalParameter) -> Script:
    norm = Assign("", None, (NORM,))  # param.norm(2), update.norm(2)
    update = Assign("update", Buffer("update"))
    if len(parameter.axes) < 2:
        return (norm, Assign("grad_squared", Buffer("squared gradient")), update, norm)
    rows = Assign("row_mean", Buffer("norms of the rows", "rows"))
    # The scratch of a sum over each expert's rows is not modelled.
    scratch = (OVER_ROWS,) if len(parameter.axes) == 2 else ()
    columns = Assign("col_mean", Buffer("means of the columns", "columns"), scratch=scratch)
    return (norm, rows, columns, update, norm)


def _adafactor_of_transformers(update: UpdateRule, parameter: LocalParameter) -> Script:
    """Return the script of transformers 5.23 optimization.py, Adafactor.step: all in fp32, for weights of any dtype."""

    def wide(name: str) -> Buffer:
        return Buffer(name, dtype="fp32")

    cast = update.dtype != "fp32"
    gradient = (Assign("grad"), *((Assign("grad", wide("gradient in fp32")),) if cast else ()))
    weight = (Assign("p_data_fp32"), *((Assign("p_data_fp32", wide("weight in fp32")),) if cast else ()))
    norm = Assign("", None, (NORM,))  # of the weight, and of the update
    # grad**2, then + eps; the means and the factors of a matrix, or the square root of a vector; then -update
    squared = Assign("update", wide("squared gradient and eps"), (wide("squared gradient"),))
    factors: tuple[Buffer, ...] = ()
    means: Script = ()
    if len(parameter.axes) > 1:
        scratch = (OVER_ROWS,) if len(parameter.axes) == 2 else ()  # over each expert's rows it is not modelled
        rows, columns = Buffer("of the rows", "rows", "fp32"), Buffer("of the columns", "columns", "fp32")
        means = (Assign("", None, (rows,)), Assign("", None, (columns, *scratch)))
        factors = (rows, columns)
    update_of = Assign("update", wide("update"), factors)
    step = (squared, *means, update_of, norm, Assign("", None, (wide("-update"),)))
    return (*gradient, CREATE_STATES, *weight, norm, *step)


def _lion(_: UpdateRule, __: LocalParameter) -> Script:
    return (Assign("", None, (Buffer("update"),)),)  # memcalc/step/lion.py


def _lamb(update: UpdateRule, _: LocalParameter) -> Script:
    """Return the script of bitsandbytes 0.50 functional.py, optimizer_update_32bit: torch.norm(p.data.float())."""
    cast = () if update.dtype == "fp32" else (Buffer("weight in fp32", dtype="fp32"),)
    return (Assign("", None, (*cast, NORM)),)


def _muon(update: UpdateRule, _: LocalParameter) -> Script:
    """Return the script of torch/optim/_muon.py: Newton-Schulz iterations in bf16 on the whole matrix.

    They return the update, so the previous matrix's update is live until the next one replaces it.
    """
    ahead = (Assign("update", Buffer("update")),) if update.nesterov else ()
    orthogonal, gram = Buffer("orthogonal update", dtype="bf16"), Buffer("gram matrix", "gram", "bf16")
    cast = () if update.dtype == "bf16" else (Assign("ortho_grad", orthogonal),)
    iteration = (Assign("gram_matrix", gram), Assign("gram_update", gram), Assign("ortho_grad", orthogonal))
    returned = tuple(Assign(name) for name in ("update", "gram_matrix", "gram_update"))
    norm = Assign("", None, (NORM,))
    return (*ahead, Assign("ortho_grad"), *cast, norm, *iteration * NEWTON_SCHULZ_STEPS, *returned)


def _four_bit(_: UpdateRule, parameter: LocalParameter) -> Script:
    """Return the script of torchao 0.18 optim/adam.py, compiled: per moment new scales, fp32 values, 4-bit codes.

    The codes are computed as int64. States that are not in 4 bits are updated by one kernel without temporaries.
    """
    if not is_in_four_bits(prod(parameter.shape)):
        return ()
    of_each = (Buffer("scales", "blocks", "fp32"), Buffer("moment", dtype="fp32"), Buffer("codes", dtype="int64"))
    return (Assign("", None, tuple(buffer for buffer in of_each for _ in MOMENTS)),)


def _galore(update: UpdateRule, parameter: LocalParameter) -> Script:
    """Return the script of galore_torch 1.0 adamw.py in a step that recomputes the projector.

    The first step does, and each step after a multiple of update_proj_gap (200 in its README); the others only omit it.
    """
    if not is_hidden_matrix(parameter):
        denominator, direction = Assign("denom", Buffer("denominator")), Assign("norm_grad", Buffer("update"))
        return (Assign("grad"), CREATE_STATES, denominator, direction)
    return (
        Assign("grad"),
        *_projector(update, parameter),
        Assign("grad", Buffer("projected gradient", "low")),
        CREATE_STATES,
        Assign("denom", Buffer("denominator", "low")),
        Assign("norm_grad", Buffer("projected update", "low")),
        Assign("norm_grad", Buffer("update"), (Buffer("update before scaling"),)),
    )


def _projector(update: UpdateRule, parameter: LocalParameter) -> Script:
    """Return the script of galore_torch 1.0 galore_projector.py, get_orthogonal_matrix: type right, or left if wide.

    The projector is r of the singular vectors on the shorter side: in fp32 a view of all of them, else a 16-bit copy.
    """
    rows, columns = parameter.shape
    whole, short = Buffer("singular vectors", dtype="fp32"), Buffer("singular vectors", "gram", "fp32")
    left, right = (whole, short) if rows >= columns else (short, whole)
    in_fp32 = update.dtype == "fp32"
    cast = () if in_fp32 else (Assign("matrix", Buffer("matrix in fp32", dtype="fp32")),)
    copy = () if in_fp32 else (Assign("B", Buffer("projector", "projector")),)
    kept = "B" if not in_fp32 else "Vh" if rows >= columns else "U"
    return (
        *cast,
        Assign("U", left),
        Assign("Vh", right),
        Assign("s", Buffer("singular values", "values", "fp32")),
        Assign("", None, (Buffer("decomposition", "svd", "uint8"),)),
        Assign("A", Buffer("scaled singular vectors", "low", "fp32"), (Buffer("scales", "diagonal", "fp32"),)),
        *copy,
        *(Assign(local) for local in ("matrix", "U", "Vh", "s", "A") if local != kept),
        Keep(kept),
    )


SCRIPTS: dict[str, Callable[[UpdateRule, LocalParameter], Script]] = {
    "sgd": _sgd,
    "momentum": _sgd,
    "adam": _adam,
    "adamw": _adam,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "adamax": _adamax,
    "nadam": _nadam,
    "radam": _radam,
    "rmsprop": _rmsprop,
    "rprop": _rprop,
    "asgd": _asgd,
    "adafactor": _adafactor,
    "adafactor-hf": _adafactor_of_transformers,
    "lion": _lion,
    "lamb": _lamb,
    "muon": _muon,
    "galore": _galore,
    "adam-4bit": _four_bit,
}
