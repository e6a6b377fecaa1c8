"""Rules of FSDP1 and FSDP2: mixed-precision policy, units and engine (`parallelism.fsdp`)."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.finetuning import base_dtype, packing_dtype
from memcalc.spec.fsdp import FsdpSpec, Wrap
from memcalc.spec.model_families.conversion import built_in_fp32
from memcalc.spec.recipes import RECIPES
from memcalc.spec.rule_sets.violations import Violation, only
from memcalc.spec.spec import Spec
from memcalc.spec.training import ParallelismSpec, TrainingSpec
from memcalc.spec.yaml_source import Path

OF_FSDP1 = ("use_orig_params", "load_dtype", "forward_prefetch", "backward_prefetch", "least_unit_parameters")
OF_FSDP2 = ("output_dtype", "weights_from", "keeps_unsharded_weights", "reshard_root")
WRAPS: dict[str, tuple[Wrap, ...]] = {
    "fsdp1": ("layers", "layers-and-trained", "model", "size"),
    "fsdp2": ("layers", "layers-and-ends"),
}


def policy(spec: Spec) -> Iterator[Violation]:
    """Yield violations:

    a policy needs FSDP, its param_dtype is the compute dtype, and shards have no second copy.
    """
    training, parallelism, fsdp = spec.training, spec.parallelism, spec.parallelism.fsdp
    if fsdp.is_default:
        return
    key: Path = ("parallelism", "fsdp")
    if parallelism.engine not in ("fsdp1", "fsdp2"):
        yield Violation(
            key,
            f"the block fsdp needs engine = fsdp1 or fsdp2, but engine = {parallelism.engine}.",
            "Set engine: fsdp1 or fsdp2, or leave fsdp out.",
        )
        return
    yield from _fields(parallelism)
    if fsdp.param_dtype not in (None, training.dtype):
        yield Violation(
            (*key, "param_dtype"),
            f"param_dtype = {fsdp.param_dtype} is not dtype = {training.dtype}: modules compute in the dtype that "
            "FSDP gathers.",
            f"Set param_dtype: {training.dtype}, or dtype: {fsdp.param_dtype}.",
        )
    if fsdp.output_dtype not in (None, training.dtype):
        yield Violation(
            (*key, "output_dtype"),
            f"output_dtype = {fsdp.output_dtype} is not dtype = {training.dtype}: casts of outputs are not modelled.",
            f"Set output_dtype: {training.dtype}, or leave output_dtype out.",
        )
    if fsdp.param_dtype is not None and RECIPES[training.recipe].master is not None:
        yield Violation(
            ("training", "recipe"),
            f"recipe = {training.recipe} adds fp32 master weights, but with fsdp.param_dtype the shards are the "
            "masters.",
            "Set recipe: fp32 (no autocast) or amp (autocast as well), or leave param_dtype out.",
        )
    if parallelism.pipeline_parallel == 1 and fsdp.gradient_sync == "last" and parallelism.offload != "none":
        yield Violation(
            (*key, "gradient_sync"),
            f"gradient_sync = last is not modelled with offload = {parallelism.offload}.",
            "Set gradient_sync: each, or offload: none.",
        )
    if fsdp.weights_from != "meta":
        yield from _loading(training, parallelism)
    if fsdp.keeps_unsharded_weights and training.finetune != "qlora":
        yield Violation(
            (*key, "keeps_unsharded_weights"),
            f"keeps_unsharded_weights needs a 4-bit base, but finetune = {training.finetune}.",
            "Set finetune: qlora, or leave keeps_unsharded_weights out.",
        )


def _loading(training: TrainingSpec, parallelism: ParallelismSpec) -> Iterator[Violation]:
    """Yield violations: weights that move to the GPU whole are neither quantized there nor sharded otherwise."""
    unmodelled = {
        "finetune = qlora": training.finetune == "qlora",
        f"offload = {parallelism.offload}": parallelism.offload != "none",
        f"tensor_parallel = {parallelism.tensor_parallel}": parallelism.tensor_parallel > 1,
        f"pipeline_parallel = {parallelism.pipeline_parallel}": parallelism.pipeline_parallel > 1,
    }
    for setting in (name for name, is_set in unmodelled.items() if is_set):
        yield Violation(
            ("parallelism", "fsdp", "weights_from"),
            f"weights_from = {parallelism.fsdp.weights_from} is not modelled with {setting}.",
            "Leave weights_from out.",
        )


def pipelined(spec: Spec) -> Iterator[Violation]:
    """Yield a violation: PyTorch's schedules sum the gradients of a stage unsharded, on the GPU."""
    parallelism, stages = spec.parallelism, spec.parallelism.pipeline_parallel
    if stages > 1 and parallelism.engine == "fsdp2" and parallelism.offload != "none":
        yield Violation(
            ("parallelism", "offload"),
            f"offload = {parallelism.offload} is not modelled with pipeline_parallel = {stages} and engine = fsdp2.",
            "Set offload: none, or pipeline_parallel: 1.",
        )


def _fields(parallelism: ParallelismSpec) -> Iterator[Violation]:
    """Yield violations: fields and units of the other FSDP."""
    other, fields = ("fsdp2", OF_FSDP2) if parallelism.engine == "fsdp1" else ("fsdp1", OF_FSDP1)
    for field in fields:
        value = getattr(parallelism.fsdp, field)
        if value != FsdpSpec.model_fields[field].default:
            yield Violation(
                ("parallelism", "fsdp", field),
                f"{field} = {str(value).lower()} needs engine = {other}, but engine = {parallelism.engine}.",
                f"Leave {field} out, or set engine: {other}.",
            )
    if parallelism.fsdp.wrap not in WRAPS[parallelism.engine]:
        yield Violation(
            ("parallelism", "fsdp", "wrap"),
            f"wrap = {parallelism.fsdp.wrap} needs engine = {other}, but engine = {parallelism.engine}.",
            f"Leave wrap out, or set engine: {other}.",
        )


def flat_parameters(spec: Spec) -> Iterator[Violation]:
    """Yield violations: FSDP1 is modelled alone, for units of one dtype that train or are frozen as a whole.

    torch 2.13 distributed/fsdp/_flat_param.py, _validate_tensors_to_flatten: a unit has one dtype.
    """
    training, parallelism, model = spec.training, spec.parallelism, spec.model
    if parallelism.engine != "fsdp1":
        return
    problem, remedy = "{} is not modelled with engine = fsdp1.", "engine: fsdp2"
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    yield from only(spec, {f"parallelism.{name}": (1,) for name in degrees}, problem, remedy)
    loaded = parallelism.fsdp.load_dtype
    if loaded not in (None, "fp32") and RECIPES[training.recipe].weights != "fp32":
        yield Violation(
            ("parallelism", "fsdp", "load_dtype"),
            f"load_dtype = {loaded} needs fp32 shards, but recipe = {training.recipe}.",
            "Set recipe: amp, or leave load_dtype out.",
        )
    fields: dict[str, tuple[object, ...]] = {
        "training.recipe": ("pure", "amp", "fp32"),
        "training.ema": ("none",),
        "training.fp8": ("none",),
        "training.optimizer_in_backward": (False,),
    }
    yield from only(spec, fields, problem, remedy)
    wide = built_in_fp32(model.architecture) if training.implementation == "huggingface" else ()
    if (wide or training.fp32_modules) and base_dtype(training) != "fp32":
        yield Violation(
            ("training", "recipe"),
            f"recipe = {training.recipe} does not run under FSDP1, which flattens parameters of one dtype: "
            f"{', '.join(wide or training.fp32_modules)} has fp32 weights.",
            "Set recipe: amp or fp32, or another engine.",
        )
    yield from _flat_adapters(training, parallelism)


def _flat_adapters(training: TrainingSpec, parallelism: ParallelismSpec) -> Iterator[Violation]:
    """Yield violations: adapters need units of their own, and 4-bit weights the dtype of the other frozen weights."""
    apart = parallelism.fsdp.wrap == "layers-and-trained"
    if apart and training.lora is None:
        yield Violation(
            ("parallelism", "fsdp", "wrap"),
            f"wrap = layers-and-trained needs adapters, but finetune = {training.finetune}.",
            "Set finetune: lora or qlora, or leave wrap out.",
        )
    if training.lora is not None and not apart:
        yield Violation(
            ("parallelism", "fsdp", "wrap"),
            f"wrap = {parallelism.fsdp.wrap} is not modelled with finetune = {training.finetune} and engine = fsdp1: "
            "units would have frozen and trained parameters.",
            "Set wrap: layers-and-trained, or engine: fsdp2.",
        )
    packed = packing_dtype(training, parallelism)
    if training.finetune == "qlora" and packed != base_dtype(training):
        yield Violation(
            ("training", "qlora", "quant_storage"),
            f"4-bit weights packed in {packed} do not run under FSDP1, which flattens parameters of one dtype: other "
            f"frozen weights are in {base_dtype(training)}.",
            "Set quant_storage: compute and base_dtype: compute, or engine: fsdp2.",
        )
