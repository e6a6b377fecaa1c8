"""Layers that PyTorch's DTensor splits over tensor-parallel ranks, by memcalc's plan for it."""

from __future__ import annotations

from memcalc.spec.spec import Spec


def unsplittable(spec: Spec) -> tuple[str, str] | None:
    """Return the first field that DTensor, or memcalc's plan for it, cannot split, and the reason; else None."""
    model, parallelism = spec.model, spec.parallelism
    ranks = parallelism.tensor_parallel
    each_head = model.qk_norm and model.qk_norm_width != "head"
    cannot = {
        "parallelism.engine": parallelism.engine == "ddp"
        and parallelism.data_parallel > 1
        and "DistributedDataParallel does not support sharded parameters (engine fsdp2 with zero_stage 2 or 3 does)",
        "training.implementation": spec.training.implementation not in ("plain", "torchtitan")
        and f"the DTensor plan covers plain and torchtitan modules, not {spec.training.implementation}",
        "model.num_key_value_heads": model.num_key_value_heads % ranks > 0
        and f"{ranks} ranks cannot split {model.num_key_value_heads} key/value heads evenly",
        "model.moe": model.moe is not None and "the plan does not split routed experts",
        "model.position_embedding": model.position_embedding == "alibi" and "ALiBi's slopes differ from head to head",
        "model.qk_norm_width": each_head and f"a norm of queries and keys over {model.qk_norm_width} needs all ranks",
        "model.embedding_size": model.embedding_size != model.hidden_size and "the plan has no embedding_size",
    }
    return next(((key, reason) for key, reason in cannot.items() if reason), None)
