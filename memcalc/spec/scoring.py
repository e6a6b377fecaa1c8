"""Forwards outside autograd that score a micro-batch of pairs, between the policy's loss and its backward.

TRL 1.16 trl/trainer/dpo_trainer.py, _compute_loss, in training and in an evaluation: a second model computes the
reference's log-probabilities, or the policy with its adapters disabled.
"""

from __future__ import annotations

from memcalc.spec.spec import Spec

LIVE_LOGITS = ("selective", "gathered")  # losses of pairs from all logits


def scores_itself(spec: Spec) -> bool:
    """Return whether the policy scores pairs a second time, with its adapters disabled.

    Precomputed log-probabilities are not distinguished: with adapters the forward is counted.
    """
    training = spec.training
    without_reference = training.lora is not None and not training.reference_model
    return training.pairs and without_reference and spec.model.num_labels == 0


def scored_by_reference(spec: Spec) -> bool:
    """Return whether a reference scores each micro-batch after the policy; GRPO scores its completions beforehand.

    A policy that FSDP shards has the units of its first forward unsharded in the second: that is not modelled. It is
    counted as a model of its own if all logits are live in it, and else left out.
    """
    training, parallelism = spec.training, spec.parallelism
    is_fsdp = parallelism.engine in ("fsdp1", "fsdp2") and parallelism.zero_stage > 0
    itself = scores_itself(spec) and not (is_fsdp and training.loss not in LIVE_LOGITS)
    return (training.reference_model and training.completion_length is None) or itself


def scores_beside_logits(spec: Spec) -> bool:
    """Return whether the policy's logits are live while a reference scores its micro-batch.

    One function of TRL computes both and names them (dpo_trainer.py, _compute_loss, which axolotl's loss selective
    runs, too); torchtune deletes them before.
    """
    return spec.training.loss == "selective" and scored_by_reference(spec)
