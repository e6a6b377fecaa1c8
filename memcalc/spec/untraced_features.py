"""Features that memcalc's own traced or measured step lacks, and fields that its DTensor plan cannot split."""

from __future__ import annotations

from memcalc.spec.limits import Limit
from memcalc.spec.spec import Spec
from memcalc.spec.towers import tower_trains


def not_run(spec: Spec) -> tuple[Limit, ...]:
    """Return requested features that memcalc's own step does not run; a dry run of the program does."""
    training = spec.training
    asked = {
        "the second sequence of each pair": training.pairs,
        "the reference model": training.reference_model,
        "the teacher, its logits and the divergence from them": training.teacher is not None,
        "evaluation during training": training.evaluation_batch_size is not None,
        "completions that the model generates": training.completion_length is not None,
        "padding-free batches": training.padding_free,
        "the mask of padded sequences": training.padding_mask != "none",
        "torch.compile": training.compile,
        "axolotl's functions of several adapters": training.lora is not None and bool(training.lora.fused),
        "logits that are shifted": training.loss_shift != "labels",
        # a `Spec` has the formulas' fields of the language model, from which a step of text is built
        "images: activations, gradients and optimizer state of the vision tower": tower_trains(spec.model, training),
    }
    found = tuple(Limit(what, holds_memory=True) for what, is_so in asked.items() if is_so)
    if training.empty_cache_steps is None:
        return found
    return (*found, Limit("torch.cuda.empty_cache(), after which less is reserved", holds_memory=False))


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
