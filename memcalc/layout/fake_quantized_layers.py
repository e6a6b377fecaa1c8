"""The linear layers that quantization-aware training replaces."""

from __future__ import annotations

from memcalc.layout.adapters import adapters_of
from memcalc.layout.spec_cache import cached_by_spec
from memcalc.spec.finetuning import HEAD, adaptable_modules
from memcalc.spec.spec import Spec


@cached_by_spec
def fake_quantized_layers(spec: Spec) -> frozenset[str]:
    """Return the linear layers with fake quantization, by the last part of their names.

    Without adapters all layers with rows of whole groups (torchao 0.13 quantization/linear_quant_modules.py,
    _check_linear_int4_k); with them the frozen layers that have one (torchtune 0.6.1 training/quantization.py,
    swap_lora_linear_with_qat). A tied LM head reads the embedding's weight and is no nn.Linear (torchtune
    modules/tied_linear.py).
    """
    training, model = spec.training, spec.model
    if training.fake_quantization == "none":
        return frozenset()
    adapters = adapters_of(spec)
    reads_head = training.loss in ("fused", "tiled")  # the loss then reads its weight as it is
    head = () if model.tie_word_embeddings or reads_head else (HEAD,)
    there = (*adaptable_modules(model, training.implementation), *head)
    if adapters is not None:
        there = tuple(name for name in there if name in adapters.targets)
    columns = {"o_proj": model.query_size, "down_proj": model.intermediate_size}
    group = training.fake_quantization_group
    return frozenset(name for name in there if columns.get(name, model.hidden_size) % group == 0)


def fake_quantized_chunks(spec: Spec) -> frozenset[str]:
    """Return those that run on one chunk of tokens at a time: the LM head of a chunked loss."""
    training = spec.training
    runs = training.loss == "chunked" and training.chunked_head
    return frozenset({HEAD} if runs else ()) & fake_quantized_layers(spec)
