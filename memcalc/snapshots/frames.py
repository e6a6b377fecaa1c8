"""Attribution of an allocation by its stack: source line and component."""

from __future__ import annotations

import re

from memcalc.allocator.pytorch.dump import COMPONENT
from memcalc.ledger.component import Component
from memcalc.snapshots.recording import Snapshot, Stack, StackFrame

BACKWARD = "backward"  # autograd's threads have no Python frames
NO_STACK = "no stack recorded"

_LIBRARIES = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python[\d.]+|torch)[/\\]|^<")
_LAYERS = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\](?!module\.py|loss\.py)")
_MODULE = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py$")
_OPTIMIZER = re.compile(r"[/\\]optim(?:izers?)?[/\\]|[/\\]optimizer\.py$|bitsandbytes[/\\]optim")
_DISTRIBUTED = re.compile(
    r"[/\\]torch[/\\]distributed[/\\]|[/\\]deepspeed[/\\]runtime[/\\]|[/\\]megatron[/\\]core[/\\]distributed"
)
_WORKSPACE = re.compile(
    r"getNewWorkspace|CUDABlasLtWorkspace|setWorkspaceForHandle|getCurrentCUDABlasHandle|cudnn.*[Ww]orks"
)
_LOSS = re.compile(r"cross_entropy|nll_loss|CrossEntropy|log_softmax", re.IGNORECASE)
_STATE_MAKERS = frozenset(("_init_group", "_init_state", "init_state", "initialize_state"))
_LOADERS = frozenset(("_apply", "reset_parameters", "from_pretrained", "load_state_dict", "to_empty", "init_empty"))


def is_python(frame: StackFrame) -> bool:
    """Return whether a frame is Python; others are C++."""
    return frame.filename.endswith(".py") or frame.filename.startswith("<")


def place(stack: Stack) -> str:
    """Return the source line that allocated, user code before library code: "train.py:12 main"."""
    lines = [frame for frame in stack if is_python(frame)]
    if not lines:
        return BACKWARD if any("autograd" in frame.name for frame in stack) or not stack else _native(stack)
    own = next((frame for frame in lines if not _LIBRARIES.search(frame.filename)), None)
    frame = own or lines[0]
    return f"{frame.filename}:{frame.line} {frame.name}"


def component(stack: Stack) -> Component | None:
    """Return the component, if the stack shows it; otherwise None.

    Allocations of backward are classified by their lifetime (see `composition`), not by their stack. Snapshots written
    by memcalc name the component.
    """
    told = next((frame.name for frame in stack if frame.filename == COMPONENT), None)
    if told in set(Component):
        return Component(told)
    names = {frame.name for frame in stack}
    files = [frame.filename for frame in stack if is_python(frame)]
    if any(map(_WORKSPACE.search, names)):
        return Component.LIBRARY_WORKSPACE
    if any(map(_OPTIMIZER.search, files)):
        return Component.OPTIMIZER_STATE if _STATE_MAKERS & names else Component.TEMPORARIES
    if any(map(_DISTRIBUTED.search, files)):
        return Component.COMMUNICATION_BUFFERS
    return None if is_backward(stack) else _of_model(names, files)


def _of_model(names: set[str], files: list[str]) -> Component | None:
    """Return the component of a model's allocation: loss, weights, or activations."""
    if any(map(_LOSS.search, names)):
        return Component.LOGITS_AND_LOSS
    if _LOADERS & names or ("__init__" in names and any(map(_LAYERS.search, files))):
        return Component.WEIGHTS
    if names & {"forward", "_call_impl", "_wrapped_call_impl"}:
        return Component.ACTIVATIONS
    return Component.WEIGHTS if any(map(_MODULE.search, files)) else None


def is_backward(stack: Stack) -> bool:
    """Return whether autograd's engine allocated: in a separate thread, or under Tensor.backward."""
    names = " ".join(frame.name for frame in stack)
    if "torch::autograd::Engine" in names or "torch::autograd::Node" in names or "_engine_run_backward" in names:
        return True
    return bool(stack) and not any(map(is_python, stack)) and "autograd" in names


def _native(stack: Stack) -> str:
    """Return the innermost informative C++ frame."""
    return next((frame.name.partition("(")[0] for frame in stack if "CapturedTraceback" not in frame.name), NO_STACK)


def empties_cache(snapshot: Snapshot, stack: int) -> bool:
    """Return whether memory was freed to the driver because the program emptied the cache."""
    frames = snapshot.stacks[stack]
    return any(name in frame.name for frame in frames for name in ("empty_cache", "emptyCache"))
