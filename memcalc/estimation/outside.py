"""Device memory outside PyTorch's allocated blocks, by sourced defaults: cached segments, context, NCCL."""

from __future__ import annotations

from memcalc.ledger.result import Outside
from memcalc.spec.cards import Card
from memcalc.spec.spec import Spec

# Reserved over allocated on twelve measured Megatron runs: 1.028 to 1.093 (SimuMax v1.2, public B200 results). The
# upper end is taken, so that "fits" is not said of a run that does not.
RESERVED_PER_THOUSAND = 1093

MIB = 2**20

# NCCL's buffers, planning defaults from published process figures: 1.0 to 1.5 GiB for the first group of 8 GPUs
# (NCCL src/init.cc computeBuffSizes; ML Engineering book), 0.5 to 2 GiB for each further group (NCCL issue 864).
# The upper ends are taken.
FIRST_GROUP_BYTES = 1536 * MIB
FURTHER_GROUP_BYTES = 2048 * MIB


def reserved_bytes(allocated: int) -> int:
    """What the caching allocator holds at a peak of `allocated` bytes, rounded up."""
    return -(-allocated * RESERVED_PER_THOUSAND // 1000)


def communication_library_bytes(spec: Spec) -> int:
    """NCCL's buffers: one group for each dimension in which ranks talk to each other."""
    parallelism = spec.parallelism
    kinds = ("data", "tensor", "pipeline", "context", "expert")
    groups = sum(getattr(parallelism, f"{kind}_parallel") > 1 for kind in kinds)
    return FIRST_GROUP_BYTES + (groups - 1) * FURTHER_GROUP_BYTES if groups else 0


def outside_allocated(spec: Spec, card: Card | None, allocated: int, reserved: int) -> Outside:
    """The three parts; the context's size is the card's default, 0 where no card is named."""
    context = 0 if card is None else card.context_bytes
    return Outside(reserved - allocated, context, communication_library_bytes(spec))
