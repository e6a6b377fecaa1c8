"""A 4-bit base under FSDP2: bitsandbytes quantizes on the GPU, so the whole model is there before it is sharded."""

from __future__ import annotations

from math import prod

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import stage_parameters, without_companions
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.state_options import groups, state_options


def shards_loaded_model(spec: Spec) -> bool:
    """Return whether FSDP2 shards a model that is on the GPU as a whole."""
    parallelism = spec.parallelism
    return parallelism.engine == "fsdp2" and parallelism.zero_stage > 0 and spec.training.finetune == "qlora"


def unsharded_weights(spec: Spec, stage: Stage) -> RowDraft:
    """Return the weights that are on the GPU besides their shards while the model is sharded, unit by unit.

    A unit's parameters are freed when it is sharded (torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py,
    _init_sharded_param). Accelerate 1.15 utils/fsdp_utils.py, fsdp2_prepare_model, references all of them in a state
    dict until it returns.
    """
    size = 0
    kept = spec.parallelism.fsdp.keeps_unsharded_weights
    for alike, options, _ in groups(without_companions(stage_parameters(spec, stage)), state_options(spec)):
        for parameter in alike:
            shard = prod(options.spread(2).shape(parameter))
            whole = parameter.count * parameter.elements
            # When the first unit, a layer, is sharded, no other one is.
            missing = 0 if kept else (parameter.count - (parameter.where == "layer")) * shard
            size += DTYPE_BYTES[options.base] * (whole - missing)
    tensor = (Component.TEMPORARIES, "model", "weights before they are sharded", (size,), "uint8")
    symbol = "P" if kept else "P - P/N + P_layer/N"
    citation = "torch 2.13 fully_shard; Accelerate 1.15 fsdp2_prepare_model"
    return RowDraft(*tensor, 1, size, rounded(size), mask_of("model"), symbol, citation)
