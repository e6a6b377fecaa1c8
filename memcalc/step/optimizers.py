"""The optimizers by their names in the spec. Learning rates are of no consequence: only sizes are measured."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memcalc.errors import InputError, Unavailable
from memcalc.spec.optimizers import (
    GALORE_RANK,
    OPTIMIZERS,
    OptimizerImplementation,
    OptimizerOptions,
    default_optimizer,
    momentum,
    nesterov,
    weight_decay,
)
from memcalc.spec.training import TrainingSpec
from memcalc.step.lion import Lion
from memcalc.step.packages import import_package

LEARNING_RATE = 1e-5

Factory = Callable[..., torch.optim.Optimizer]

# PyTorch's switches for the three ways to run one update.
SWITCHES: dict[OptimizerImplementation, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for-loop": {"foreach": False},
}

TORCH: dict[str, str] = {
    "sgd": "SGD",
    "momentum": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adamax": "Adamax",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
    "asgd": "ASGD",
    "adafactor": "Adafactor",
}
LAYERED = frozenset({"muon", "galore"})  # treat the matrices of the layers apart, which a module does not name
BITSANDBYTES = {"adam-8bit": "Adam8bit", "lion-8bit": "Lion8bit", "lamb": "LAMB"}
PAGED = {
    "adam": "PagedAdam32bit",
    "adamw": "PagedAdamW32bit",
    "lion": "PagedLion32bit",
    "adam-8bit": "PagedAdam8bit",
    "lion-8bit": "PagedLion8bit",
}


def build_optimizer(
    training: TrainingSpec,
    parameters: list[nn.Parameter],
    hidden: list[nn.Parameter],
    tables: Sequence[nn.Embedding] = (),
) -> torch.optim.Optimizer:
    """The optimizer that the spec names; it makes its states at the first step.

    Args:
        training: names the optimizer, its implementation and its options.
        parameters: what it updates.
        hidden: those of them that are matrices of the layers, which Muon and GaLore treat apart.
        tables: the model's embeddings, whose states can stay out of 8 bits.

    Raises:
        Unavailable: its package is not installed.
    """
    name, options = training.optimizer, training.optimizer_options
    decay = {"weight_decay": weight_decay(name, options)}
    if options.paged or name in BITSANDBYTES:
        its_name = PAGED[name] if options.paged else BITSANDBYTES[name]
        theirs = _of("bitsandbytes.optim", its_name, training)
        optimizer = theirs(parameters, lr=LEARNING_RATE, **decay)
        _keep_wide(optimizer, tables if options.embeddings_32bit else ())
        return optimizer
    if name == "adafactor-hf":  # as its Trainer makes it
        theirs = _of("transformers.optimization", "Adafactor", training)
        return theirs(parameters, lr=LEARNING_RATE, scale_parameter=False, relative_step=False, **decay)
    if name == "adam-4bit":
        return _of("torchao.optim", "AdamW4bit", training)(parameters, lr=LEARNING_RATE, **decay)
    if name == "galore":
        return _galore(training, parameters, hidden)
    if name == "muon":
        return _muon(training, parameters, hidden)
    factory: Factory = Lion if name == "lion" else getattr(torch.optim, TORCH[name])
    given: dict[str, Any] = {} if name == "rprop" else dict(decay)
    if name in ("momentum", "rmsprop"):
        given["momentum"] = momentum(name, options)
    if name == "momentum":
        given["nesterov"] = nesterov(name, options)
    if name == "rmsprop":
        given["centered"] = options.centered
    if name in ("adam", "adamw"):
        given["amsgrad"] = options.amsgrad
    return factory(parameters, lr=LEARNING_RATE, **given, **SWITCHES[training.optimizer_implementation])


def named_optimizer(name: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The factory of an optimizer that is named as in a configuration, with PyTorch's usual implementation on a GPU.

    Raises:
        InputError: there is none of that name, or it needs to know the layers of the model.
        Unavailable: its package is not installed, once the optimizer is made.
    """
    filled = default_optimizer({"optimizer": name})
    known = sorted(OPTIMIZERS.keys() - LAYERED)
    if filled["optimizer"] not in known:
        raise InputError(f"optimizer = {name} is not available for a module.", f"Use one of: {', '.join(known)}.")
    training = TrainingSpec.model_construct(**filled, optimizer_options=OptimizerOptions())
    return lambda parameters: build_optimizer(training, list(parameters), [])


def _keep_wide(optimizer: torch.optim.Optimizer, tables: Sequence[nn.Embedding]) -> None:
    """What Hugging Face's Trainer asks of bitsandbytes for embeddings (trainer.py, create_optimizer).

    Its manager is the process's, and knows parameters by their place in an optimizer: of earlier ones nothing may stay.
    """
    manager = import_package("bitsandbytes.optim").GlobalOptimManager.get_instance()
    manager.initialize()
    for table in tables:
        manager.register_module_override(table, "weight", {"optim_bits": 32})
    optimizer.check_overrides()  # type: ignore[attr-defined]
    manager.module_weight_config_triple.clear()  # which would keep the model alive


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The matrices of a model's layers: all but embeddings, the head, and what is no matrix."""
    outer = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    inner = (
        parameter
        for container in module.modules()
        if isinstance(container, nn.ModuleList)
        for parameter in container.parameters()
    )
    found = {id(p): p for p in inner if p.ndim == 2 and id(p) not in outer}
    return list(found.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor that an optimizer keeps; those that stand for several, as these."""
    for part in optimizer.parts if isinstance(optimizer, Together) else (optimizer,):
        for state in part.state.values():
            for value in state.values():
                yield from _tensors(value)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None or hasattr(value, "_local_tensor"):  # a DTensor is a share of one state, not several
            yield value
        else:  # torchao's quantised states
            yield from (getattr(value, name) for name in flatten()[0])
    elif hasattr(value, "ortho_matrix"):  # galore_torch's projector
        yield from _tensors(value.ortho_matrix)


class Together(torch.optim.Optimizer):
    """Two optimizers, each with parameters of its own, that step one after the other."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__(list(itertools.chain(*(group["params"] for part in parts for group in part.param_groups))), {})
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of both."""
        assert closure is None
        for part in self.parts:
            part.step()


def _muon(training: TrainingSpec, parameters: list[nn.Parameter], hidden: list[nn.Parameter]) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise Unavailable(f"optimizer = muon needs torch.optim.Muon, of torch 2.9; this is torch {torch.__version__}")
    options, apart = training.optimizer_options, {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in parameters if id(parameter) not in apart]
    matrices = torch.optim.Muon(
        hidden,
        lr=LEARNING_RATE,
        weight_decay=weight_decay("muon", options),
        momentum=momentum("muon", options),
        nesterov=nesterov("muon", options),
    )
    if not rest:
        return matrices
    adamw: Factory = torch.optim.AdamW
    return Together(matrices, adamw(rest, lr=LEARNING_RATE, **SWITCHES[training.optimizer_implementation]))


def _galore(
    training: TrainingSpec, parameters: list[nn.Parameter], hidden: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """With the settings of galore_torch's README but for the rank."""
    options, apart = training.optimizer_options, {id(parameter) for parameter in hidden}
    rank = options.rank or GALORE_RANK
    projected = {"params": hidden, "rank": rank, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    groups = [{"params": [parameter for parameter in parameters if id(parameter) not in apart]}, projected]
    factory = _of("galore_torch", "GaLoreAdamW", training)
    return factory(groups, lr=LEARNING_RATE, weight_decay=weight_decay("galore", options), no_deprecation_warning=True)


def _of(module: str, name: str, training: TrainingSpec) -> Factory:
    """A class of a package that is no dependency of ours.

    Raises:
        Unavailable: it is not installed, or cannot be loaded here.
    """
    package = module.partition(".")[0]
    paged = "paged " if training.optimizer_options.paged else ""
    what = f"optimizer = {paged}{training.optimizer} runs {name} of {package}"
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{what}: pip install {package.replace('_', '-')}")
    try:
        factory: Factory = getattr(import_package(module), name)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise Unavailable(f"{what}, which cannot be loaded here: {error}") from error
    return factory
