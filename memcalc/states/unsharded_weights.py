"""Weights under FSDP2 that are on the GPU before they are sharded.

A 4-bit base is there as a whole, because bitsandbytes quantizes on the GPU. Other weights move there in parts.
"""

from __future__ import annotations

from math import prod

from memcalc.allocator.pytorch.block_sizes import rounded
from memcalc.layout.local_parameters import LocalParameter, stage_parameters, without_companions
from memcalc.layout.stages import Stage
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.optimizers.parameter_order import registered
from memcalc.states.state_options import StateOptions, groups, state_options


def shards_loaded_model(spec: Spec) -> bool:
    """Return whether FSDP2 shards a model that is on the GPU as a whole."""
    parallelism = spec.parallelism
    return parallelism.engine == "fsdp2" and parallelism.zero_stage > 0 and spec.training.finetune == "qlora"


def is_built_on_meta(spec: Spec) -> bool:
    """Return whether modules are built on the meta device, and get memory once they are sharded (FSDP2, DTensor)."""
    parallelism = spec.parallelism
    sharded = parallelism.engine == "fsdp2" and parallelism.zero_stage > 0
    return (sharded or parallelism.tensor_parallel > 1) and spec.training.finetune != "qlora"


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


def loads_whole_weights(spec: Spec) -> bool:
    """Return whether weights are on the GPU whole, one unit or one weight at a time, before FSDP2 shards them."""
    parallelism = spec.parallelism
    return parallelism.engine == "fsdp2" and parallelism.zero_stage > 0 and parallelism.fsdp.weights_from != "meta"


def loading_weights(spec: Spec, stage: Stage) -> RowDraft:
    """Return the weights that are on the GPU besides all shards while they are loaded: see `FsdpSpec.weights_from`.

    From host memory a layer, or embedding, final norm and LM head together: Accelerate references the latter until all
    units are sharded. From the first rank a weight and the one before it, and a tied LM head's shard until it is tied
    again. While a layer is loaded the shards of later parameters are missing. Source: torch 2.13
    distributed/fsdp/_fully_shard/_fsdp_init.py, _move_states_to_device; Accelerate 1.15 utils/fsdp_utils.py,
    fsdp2_prepare_model and fsdp2_load_full_state_dict.
    """
    options = state_options(spec)
    parameters = without_companions(stage_parameters(spec, stage))
    before, layer, after = registered(parameters, options.update.family)
    kinds: dict[str, int] = {}
    later = after
    if spec.parallelism.fsdp.weights_from == "host":
        later = [*before, *after]
        for parameter in layer:
            prefix = parameter.module.partition("*.")[0]
            kinds[prefix] = kinds.get(prefix, 0) + whole_bytes(parameter, options)
        ends = sum(parameter.count * whole_bytes(parameter, options) for parameter in later)
        symbol, citation = "P_embedding + P_head", "torch 2.13 fully_shard"
    else:
        pairs = zip((*layer[-1:], *layer), layer, strict=False)
        kinds["*"] = max((sum(whole_bytes(each, options) for each in pair) for pair in pairs), default=0)
        ends = max((whole_bytes(parameter, options) for parameter in (*before, *after)), default=0)
        if spec.model.tie_word_embeddings:
            ends += max((shard_bytes(parameter, options) for parameter in before), default=0)
        symbol, citation = "P_head", "Accelerate 1.15 fsdp2_load_full_state_dict"
    missing = sum(parameter.count * shard_bytes(parameter, options) for parameter in later)
    size = max(ends, max(kinds.values(), default=0) - missing)
    tensor = (Component.TEMPORARIES, "model", "weights before they are sharded", (size,), "uint8")
    return RowDraft(*tensor, 1, size, rounded(size), mask_of("model"), symbol, citation)


def whole_bytes(parameter: LocalParameter, options: StateOptions) -> int:
    """Return the bytes of an unsharded parameter."""
    return DTYPE_BYTES[parameter.dtype or options.base] * parameter.elements


def shard_bytes(parameter: LocalParameter, options: StateOptions) -> int:
    """Return the bytes of a rank's shard of a parameter."""
    return DTYPE_BYTES[parameter.dtype or options.base] * prod(options.spread(2).shape(parameter))
