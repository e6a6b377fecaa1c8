"""The expensive operators of a layer by name, in execution order, for selective checkpointing.

Policies of `torch.utils.checkpoint` see ATen operators, not modules. Matmuls and attention kernels have nearly all of
a layer's FLOPs. The n-th of them is the same one in every forward, so a policy counts them.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.model import ModelSpec
from memcalc.spec.recompute_plan import has_segments
from memcalc.spec.rule_sets.violations import Violation
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec


def layer_matmuls(model: ModelSpec, training: TrainingSpec) -> tuple[str, ...]:
    """Return the matmuls and the attention kernel of a plain layer, dense or with experts, in execution order."""
    core = ("scores", "attention output") if training.attention == "eager" else ("attention",)
    return ("attention.qkv_proj", *core, "attention.o_proj", *_mlp_products(model))


def _mlp_products(model: ModelSpec) -> tuple[str, ...]:
    """Return the matmuls of the MLP; a projection of all routed experts is one matmul."""
    moe = model.moe
    if moe is None:
        return tuple(f"mlp.{name}_proj" for name in _matrices(model))
    products = ("mlp.router", *(f"mlp.experts.{name}" for name in _matrices(model)))
    if moe.shared_expert_intermediate_size:
        products += tuple(f"mlp.shared_experts.{name}_proj" for name in _matrices(model))
        products += ("mlp.shared_expert_gate",) if moe.shared_expert_gate else ()
    return products


def _matrices(model: ModelSpec) -> tuple[str, ...]:
    return ("gate", "up", "down") if model.gated_mlp else ("up", "down")


def saves_matmuls(spec: Spec) -> str:
    """Return why single operators of this run's layers cannot be saved; "" if they can."""
    model, training = spec.model, spec.training
    if training.implementation != "plain":
        return f"implementation = {training.implementation} has no modelled order of operators"
    if model.mla is not None:
        return "the order of operators of latent attention is not modelled"
    if model.moe is not None:
        if model.layers_with_experts(0, model.num_layers) < model.num_layers:
            return "only some layers have experts, and all recomputed layers must save the same operators"
        if model.experts_have_bias:
            return "experts with biases run a different matmul"
        if spec.parallelism.expert_parallel > 1:
            return f"expert_parallel = {spec.parallelism.expert_parallel} exchanges tokens between matmuls"
    if training.finetune != "full":
        return f"finetune = {training.finetune} adds separate matmuls of adapters"
    if spec.parallelism.context_parallel > 1:
        return f"context_parallel = {spec.parallelism.context_parallel} splits attention into several kernels"
    return ""


def saved_matmuls_rules(spec: Spec) -> Iterator[Violation]:
    """Yield violations of the rules of `training.recompute_keep`."""
    training = spec.training
    if not training.recompute_keep:
        return
    key = ("training", "recompute_keep")
    if training.recompute in ("none", "selective") or has_segments(training.recompute):
        what = "segments" if has_segments(training.recompute) else training.recompute
        yield Violation(
            key,
            f"recompute_keep needs recomputed layers, but recompute = {what}.",
            "Set recompute: full, every-k or a list of single layers.",
        )
        return
    if why := saves_matmuls(spec):
        yield Violation(key, f"recompute_keep is not supported, because {why}.", "Leave recompute_keep out.")
        return
    known = layer_matmuls(spec.model, training)
    for name in training.recompute_keep:
        if name not in known:
            yield Violation(
                key, f"recompute_keep = {name} is not an operator of the layer.", f"Choose from {', '.join(known)}."
            )
