"""A module and its inputs from a user's Python file: `model.py:make_model`."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from torch import nn

from memcalc.errors import ENDINGS, InputError, MemcalcError
from memcalc.spec.python_target import NAME_REMEDY, split_target

INPUTS = "make_inputs"  # default name of the function that makes the inputs, in the module's file
MACHINERY = re.compile(r"[/\\](site-packages|dist-packages|memcalc[/\\](step|recorder|tracing|api|cli))[/\\]|^<")


class UserModule(NamedTuple):
    """A user's module with its inputs."""

    name: str  # file name and function, as shown in reports
    module: nn.Module  # the built module; its parameters may be on the meta device
    inputs: Any  # of its forward: a tuple of positional arguments, a mapping of keyword arguments, or one argument


def own_module(target: str, inputs: str | None = None) -> UserModule:
    """Run the functions that make a module and its inputs.

    Args:
        target: `file.py:name` of a function without arguments that returns a module, a class that needs no arguments,
            or a module.
        inputs: `file.py:name` of a function without arguments that returns the inputs; None: `make_inputs` of the
            module's file.

    Raises:
        InputError: the file or name does not exist, its code fails, or the result is not a module.
    """
    file, name = split_target(target)
    source = _load(file)
    module = _module(source, file, name)
    if inputs is None:
        if not hasattr(source, INPUTS):
            raise InputError(
                f"there are no inputs: {file.name} has no function {INPUTS}.",
                f"Write one that returns the arguments of forward, or name another with --inputs {file.name}:NAME.",
                target,
            )
        return UserModule(f"{file.name}:{name}", module, _made(source, file, INPUTS))
    other, function = split_target(inputs)
    at = source if other.resolve() == file.resolve() else _load(other)
    return UserModule(f"{file.name}:{name}", module, _made(at, other, function))


def inputs_of_file(target: str) -> Mapping[str, Any]:
    """Run the function that makes the arguments of a model's forward by name.

    Args:
        target: `file.py:name` of a function without arguments that returns a mapping.

    Raises:
        InputError: the file or name does not exist, its code fails, or the result is not a mapping.
    """
    file, name = split_target(target)
    found = _made(_load(file), file, name)
    if not isinstance(found, Mapping):
        raise InputError(
            f"the function returns {type(found).__name__}, not a mapping of forward's arguments by name.",
            "Return a dictionary with the labels in it, as a data collator does.",
            target,
        )
    return found


def own_line(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback, such as "model.py:12"; else the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not MACHINERY.search(frame.filename)] or list(frames)
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "unknown line"


def _load(file: Path) -> ModuleType:
    """Import a file, with its directory first on the search path, as in `python file.py`."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(file.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[file.stem] = module  # dataclasses and pickles of the file look up their module
    try:
        spec.loader.exec_module(module)
    except (MemcalcError, *ENDINGS):
        raise
    except BaseException as error:
        raise _stopped(error, "importing it", str(file)) from error
    return module


def _module(source: ModuleType, file: Path, name: str) -> nn.Module:
    """Return the module, with parameters on the meta device if its code allows that."""
    found = _attribute(source, file, name)
    if isinstance(found, nn.Module):
        return found
    try:
        with parameters_without_memory():
            made = found()
    except ENDINGS:
        raise
    except BaseException:  # noqa: BLE001 -- code that reads parameter values while it builds needs real parameters
        made = _called(found, file, name)
    if not isinstance(made, nn.Module):
        raise InputError(
            f"the function returns {type(made).__name__}, not a torch.nn.Module.",
            "Return the module.",
            f"{file}:{name}",
        )
    return made


def _made(source: ModuleType, file: Path, name: str) -> Any:
    found = _attribute(source, file, name)
    return _called(found, file, name) if callable(found) else found


def _attribute(source: ModuleType, file: Path, name: str) -> Any:
    if not hasattr(source, name):
        own = [key for key, value in vars(source).items() if getattr(value, "__module__", None) == source.__name__]
        there = f" Choose from {', '.join(own)}." if own else ""
        raise InputError(f"the file has no {name}.{there}", NAME_REMEDY, str(file))
    found = getattr(source, name)
    if not callable(found) and name != INPUTS and isinstance(found, ModuleType):
        raise InputError(f"{name} is a Python module.", NAME_REMEDY, str(file))
    return found


def _called(function: Any, file: Path, name: str) -> Any:
    try:
        return function()
    except (MemcalcError, *ENDINGS):
        raise
    except BaseException as error:
        raise _stopped(error, f"{name}()", f"{file}:{name}") from error


def _stopped(error: BaseException, what: str, where: str) -> InputError:
    return InputError(
        f"{what} raises {type(error).__name__}: {error} ({own_line(error)}).",
        "memcalc calls the function without arguments on the CPU, and moves the module to the GPU later.",
        where,
    )


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Move a module's parameters to the meta device as they are registered, so that a large one needs no memory.

    All other tensors are unchanged. A parameter that is registered twice stays one parameter.
    """
    register = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            known = moved.get(id(parameter))
            if known is None or known[0]() is not parameter:
                known = weakref.ref(parameter), nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                moved[id(parameter)] = known
            parameter = known[1]
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_parameter):
        yield
