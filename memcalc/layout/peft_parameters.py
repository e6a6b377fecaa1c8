"""Parameters of a run with a frozen base model: 4-bit quantized under QLoRA, with adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from memcalc.layout.adapters import Adapters, Quantization, adapters_of
from memcalc.layout.local_parameters import LocalParameter
from memcalc.layout.parameters import Axis, Parameter, count_parameters, parameter_table, trains_with_text
from memcalc.layout.weight_layout import weight_layout
from memcalc.spec.finetuning import EMBEDDING, HEAD, MAGNITUDE, base_dtype
from memcalc.spec.model import ModelSpec
from memcalc.spec.recipes import DTYPE_BYTES
from memcalc.spec.spec import Spec
from memcalc.spec.towers import tower_trains

# bitsandbytes 0.50 functional.py, quantize_4bit: 256 scales share one second-level scale.
SCALES_PER_SCALE = 256
# Code tables in fp32, one per matrix: 16 values for 4-bit weights, 256 for 8-bit scales.
CODE_4_BIT, CODE_8_BIT = 16, 256


def with_adapters(
    rows: Iterable[LocalParameter], adapters: Adapters, base: str, model: ModelSpec
) -> Iterator[LocalParameter]:
    """Yield the frozen parameters, each followed by the full copy or the two LoRA matrices that train for it.

    Args:
        rows: the model's own parameters.
        adapters: the adapters of the run.
        base: dtype of frozen weights that are not quantized.
        model: the model of these parameters.
    """
    tied: LocalParameter | None = None  # the LM head with the embedding's weight
    for parameter in rows:
        tower = not trains_with_text(parameter.module)
        matrix = parameter.tensor == "weight" and len(parameter.axes) == len(
            ("out", "in")
        )  # stacked experts have three axes
        if matrix and adapters.quantizes(parameter.module) and adapters.quantized is not None:
            yield from _in_4_bits(parameter, adapters.quantized)
        else:
            yield parameter._replace(dtype=parameter.dtype or base, trains=False)
        name = "" if tower else parameter.module.rpartition(".")[2]
        if name in adapters.saved:
            yield _trained_copy(parameter, base)
        elif matrix and name == "qkv_proj" and adapters.joined:
            yield from _joined_adapter(parameter, adapters, model)
        elif matrix and name in adapters.targets:
            yield from _adapter(parameter, adapters)
        if name == EMBEDDING and model.tie_word_embeddings:
            tied = parameter._replace(module=HEAD, where="head")
    if tied is not None and HEAD in adapters.saved:
        yield _trained_copy(tied, base)
    elif tied is not None and HEAD in adapters.targets:
        yield from _adapter(tied, adapters)


def _trained_copy(parameter: LocalParameter, dtype: str) -> LocalParameter:
    """Return the copy of a saved module; PEFT also keeps the original (utils/other.py, ModulesToSaveWrapper)."""
    return parameter._replace(module=f"{parameter.module}.saved", dtype=dtype)


def _adapter(parameter: LocalParameter, adapters: Adapters) -> Iterator[LocalParameter]:
    """Yield the LoRA matrices (arXiv 2106.09685): A is r x in, B is out x r, so r (in + out) elements.

    DoRA (arXiv 2402.09353) adds a magnitude for each output.
    """
    (out, into), rank = parameter.axes, ("r", adapters.rank)
    parts: list[tuple[str, tuple[Axis, ...]]] = [("lora_A", (rank, into)), ("lora_B", (out, rank))]
    if adapters.magnitudes:
        parts.append((MAGNITUDE, (out,)))
    for name, axes in parts:
        module = f"{parameter.module}.{name}"
        yield LocalParameter(module, "weight", axes, parameter.count, parameter.where, adapters.dtype)


def _joined_adapter(parameter: LocalParameter, adapters: Adapters, model: ModelSpec) -> Iterator[LocalParameter]:
    """LitGPT 0.5.13 litgpt/lora.py, LoRAQKVLinear: A has r rows for each of its parts, B a column for each of r."""
    ranks, outputs = joined_sizes(adapters, model)
    parts = (("lora_A", (("r_qkv", ranks), parameter.axes[1])), ("lora_B", (("d_qkv", outputs), ("r", adapters.rank))))
    for name, axes in parts:
        yield LocalParameter(
            f"{parameter.module}.{name}", "weight", axes, parameter.count, parameter.where, adapters.dtype
        )


def joined_sizes(adapters: Adapters, model: ModelSpec) -> tuple[int, int]:
    """Rows of A and of B in the one adapter of q, k and v."""
    joined = adapters.joined or ()
    outputs = sum(model.query_size if name == "q_proj" else model.key_value_size for name in joined)
    return adapters.rank * len(joined), outputs


def _in_4_bits(parameter: LocalParameter, quantized: Quantization) -> Iterator[LocalParameter]:
    """Yield the tensors of a 4-bit matrix: two elements per byte, and one scale per block.

    Scales are in fp32, or in 8 bits with second-level scales. Sources: QLoRA (arXiv 2305.14314) section 3; bitsandbytes
    0.50 functional.py, quantize_4bit and quantize_blockwise.
    """
    blocks = -(-parameter.elements // quantized.block_size)
    scale = f"n/{quantized.block_size}"
    packed = 2 * DTYPE_BYTES[quantized.storage]  # 4-bit elements in one element of the storage dtype
    axes = ((f"n/{packed}", -(-parameter.elements // packed)),)
    yield LocalParameter(
        parameter.module,
        f"{parameter.tensor}, 4-bit",
        axes,
        parameter.count,
        parameter.where,
        quantized.storage,
        trains=False,
        beside=quantized.unsharded,
    )
    parts: list[tuple[str, str, int, str]] = []
    if quantized.nested:
        parts += [
            ("8-bit scales", scale, blocks, "uint8"),
            ("second-level scales", f"{scale}/{SCALES_PER_SCALE}", -(-blocks // SCALES_PER_SCALE), "fp32"),
            ("mean of scales", "1", 1, "fp32"),
            ("8-bit code table", "256", CODE_8_BIT, "fp32"),
        ]
    else:
        parts.append(("scales", scale, blocks, "fp32"))
    parts.append(("4-bit code table", "16", CODE_4_BIT, "fp32"))
    for name, symbol, size, dtype in parts:
        axes = ((symbol, size),)
        tensor = f"{parameter.tensor} {name}"
        yield LocalParameter(
            parameter.module, tensor, axes, parameter.count, parameter.where, dtype, trains=False, beside=True
        )


def all_parameters(spec: Spec) -> int:
    """Return the number of nn.Parameters, adapters included; a quantized matrix counts as its original."""
    return count_parameters(spec.model) + _adapter_parameters(spec)


def trainable_parameters(spec: Spec) -> int:
    """Return the number of parameters that get a gradient."""
    if adapters_of(spec) is None:
        return _trainable_of_model(spec.model, tower=tower_trains(spec.model, spec.training))
    return _adapter_parameters(spec)


@lru_cache(maxsize=256)
def _trainable_of_model(model: ModelSpec, *, tower: bool) -> int:
    return sum(row.total for row in parameter_table(model) if tower or trains_with_text(row.module))


def loads_weights(spec: Spec) -> bool:
    """Return whether a program loads its model, built without memory, and then moves it to the device.

    transformers 5.23 modeling_utils.py, from_pretrained; before 4.50 it is loaded on the host. FSDP2 and
    DeepSpeed's stage 3 shard modules that are built in another way.
    """
    parallelism = spec.parallelism
    splits = parallelism.zero_stage > 0 and (parallelism.engine in ("fsdp1", "fsdp2") or parallelism.zero_stage == 3)
    return spec.training.framework not in (None, "loop") and not splits


def adapters_follow_the_head(spec: Spec) -> bool:
    """Return whether model construction peaks before the adapters are created.

    transformers creates an LM head before tying it to the embedding; its memory is free again when adapters are
    created.
    """
    model, training = spec.model, spec.training
    adapters = adapters_of(spec)
    if adapters is None or training.finetune != "lora" or training.implementation != "huggingface":
        return False
    if loads_weights(spec):
        return False
    head = model.vocab_size * model.embedding_size * DTYPE_BYTES[base_dtype(training)]
    return model.tie_word_embeddings and head > _adapter_parameters(spec) * DTYPE_BYTES[adapters.dtype]


def _adapter_parameters(spec: Spec) -> int:
    adapters = adapters_of(spec)
    if adapters is None:
        return 0
    model = weight_layout(spec.model, spec.training.implementation, apart=adapters.separate_qkv)
    rows = with_adapters(map(_held, parameter_table(model)), adapters, base_dtype(spec.training), model)
    return sum(row.count * row.elements for row in rows if row.trains)


def _held(row: Parameter) -> LocalParameter:
    return LocalParameter(row.module, row.tensor, row.shape, row.count, row.part)
