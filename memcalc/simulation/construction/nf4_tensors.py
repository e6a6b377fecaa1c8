"""Requests of torchao's NF4Tensor while torchtune builds and loads a 4-bit model.

Each weight is quantized when its module is made, and again when the checkpoint is copied into it. DoRA then computes
the norms of rows. Sources: torchao 0.13 dtypes/nf4tensor.py, NF4Tensor.copy_; torchtune 0.6.1
models/llama3_2/_component_builders.py; recipes/lora_finetune_single_device.py, _setup_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from memcalc.layout.adapters import adapters_of
from memcalc.layout.local_parameters import LocalParameter
from memcalc.ledger.component import Component
from memcalc.ledger.row_drafts import RowDraft, mask_of
from memcalc.sharding.engine import is_embedding
from memcalc.simulation.construction.initial_tensors import InitialTensor, InitialTensors
from memcalc.simulation.construction.quantization import quantized_modules
from memcalc.spec.finetuning import base_dtype
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.states.persistent import ROTARY_TABLES
from memcalc.workspaces import nf4


def makes_nf4_tensors(spec: Spec) -> bool:
    """Return whether the weights of a base are torchao's."""
    return spec.training.qlora is not None and spec.training.framework == "torchtune"


def built_with_nf4_tensors(
    spec: Spec,
    base: Sequence[LocalParameter],
    sized: Callable[[Sequence[LocalParameter]], Iterable[tuple[InitialTensors, ...]]],
    standing: Iterable[RowDraft],
) -> Iterator[InitialTensors]:
    """Yield a base in the order of torchtune's modules: RoPE, layers, embedding, norm; then what loading it needs.

    Args:
        spec: a run for which `makes_nf4_tensors`.
        base: its frozen parameters in registration order; scales follow a packed weight.
        sized: returns the weights of each parameter.
        standing: persistent tensors, of which the caches of RoPE are made here.
    """
    for item in standing:
        if item.tensor == ROTARY_TABLES:  # angles, cosines, sines
            yield InitialTensors(item.mask, (InitialTensor(item.each, before=(item.each // 2,) * 3),) * item.count)
    width, until, adapters = DTYPE_BYTES[base_dtype(spec.training)], mask_of("model"), adapters_of(spec)
    loaded, norms = list[InitialTensor](), list[InitialTensor]()
    ordered = sorted(base, key=lambda held: (not held.module.startswith("layers"), not is_embedding(held)))
    for module in quantized_modules(spec, ordered, sized(ordered)):
        if not module.wide:
            yield from (built for made in module.made for built in made)
            continue
        script = nf4.quantized(module.wide // width, width)
        yield InitialTensors(module.mask, (InitialTensor(0, several=(module.wide, *script, -module.wide)),))
        loaded.append(InitialTensor(0, stays=False, several=(module.wide, *script), component=Component.TEMPORARIES))
        if adapters is not None and adapters.magnitudes and module.name.rpartition(".")[2] in adapters.targets:
            again = nf4.row_norms(module.wide // width, width)
            norms.append(InitialTensor(0, stays=False, several=again, component=Component.TEMPORARIES))
    yield InitialTensors(until, (*loaded, *norms))
