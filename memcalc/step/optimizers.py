"""Optimizers by their names in the spec. Learning rates do not matter: only sizes are measured."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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

# PyTorch's options for the three implementations of an update.
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
LAYERED = frozenset({"muon", "galore"})  # treat weight matrices of layers separately, which a module does not identify
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
    """Return the optimizer that the spec names; it allocates its states in the first step.

    Args:
        training: names the optimizer, its implementation and its options.
        parameters: all parameters of the optimizer.
        hidden: the weight matrices of the layers among them, which Muon and GaLore treat separately.
        tables: the model's embeddings, which can keep 32-bit states in an 8-bit optimizer.

    Raises:
        Unavailable: its package is not installed.
    """
    if training.optimizer_in_backward:
        alone = training.model_copy(update={"optimizer_in_backward": False})
        return InBackward(*(build_optimizer(alone, [parameter], [], tables) for parameter in parameters))
    name, options = training.optimizer, training.optimizer_options
    decay = {"weight_decay": weight_decay(name, options)}
    if options.paged or name in BITSANDBYTES:
        its_name = PAGED[name] if options.paged else BITSANDBYTES[name]
        theirs = _of("bitsandbytes.optim", its_name, training)
        optimizer = theirs(parameters, lr=LEARNING_RATE, **decay)
        _keep_wide(optimizer, tables if options.embeddings_32bit else ())
        return optimizer
    if name == "adafactor-hf":  # with the options of transformers' Trainer
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
    """Return the factory of an optimizer by its name in a configuration, with PyTorch's default GPU implementation.

    Raises:
        InputError: the name is unknown, or the optimizer needs to know the layers of the model.
        Unavailable: when the factory is called: the package is not installed.
    """
    filled = default_optimizer({"optimizer": name})
    known = sorted(OPTIMIZERS.keys() - LAYERED)
    if filled["optimizer"] not in known:
        raise InputError(f"optimizer = {name} is not available for a module.", f"Use one of: {', '.join(known)}.")
    training = TrainingSpec.model_construct(**filled, optimizer_options=OptimizerOptions())
    return lambda parameters: build_optimizer(training, list(parameters), [])


def _keep_wide(optimizer: torch.optim.Optimizer, tables: Sequence[nn.Embedding]) -> None:
    """Request 32-bit states for embeddings from bitsandbytes, as Hugging Face's Trainer (trainer.py, create_optimizer).

    The manager of bitsandbytes is global and identifies parameters by their index in an optimizer, so the entries of
    earlier optimizers must be cleared.
    """
    manager = import_package("bitsandbytes.optim").GlobalOptimManager.get_instance()
    manager.initialize()
    for table in tables:
        manager.register_module_override(table, "weight", {"optim_bits": 32})
    optimizer.check_overrides()  # type: ignore[attr-defined]
    manager.module_weight_config_triple.clear()  # its references would keep the model in memory


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the weight matrices of a model's layers, without embeddings and LM head."""
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
    """Yield every tensor of an optimizer's state; a tensor subclass that wraps several yields these."""
    for part in optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,):
        for state in part.state.values():
            for value in state.values():
                yield from _tensors(value)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None or hasattr(value, "_local_tensor"):  # a DTensor is a shard of one state, not several tensors
            yield value
        else:  # torchao's quantized states
            yield from (getattr(value, name) for name in flatten()[0])
    elif hasattr(value, "ortho_matrix"):  # galore_torch's projector
        yield from _tensors(value.ortho_matrix)


class OptimizerPair(torch.optim.Optimizer):
    """Two optimizers with separate parameters, stepped in sequence."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__(list(itertools.chain(*(group["params"] for part in parts for group in part.param_groups))), {})
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters of both."""
        assert closure is None
        for part in self.parts:
            part.step()


class InBackward(OptimizerPair):
    """One optimizer for each parameter, which steps and frees the gradient once the gradient is complete.

    Source: torchtune 0.6 training/memory.py, register_optim_in_bwd_hooks.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__(*parts)
        for part in parts:
            for parameter in part.param_groups[0]["params"]:
                parameter.register_post_accumulate_grad_hook(partial(_update, part))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: backward has updated every parameter."""
        assert closure is None


def _update(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


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
    return OptimizerPair(matrices, adamw(rest, lr=LEARNING_RATE, **SWITCHES[training.optimizer_implementation]))


def _galore(
    training: TrainingSpec, parameters: list[nn.Parameter], hidden: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return GaLore with the settings of galore_torch's README, except for the rank and the gap between projectors.

    Each step recomputes the projectors, as every 200th step of a run does: it needs most.
    """
    options, apart = training.optimizer_options, {id(parameter) for parameter in hidden}
    rank = options.rank or GALORE_RANK
    projected = {"params": hidden, "rank": rank, "update_proj_gap": 1, "scale": 0.25, "proj_type": "std"}
    groups = [{"params": [parameter for parameter in parameters if id(parameter) not in apart]}, projected]
    factory = _of("galore_torch", "GaLoreAdamW", training)
    return factory(groups, lr=LEARNING_RATE, weight_decay=weight_decay("galore", options), no_deprecation_warning=True)


def _of(module: str, name: str, training: TrainingSpec) -> Factory:
    """Return a class of an optional package.

    Raises:
        Unavailable: the package is not installed, or cannot be loaded here.
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
