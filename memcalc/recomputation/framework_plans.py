"""A plan as code or options for training frameworks: the closest plan that each supports, with memory and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from memcalc.recomputation.config_chain import ConfigChain
from memcalc.recomputation.evaluation import Evaluation, evaluate
from memcalc.recomputation.plan import Segment, leaves, segmented
from memcalc.recomputation.strategies.rules import cut

Writer = Callable[["ConfigChain", Segment, int], tuple[str, tuple[str, ...], Segment]]


class FrameworkText(NamedTuple):
    """Text to paste for one framework."""

    framework: str  # its name
    lines: tuple[str, ...]  # to paste
    items: Segment  # the plan that they express
    evaluation: Evaluation  # memory and cost of that plan
    difference: str = ""  # from the planned one, in words; "": only what the evaluations show


def plan_texts(
    configured: ConfigChain, items: Segment, budget: int, writers: tuple[Writer, ...] | None = None
) -> list[FrameworkText]:
    """Return the plan for every framework, or for those of the given writers."""
    said = []
    for write in (_pytorch, transformers, _megatron, deepspeed, torchtitan) if writers is None else writers:
        framework, lines, nearest = write(configured, items, budget)
        said.append(FrameworkText(framework, lines, nearest, evaluate(configured.chain, nearest)))
    return said


def _pytorch(configured: ConfigChain, items: Segment, _: int) -> tuple[str, tuple[str, ...], Segment]:
    """torch.utils.checkpoint, nested like the plan: exactly the plan."""
    plan = _numbered([item for item in items if next(leaves(item)) in _layers(configured)], configured.first)
    lines = (
        "from torch.utils.checkpoint import checkpoint",
        f"PLAN = {plan}",
        "def run(plan, x):  # in place of `for layer in layers: x = layer(x)`",
        "    for item in plan:",
        "        if isinstance(item, int):",
        "            x = layers[item](x)",
        "        else:",
        "            x = checkpoint(run, item, x, use_reentrant=False)",
        "    return x",
    )
    return "PyTorch", lines, items


def transformers(configured: ConfigChain, items: Segment, _: int) -> tuple[str, tuple[str, ...], Segment]:
    """Single layers: modeling_layers.GradientCheckpointingLayer has a switch per layer."""
    again = {block for item in items if not isinstance(item, int) for block in leaves(item)}
    lines = (
        'model.gradient_checkpointing_enable({"use_reentrant": False})',
        f"RECOMPUTED = {ranges(sorted(block - configured.first for block in again))}",
        "for index, layer in enumerate(model.base_model.layers):  # GPT-2 and its like: .h",
        "    layer.gradient_checkpointing = index in RECOMPUTED",
    )
    return "transformers", lines, segmented(len(configured.chain), ((b, b + 1) for b in sorted(again)))


def _megatron(configured: ConfigChain, _: Segment, budget: int) -> tuple[str, tuple[str, ...], Segment]:
    """--recompute-method uniform: segments of k layers; block: the first n layers, one at a time."""
    layers = configured.stop - configured.first
    choices: list[tuple[str, int, Segment]] = [("block", n, _first(configured, n)) for n in range(layers + 1)]
    if configured.chain.longest is None:
        choices += [("uniform", k, cut(configured.chain, k)) for k in range(1, layers + 1)]
    method, number, nearest = _cheapest(configured, choices, budget)
    if not number:
        return "Megatron-LM", ("# nothing: no --recompute-granularity",), nearest
    words = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {number}"
    return "Megatron-LM", (words,), nearest


def deepspeed(configured: ConfigChain, items: Segment, _: int) -> tuple[str, tuple[str, ...], Segment]:
    """deepspeed.checkpointing.checkpoint: PyTorch's reentrant variant, which cannot be nested."""
    outer = tuple(
        item if isinstance(item, int) or all(isinstance(inner, int) for inner in item) else tuple(leaves(item))
        for item in items
    )
    plan = _numbered([item for item in outer if next(leaves(item)) in _layers(configured)], configured.first)
    lines = (
        "import deepspeed",
        "deepspeed.checkpointing.configure(mpu_=None)",
        f"PLAN = {plan}",
        "for item in PLAN:  # in place of `for layer in layers: x = layer(x)`",
        "    if isinstance(item, int):",
        "        x = layers[item](x)",
        "    else:",
        "        together = torch.nn.Sequential(*(layers[i] for i in item))",
        "        x = deepspeed.checkpointing.checkpoint(together, x)",
    )
    return "DeepSpeed", lines, outer


def torchtitan(configured: ConfigChain, _: Segment, budget: int) -> tuple[str, tuple[str, ...], Segment]:
    """mode full; or selective with selective_ac_option "k": layers k-1, 2k-1, ..., one at a time."""
    layers = configured.stop - configured.first
    choices: list[tuple[str, int, Segment]] = [("none", 0, tuple(range(len(configured.chain))))]
    for k in range(1, layers + 1):
        blocks = range(configured.first + k - 1, configured.stop, k)
        nearest = segmented(len(configured.chain), ((block, block + 1) for block in blocks))
        choices.append(("selective" if k > 1 else "full", k, nearest))
    mode, k, nearest = _cheapest(configured, choices, budget)
    lines = ["[activation_checkpoint]", f'mode = "{mode}"']
    if mode == "selective":
        lines.append(f'selective_ac_option = "{k}"')
    return "torchtitan", tuple(lines), nearest


def _cheapest(
    configured: ConfigChain, choices: list[tuple[str, int, Segment]], budget: int
) -> tuple[str, int, Segment]:
    """Return the cheapest choice that fits; if none does, the smallest."""

    def price(choice: tuple[str, int, Segment]) -> tuple[bool, int, int]:
        evaluation = evaluate(configured.chain, choice[2])
        over = evaluation.peak_bytes > budget
        return over, evaluation.peak_bytes if over else evaluation.recompute_flops, evaluation.peak_bytes

    return min(choices, key=price)


def _first(configured: ConfigChain, layers: int) -> Segment:
    spans: Iterator[tuple[int, int]] = ((configured.first + n, configured.first + n + 1) for n in range(layers))
    return segmented(len(configured.chain), spans)


def _layers(configured: ConfigChain) -> range:
    return range(configured.first, configured.stop)


def _numbered(items: list[int | Segment], first: int) -> str:
    """Return blocks as a Python list of layers."""
    return "[" + ", ".join(_word(item, first) for item in items) + "]"


def _word(item: int | Segment, first: int) -> str:
    return str(item - first) if isinstance(item, int) else _numbered(list(item), first)


def ranges(numbers: list[int]) -> str:
    """Return numbers as Python code, as a range if they are consecutive."""
    if numbers and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"range({numbers[0]}, {numbers[-1] + 1})"
    return "{" + ", ".join(map(str, numbers)) + "}"
