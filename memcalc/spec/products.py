"""The costly operators of a layer by name, in the order in which they run: what selective checkpointing tells apart.

`torch.utils.checkpoint`'s policies see operators of ATen, not modules. Matrix products and attention's kernels carry
nearly all of a layer's FLOPs, and the n-th of them is the same one in every forward; so a policy counts them.
"""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.broken import Broken
from memcalc.spec.model import ModelSpec
from memcalc.spec.segments import has_segments
from memcalc.spec.spec import Spec
from memcalc.spec.training import TrainingSpec


def layer_products(model: ModelSpec, training: TrainingSpec) -> tuple[str, ...]:
    """Matrix products and attention's kernel of a plain, dense layer, as it runs them."""
    core = ("scores", "attention output") if training.attention == "eager" else ("attention",)
    gate = ("mlp.gate_proj",) if model.gated_mlp else ()
    return ("attention.qkv_proj", *core, "attention.o_proj", *gate, "mlp.up_proj", "mlp.down_proj")


def keeps_products(spec: Spec) -> str:
    """Why single operators of this run's layers cannot be kept; "" where they can."""
    model, training = spec.model, spec.training
    if training.implementation != "plain":
        return f"implementation = {training.implementation}; its order of operators is known of plain alone"
    if model.moe is not None or model.mla is not None:
        return (
            f"the model has {'experts' if model.moe is not None else 'latent attention'}; dense layers alone are known"
        )
    if training.finetune != "full":
        return f"finetune = {training.finetune}, whose adapters have products of their own"
    if spec.parallelism.context_parallel > 1:
        return f"context_parallel = {spec.parallelism.context_parallel}, which splits attention into several kernels"
    return ""


def kept_products_rules(spec: Spec) -> Iterator[Broken]:
    """What `training.recompute_keep` may say."""
    training = spec.training
    if not training.recompute_keep:
        return
    key = ("training", "recompute_keep")
    if training.recompute in ("none", "selective") or has_segments(training.recompute):
        what = "segments" if has_segments(training.recompute) else training.recompute
        yield Broken(
            key,
            f"recompute_keep says what recomputed layers keep all the same, but recompute = {what}.",
            "Set recompute: full, every-k or a list of single layers.",
        )
        return
    if why := keeps_products(spec):
        yield Broken(key, f"recompute_keep names operators, but {why}.", "Leave recompute_keep out.")
        return
    known = layer_products(spec.model, training)
    for name in training.recompute_keep:
        if name not in known:
            yield Broken(key, f"recompute_keep = {name} is no operator of the layer.", f"Known are {', '.join(known)}.")
