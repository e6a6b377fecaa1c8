"""A plan inside layers (selective checkpointing) as code or options for training frameworks."""

from __future__ import annotations

from itertools import combinations

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.ledger.component import Component
from memcalc.ledger.result import Result
from memcalc.recomputation.config_chain import ConfigChain, product_flops
from memcalc.recomputation.framework_plans import (
    FrameworkText,
    deepspeed,
    plan_texts,
    ranges,
    torchtitan,
    transformers,
)
from memcalc.recomputation.plan import leaves
from memcalc.recomputation.strategies.optimal import OptimalPlan
from memcalc.spec.matmuls import layer_matmuls
from memcalc.spec.spec import Spec
from memcalc.units import format_bytes

# Modules of --recompute-modules that a layer has, with prefixes of memcalc's operators that are recomputed with each.
# With experts, "moe" covers all of them. Source: Megatron-LM megatron/training/arguments.py,
# megatron/core/transformer/transformer_layer.py.
CORE = ("attention", "scores", "attention output")
DENSE = {"core_attn": CORE, "mlp": ("mlp.",), "layernorm": ()}
EXPERTS = {"core_attn": CORE, "moe": ("mlp.",), "layernorm": ()}


def selective_plan_texts(
    configured: ConfigChain, found: OptimalPlan, saved_operators: tuple[str, ...], budget: int, kept: int
) -> list[FrameworkText]:
    """Return the plan for every framework.

    Args:
        configured: the chain of whole layers.
        found: the plan.
        saved_operators: operators with results that recomputed layers save.
        budget: bytes that may be allocated.
        kept: activation bytes of the planned run at the end of forward.
    """
    again = [next(leaves(item)) - configured.first for item in found.plan.items if not isinstance(item, int)]
    spec = configured.spec
    order = layer_matmuls(spec.model, spec.training)
    numbers = [order.index(name) for name in saved_operators]
    context = (*_policy(numbers), f"RECOMPUTED = {ranges(again)}")
    pytorch = (
        *context,
        "for index, layer in enumerate(layers):  # in place of `x = layer(x)`",
        "    if index in RECOMPUTED:",
        "        x = checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)",
        "    else:",
        "        x = layer(x)",
    )
    lines = (
        f"KEEP = {_set(_apart(numbers, fused=spec.model.fused_qkv))}  # in the context_fn of PyTorch",
        f"RECOMPUTED = {ranges(again)}",
        "model.gradient_checkpointing_enable(",
        '    {"use_reentrant": False, "context_fn": context_fn})',
        "for index, layer in enumerate(model.base_model.layers):  # GPT-2 and its like: .h",
        "    layer.gradient_checkpointing = index in RECOMPUTED",
    )
    own = "the same operators; transformers' modules save other tensors in addition"
    theirs = FrameworkText("transformers", lines, found.plan.items, found.evaluation, own)
    if spec.model.moe is not None:  # its experts run other matmuls, and their number depends on the kernels
        theirs = plan_texts(configured, found.plan.items, budget, (transformers,))[0]
    return [
        FrameworkText("PyTorch", pytorch, found.plan.items, found.evaluation),
        theirs,
        _megatron(configured, found, kept),
        *plan_texts(configured, found.plan.items, budget, (deepspeed, torchtitan)),
    ]


def _policy(numbers: list[int]) -> tuple[str, ...]:
    """Return code of a context_fn that saves a layer's matmuls by their numbers."""
    return (
        "import torch",
        "from torch.utils.checkpoint import CheckpointPolicy, checkpoint",
        "from torch.utils.checkpoint import create_selective_checkpoint_contexts",
        "aten = torch.ops.aten",
        "PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default,",
        "            aten._scaled_dot_product_flash_attention.default,",
        "            aten._scaled_dot_product_efficient_attention.default}",
        f"KEEP = {_set(numbers)}  # of a layer's products, in the order in which they run",
        "def context_fn():",
        "    run = {False: 0, True: 0}",
        "    def policy(ctx, op, *args, **kwargs):",
        "        if op in PRODUCTS:",
        "            run[ctx.is_recompute] += 1",
        "            if run[ctx.is_recompute] - 1 in KEEP:",
        "                return CheckpointPolicy.MUST_SAVE",
        "        return CheckpointPolicy.PREFER_RECOMPUTE",
        "    return create_selective_checkpoint_contexts(policy)",
    )


def _set(numbers: list[int]) -> str:
    return f"{{{', '.join(map(str, numbers))}}}"


def _apart(numbers: list[int], *, fused: bool) -> list[int]:
    """Return the numbers if q, k and v are three matmuls instead of one."""
    if fused:
        return numbers
    first = [0, 1, 2] if 0 in numbers else []
    return [*first, *(number + 2 for number in numbers if number)]


def _megatron(configured: ConfigChain, found: OptimalPlan, kept: int) -> FrameworkText:
    """--recompute-modules: the cheapest choice that saves no more than the plan; if none does, the smallest."""
    flops = product_flops(configured.spec)
    layers = configured.stop - configured.first
    known = DENSE if configured.spec.model.moe is None else EXPERTS
    choices = []
    for count in range(1, len(known) + 1):
        for modules in combinations(known, count):
            again = layers * sum(_flops_of(flops, known[module]) for module in modules)
            try:
                held = activation_bytes(estimate(_as_megatron(configured.spec, modules)))
            except InputError as error:
                return FrameworkText(
                    "Megatron-LM", (f"# {error}",), found.plan.items, found.evaluation, "not estimated there"
                )
            choices.append((held > kept, held if held > kept else again, held, again, modules))
    _, _, held, again, modules = min(choices)
    line = f"--recompute-granularity selective --recompute-modules {' '.join(modules)}"
    difference = (
        f"whole modules, of all layers; those of Megatron-Core save {format_bytes(held)} of activations where the plan "
        f"saves {format_bytes(kept)}, and recompute {again / configured.chain.flops:.1%} of a forward"
    )
    return FrameworkText("Megatron-LM", (line,), found.plan.items, found.evaluation, difference)


def _flops_of(flops: dict[str, int], operators: tuple[str, ...]) -> int:
    """Return the FLOPs of operators by name; a name that ends in a dot matches all names with that prefix."""
    every = tuple(name for name in operators if name.endswith("."))
    return sum(amount for name, amount in flops.items() if name in operators or (every and name.startswith(every)))


def activation_bytes(result: Result) -> int:
    """Return the activation bytes at the end of forward."""
    return result.ledger.components("loss_2").get(Component.ACTIVATIONS, 0)


def _as_megatron(spec: Spec, modules: tuple[str, ...]) -> Spec:
    """Return the same layers in Megatron-Core, with fp32 main gradients, which do not affect activations."""
    from memcalc.importers.loading import load

    raw = spec.model_dump()
    raw["training"] |= {"implementation": "megatron", "recipe": "mixed-18", "loss": "vocab-parallel"}
    raw["training"] |= {"recompute": "selective", "recompute_modules": modules}
    return load(raw, (), gpu=None)
