"""The releases of packages that decide memory: what changed with which, and the ones distinguished by default."""

from __future__ import annotations

from typing import NamedTuple


class ReleaseChange(NamedTuple):
    """A change in a package's version that affects memory.

    Args:
        change: a sentence.
        source: file of the package.
    """

    change: str
    source: str


class Package(NamedTuple):
    """A package and its releases.

    Args:
        name: as people call it.
        candidates: where a run names no release: one for each way in which the package behaved, the newest first.
            Releases before the last one are estimated only where a run names them.
        changes: by the first release that has them, the newest first.
    """

    name: str
    candidates: tuple[str, ...]
    changes: dict[str, ReleaseChange]


RELEASES = {
    "transformers": Package(
        "transformers",
        ("5.23.0", "4.57.6", "4.48.3"),
        {
            "5.16": ReleaseChange(
                "FSDP is FSDP2 where fsdp_config names no version; before, FSDP1.",
                "training_args.py, _process_fsdp_args",
            ),
            "5.0": ReleaseChange("Weights are loaded in the checkpoint's dtype; before, in fp32.", "modeling_utils.py"),
            "4.54": ReleaseChange(
                "Grouped keys and values reach scaled_dot_product_attention unrepeated; before, repeated by head.",
                "integrations/sdpa_attention.py",
            ),
            "4.53": ReleaseChange(
                "The mask of padded sequences is boolean, and each layer keeps a copy; before, all shared one.",
                "masking_utils.py",
            ),
            "4.52": ReleaseChange(
                "Trainer keeps 32-bit states of embeddings with 8-bit optimizers of bitsandbytes; before, it did not.",
                "trainer.py, create_optimizer",
            ),
            "4.49": ReleaseChange(
                "The loss shifts the labels; before, it made a shifted copy of the logits in fp32.",
                "loss/loss_utils.py, ForCausalLMLoss",
            ),
        },
    ),
    "accelerate": Package(
        "Accelerate",
        ("1.15.0", "1.13.0"),
        {
            "1.14": ReleaseChange(
                "Under FSDP2 an untied embedding is a unit, and final norm and LM head are one; before, the root's.",
                "utils/fsdp_utils.py, fsdp2_prepare_model",
            ),
        },
    ),
    "deepspeed": Package(
        "DeepSpeed",
        ("0.19.8", "0.18.2"),
        {
            "0.19": ReleaseChange(
                "Under ZeRO-3 the optimizer updates a copy of weights that are fp32, too; before, the weights.",
                "runtime/zero/stage3.py, _create_fp32_partitions",
            ),
            "0.18.4": ReleaseChange(
                "In backward a scaled copy replaces the gradient of the model's output.",
                "runtime/engine.py, _backward_prologue_per_tensor",
            ),
            "0.19.6": ReleaseChange(
                "`engine.backward(loss)` scales the loss alone: the gradient of the model's output is not copied.",
                "runtime/engine.py, _backward_prologue_per_tensor",
            ),
        },
    ),
    "trl": Package(
        "TRL",
        ("1.16.0", "1.14.2", "1.6.0"),
        {
            "1.15": ReleaseChange(
                "SFT and DPO compute the head and the log-probabilities in tiles; gradients are summed in fp32.",
                "trainer/utils.py, add_fused_lm_head",
            ),
            "1.7": ReleaseChange(
                "SFT computes its loss in checkpointed chunks of 256 tokens; before, of all logits.",
                "trainer/sft_trainer.py, _chunked_cross_entropy_loss",
            ),
        },
    ),
}
