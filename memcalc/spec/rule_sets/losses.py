"""Rules of losses, of completions that a model generates to train on, and of a teacher."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.rule_sets.violations import Violation, only
from memcalc.spec.spec import Spec
from memcalc.spec.training import TOKENWISE


def loss(spec: Spec) -> Iterator[Violation]:
    """Yield violations of the rules of each loss."""
    training, model = spec.training, spec.model
    kind = training.loss
    yield from _classification(spec)
    yield from _pairs(spec)
    if not training.loss_upcast and (training.implementation != "plain" or kind != "materialized"):
        yield Violation(
            ("training", "loss_upcast"),
            f"loss_upcast = false needs implementation = plain and loss = materialized, not {training.implementation} "
            f"and {kind}.",
            "Set loss_upcast: true, or implementation: plain and loss: materialized.",
        )
    whole = kind not in TOKENWISE or not training.loss_recompute
    if not training.loss_recompute and kind != "chunked":
        yield Violation(
            ("training", "loss_recompute"),
            f"loss_recompute = false needs loss = chunked: loss = {kind} has no chunks to checkpoint.",
            "Set loss: chunked, or leave loss_recompute out.",
        )
    if not training.chunked_head and training.loss_recompute:
        yield Violation(
            ("training", "chunked_head"),
            "chunked_head = false needs loss_recompute = false: recomputation starts from the hidden states of each "
            "chunk.",
            "Set loss: chunked and loss_recompute: false, or leave chunked_head out.",
        )
    for field, known in (("repeat_kv", ("plain", "torchtitan", "huggingface")), ("heads_first", ("plain",))):
        if getattr(training, field) and training.implementation not in known:
            yield Violation(
                ("training", field),
                f"{field} = true needs implementation = {' or '.join(known)}, not {training.implementation}.",
                f"Leave {field} out, or set implementation: plain.",
            )
    if training.norm_dtype == "fp32" and training.implementation != "plain":
        yield Violation(
            ("training", "norm_dtype"),
            f"norm_dtype = fp32 needs implementation = plain: implementation = {training.implementation} has its own "
            "norms.",
            "Set norm_dtype: input, or implementation: plain.",
        )
    if training.logits_dtype == "fp32" and (training.implementation in ("megatron", "torchtitan") or not whole):
        yield Violation(
            ("training", "logits_dtype"),
            f"logits_dtype = fp32 needs logits, but implementation = {training.implementation} with loss = {kind} "
            "returns none.",
            "Set logits_dtype: compute.",
        )
    if kind not in TOKENWISE or training.implementation == "megatron":
        return
    if spec.parallelism.tensor_parallel > 1 or spec.parallelism.context_parallel > 1:
        yield Violation(
            ("training", "loss"),
            f"loss = {kind} is not modelled with a sharded vocabulary or sequence.",
            "Set loss: vocab-parallel or materialized, or tensor_parallel: 1 and context_parallel: 1.",
        )
    if kind in ("fused", "tiled") and model.lm_head_bias:
        yield Violation(
            ("training", "loss"),
            f"loss = {kind} is not modelled with model.lm_head_bias = true.",
            "Set loss: chunked, or model.lm_head_bias: false.",
        )
    if kind in ("fused", "tiled") and training.qlora is not None and training.qlora.quantize_lm_head:
        yield Violation(
            ("training", "loss"),
            f"loss = {kind} needs an unquantized LM head, but quantize_lm_head quantizes it to 4 bits.",
            "Set loss: chunked, or quantize_lm_head: false.",
        )


def _pairs(spec: Spec) -> Iterator[Violation]:
    training, parallelism = spec.training, spec.parallelism
    if training.loss == "gathered" and not training.pairs:
        yield Violation(
            ("training", "loss"),
            "loss = gathered is of pairs of sequences.",
            "Set pairs: true, or loss: materialized.",
        )
    if training.loss != "gathered" and training.scored_apart:
        yield Violation(
            ("training", "scored_apart"),
            f"scored_apart = true needs loss = gathered, not {training.loss}.",
            "Set loss: gathered, or leave scored_apart out.",
        )
    reference = training.reference_model or training.lora is not None
    if training.reference_logits_until == "step" and not (training.loss == "gathered" and reference):
        yield Violation(
            ("training", "reference_logits_until"),
            "reference_logits_until = step needs loss = gathered, and a reference model or adapters.",
            "Leave reference_logits_until out.",
        )
    if training.loss == "gathered" and (parallelism.tensor_parallel > 1 or parallelism.context_parallel > 1):
        yield Violation(
            ("training", "loss"),
            "loss = gathered is not modelled with a sharded vocabulary or sequence.",
            "Set tensor_parallel: 1 and context_parallel: 1.",
        )
    if training.loss == "selective" and not (training.pairs and training.implementation == "huggingface"):
        yield Violation(
            ("training", "loss"),
            "loss = selective is a kernel of axolotl and TRL 1.14, for pairs of sequences with transformers' modules.",
            "Set pairs: true and implementation: huggingface, or loss: materialized.",
        )


def _classification(spec: Spec) -> Iterator[Violation]:
    """Yield violations by fields that do not apply to a classification head."""
    if not spec.model.num_labels:
        return
    fields: dict[str, tuple[object, ...]] = {
        "training.implementation": ("plain", "huggingface"),
        "model.tie_word_embeddings": (False,),
        "model.lm_head_bias": (False,),
        "training.loss": ("materialized",),
        "parallelism.tensor_parallel": (1,),
        "parallelism.pipeline_parallel": (1,),
    }
    problem = f"num_labels = {spec.model.num_labels} makes a classification head, which does not support {{}}."
    yield from only(spec, fields, problem, "num_labels: 0")


def labels(spec: Spec) -> Iterator[Violation]:
    """Yield violations: only TRL's tiled loss selects the tokens with a label, which the last token never has."""
    training = spec.training
    if training.labeled_tokens is None:
        return
    if training.loss != "tiled":
        yield Violation(
            ("training", "labeled_tokens"),
            f"labeled_tokens = {training.labeled_tokens} has no effect on loss = {training.loss}, which reads all "
            "tokens.",
            "Leave labeled_tokens out, or set loss: tiled.",
        )
    elif training.labeled_tokens >= training.sequence_length:
        yield Violation(
            ("training", "labeled_tokens"),
            f"labeled_tokens = {training.labeled_tokens} must be less than sequence_length = "
            f"{training.sequence_length}: the last token has no label.",
            "Lower labeled_tokens, or raise sequence_length.",
        )


def rollouts(spec: Spec) -> Iterator[Violation]:
    """A completion follows a prompt; generation is that of one rank that has all weights."""
    training = spec.training
    if training.completion_length is None:
        if training.steps_per_generation is not None:
            yield Violation(
                ("training", "steps_per_generation"),
                f"steps_per_generation = {training.steps_per_generation} needs completion_length, without which "
                "nothing is generated.",
                "Set completion_length, or leave steps_per_generation out.",
            )
        return
    if training.completion_length >= training.sequence_length:
        yield Violation(
            ("training", "completion_length"),
            f"completion_length = {training.completion_length} leaves no prompt in sequence_length = "
            f"{training.sequence_length}.",
            "Raise sequence_length, which counts prompt and completion, or lower completion_length.",
        )
    if spec.model.full_attention is not None:
        yield Violation(
            ("training", "completion_length"),
            "generation of a model with separate heads in full attention is not modelled.",
            "Leave completion_length out, or dry-run the program: `memcalc dry-run --gpu GPU -- python script.py`.",
        )
    fields: dict[str, tuple[object, ...]] = {
        "training.implementation": ("plain", "huggingface"),
        "parallelism.zero_stage": (0, 1, 2),
        "parallelism.tensor_parallel": (1,),
        "parallelism.pipeline_parallel": (1,),
        "parallelism.context_parallel": (1,),
    }
    problem = f"{{}} is not modelled with completion_length = {training.completion_length}."
    yield from only(spec, fields, problem, "leave completion_length out")


def teacher(spec: Spec) -> Iterator[Violation]:
    """A teacher runs whole on each rank, or sharded as the student is, and both return all logits."""
    training, model = spec.training, spec.model
    if training.teacher is None:
        if training.teacher_dtype is not None:
            yield Violation(
                ("training", "teacher_dtype"),
                f"teacher_dtype = {training.teacher_dtype} needs a teacher.",
                "Set teacher, or leave teacher_dtype out.",
            )
        if training.divergence != "forward":
            yield Violation(
                ("training", "divergence"),
                f"divergence = {training.divergence} needs a teacher.",
                "Set teacher, or leave divergence out.",
            )
        return
    if training.teacher.vocab_size != model.vocab_size:
        yield Violation(
            ("training", "teacher"),
            f"the teacher's vocab_size = {training.teacher.vocab_size} differs from the model's {model.vocab_size}, "
            "but the logits of both are compared.",
            "Choose a teacher with the same vocabulary.",
        )
    if training.loss in TOKENWISE and training.loss_recompute:
        yield Violation(
            ("training", "loss"),
            f"loss = {training.loss} returns no logits, which a teacher is compared with.",
            "Set loss: materialized, or loss: chunked with loss_recompute: false and chunked_head: true.",
        )
    fields: dict[str, tuple[object, ...]] = {
        "training.implementation": ("plain", "huggingface"),
        "training.chunked_head": (True,),
        "training.pairs": (False,),
        "training.reference_model": (False,),
        "training.completion_length": (None,),
        "training.loss_shift": ("labels",),
        "model.num_labels": (0,),
        "parallelism.tensor_parallel": (1,),
        "parallelism.pipeline_parallel": (1,),
        "parallelism.context_parallel": (1,),
        "parallelism.expert_parallel": (1,),
    }
    yield from only(spec, fields, "{} is not modelled with a teacher.", "leave teacher out")
