"""Rules of the optimizer, its options, and other operations of the step on gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.spec.optimizers import IN_BACKWARD, OPTIMIZERS, OptimizerOptions, momentum, nesterov
from memcalc.spec.recipes import RECIPES
from memcalc.spec.rule_sets.violations import Violation, setting, shown
from memcalc.spec.spec import Spec
from memcalc.spec.zero import runs_bf16_optimizer

# The options of a configuration that sets none.
SILENT = OptimizerOptions()


def optimizing(spec: Spec) -> Iterator[Violation]:
    """Yield violations of the optimizer's rules."""
    yield from _options(spec)
    yield from _implementation(spec)
    yield from _whole_matrices(spec)
    yield from _gradients(spec)
    yield from _in_backward(spec)
    training = spec.training
    if training.ema != "none" and training.finetune != "full":
        yield Violation(
            ("training", "ema"),
            f"ema = {training.ema} is not modelled with finetune = {training.finetune}.",
            "Set ema: none, or finetune: full.",
        )


def _options(spec: Spec) -> Iterator[Violation]:
    name, options = spec.training.optimizer, spec.training.optimizer_options
    known = OPTIMIZERS[name].options
    for option in OptimizerOptions.model_fields:
        value = getattr(options, option)
        if option not in known and value != getattr(SILENT, option):
            others = [other for other, facts in OPTIMIZERS.items() if option in facts.options]
            yield Violation(
                ("training", "optimizer_options", option),
                f"{option} = {shown(value)} is not an option of optimizer = {name}.",
                f"Leave {option} out, or set {setting('optimizer', others)}; {name} has "
                f"{', '.join(known) or 'no options'}.",
            )
    if nesterov(name, options) and not momentum(name, options):
        yield Violation(
            ("training", "optimizer_options", "nesterov"),
            "nesterov = true needs a momentum, but momentum = 0.",
            "Set momentum above 0, or nesterov: false.",
        )
    if options.paged and options.amsgrad:
        yield Violation(
            ("training", "optimizer_options", "amsgrad"),
            "amsgrad = true is not an option of bitsandbytes' paged optimizers.",
            "Set amsgrad: false or paged: false.",
        )

    if options.embeddings_32bit and RECIPES[spec.training.recipe].master:
        yield Violation(
            ("training", "optimizer_options", "embeddings_32bit"),
            f"embeddings_32bit = true does not apply to recipe = {spec.training.recipe}: bitsandbytes does not "
            "recognize master weights as embeddings.",
            "Set recipe: fp32, amp or pure, or embeddings_32bit: false.",
        )


def _implementation(spec: Spec) -> Iterator[Violation]:
    name, how = spec.training.optimizer, spec.training.optimizer_implementation
    paged = spec.training.optimizer_options.paged
    known = ("for-loop",) if paged else OPTIMIZERS[name].implementations
    if how not in known:
        yield Violation(
            ("training", "optimizer_implementation"),
            f"optimizer = {'paged ' if paged else ''}{name} has no {how} implementation.",
            f"Set optimizer_implementation: {' or '.join(known)}.",
        )


def _whole_matrices(spec: Spec) -> Iterator[Violation]:
    """Yield violations: Muon orthogonalizes whole matrices, and GaLore projects them."""
    name, parallelism = spec.training.optimizer, spec.parallelism
    if name not in ("muon", "galore"):
        return
    for field, value in (("tensor_parallel", parallelism.tensor_parallel), ("zero_stage", parallelism.zero_stage)):
        split = value > 1 if field == "tensor_parallel" else value > 0
        if split:
            yield Violation(
                ("parallelism", field),
                f"{field} = {value} shards weight matrices, but optimizer = {name} needs them whole.",
                f"Set {field}: {1 if field == 'tensor_parallel' else 0}, or another optimizer.",
            )


def _in_backward(spec: Spec) -> Iterator[Violation]:
    """Yield violations: an optimizer that steps in backward has one parameter's gradient at a time, and only once."""
    training, recipe = spec.training, RECIPES[spec.training.recipe]
    if not training.optimizer_in_backward:
        return
    lacks = {
        ("training", "optimizer"): (training.optimizer, training.optimizer not in IN_BACKWARD, ", ".join(IN_BACKWARD)),
        ("training", "recipe"): (
            training.recipe,
            recipe.master is not None or recipe.main_gradients is not None,
            "pure, amp or fp32",
        ),
        ("training", "gradient_accumulation_steps"): (
            training.gradient_accumulation_steps,
            training.gradient_accumulation_steps > 1,
            "1",
        ),
        ("training", "gradient_clipping"): (
            training.gradient_clipping,
            training.gradient_clipping is not None,
            "null (the norm of all gradients is known only after backward)",
        ),
        ("training", "ema"): (training.ema, training.ema != "none", "none"),
        ("training", "zero_grad"): (training.zero_grad, training.zero_grad == "zero", "set_to_none"),
        ("parallelism", "gpus"): (spec.parallelism.ranks, spec.parallelism.ranks > 1, "1"),
        ("training", "implementation"): (
            training.implementation,
            training.implementation in ("megatron", "torchtitan"),
            "plain or huggingface",
        ),
    }
    for path, (value, is_broken, remedy) in lacks.items():
        if is_broken:
            yield Violation(
                ("parallelism", "data_parallel") if path[-1] == "gpus" else path,
                f"optimizer_in_backward = true updates each parameter separately, but {path[-1]} = {value}.",
                f"Set optimizer_in_backward: false, or {path[-1]}: {remedy}.",
            )


def _gradients(spec: Spec) -> Iterator[Violation]:
    training = spec.training
    if training.gradient_dtype is None:
        return
    recipe = RECIPES[training.recipe]
    own = recipe.main_gradients or recipe.gradients or "fp32"
    own = training.dtype if own == "compute" else own
    # DeepSpeed's stage 1 runs another optimizer with sums in bf16, its pipeline engine the same (runtime/engine.py).
    pipelined = runs_bf16_optimizer(spec) and spec.parallelism.has_pipeline_engine
    chosen = recipe.main_gradients_live == "always" or pipelined
    free = chosen and training.gradient_dtype == training.dtype
    if training.gradient_dtype != own and not free:
        known = f"{own} or {training.dtype}" if chosen else own
        yield Violation(
            ("training", "gradient_dtype"),
            f"recipe {training.recipe} sums gradients in {known}, but gradient_dtype = {training.gradient_dtype}.",
            "Leave gradient_dtype out, or choose recipe mixed-16 (dtype), mixed-18 (fp32 or dtype) or mixed-20 (fp32).",
        )
