"""Versions of packages that affect memory: the change in each, and the versions distinguished by default."""

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
    """A package and its versions.

    Args:
        name: its usual name.
        candidates: versions to try if a run names none: one for each behavior, the newest first. Versions before the
            last candidate are estimated only if a run names them.
        changes: by the first version that has them, the newest first.
    """

    name: str
    candidates: tuple[str, ...]
    changes: dict[str, ReleaseChange]


RELEASES = {
    "transformers": Package(
        "transformers",
        ("5.23.0", "4.57.6", "4.48.3"),
        {
            "5.14": ReleaseChange(
                "The LM head of gpt_neox is lm_head; before, embed_out, the name by which axolotl casts it to fp32.",
                "models/gpt_neox/modeling_gpt_neox.py",
            ),
            "5.10": ReleaseChange(
                "If fsdp_config names no version, FSDP is FSDP2, and layers are units; before, FSDP1, and layers with "
                "auto_wrap only.",
                "training_args.py, _process_fsdp_args",
            ),
            "5.4": ReleaseChange(
                "FSDP1 shards everything, whatever strategy fsdp names: Accelerate prefers its default.",
                "training_args.py, _process_fsdp_args",
            ),
            "5.0": ReleaseChange(
                "Weights are loaded in the checkpoint's dtype; before, in fp32. The Trainer turns the KV cache off; "
                "before, forward caches keys and values where no layer is recomputed.",
                "modeling_utils.py; trainer.py",
            ),
            "4.56": ReleaseChange("The KV cache copies the first keys and values, too.", "cache_utils.py"),
            "4.54": ReleaseChange(
                "Grouped keys and values reach scaled_dot_product_attention unrepeated; before, repeated by head.",
                "integrations/sdpa_attention.py",
            ),
            "4.53": ReleaseChange(
                "The mask of padded sequences is boolean, and each layer keeps a copy; before, all shared one.",
                "masking_utils.py",
            ),
            "4.52": ReleaseChange(
                "bitsandbytes' 8-bit optimizers keep the states of embeddings in fp32; before, in 8 bits.",
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
                "FSDP2 units: an untied embedding is one, final norm and LM head another; before, parts of the root.",
                "utils/fsdp_utils.py, fsdp2_prepare_model",
            ),
        },
    ),
    "deepspeed": Package(
        "DeepSpeed",
        ("0.19.8", "0.18.2"),
        {
            "0.19": ReleaseChange(
                "Under ZeRO-3 the optimizer updates a copy even of fp32 weights; before, the weights themselves.",
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
                "SFT and DPO compute LM head and log-probabilities in tiles; gradients are summed in fp32.",
                "trainer/utils.py, add_fused_lm_head",
            ),
            "1.14": ReleaseChange(
                "DPO computes log-probabilities and entropies from all logits by a kernel of its own.",
                "kernels/logprob_entropy.py",
            ),
            "1.7": ReleaseChange(
                "SFT computes its loss in checkpointed chunks of 256 tokens; before, from all logits at once. Adapters "
                "have the dtype of the base model under ZeRO-3; before, fp32.",
                "trainer/sft_trainer.py, _chunked_cross_entropy_loss; autocast_adapter_dtype",
            ),
        },
    ),
}
