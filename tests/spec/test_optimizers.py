"""Optimizers by their names: their implementations and options, which go together, and what is said where not."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.spec.loading import load
from memcalc.spec.optimizers import ALIASES, OPTIMIZERS, Optimizer, momentum, nesterov, weight_decay
from memcalc.spec.spec import Spec

SIZES: dict[str, Any] = {"l": 4, "d": 64, "h": 4, "V": 100}


def run(*overrides: str, **parallelism: Any) -> Spec:
    return load({"model": SIZES, "parallelism": parallelism}, overrides)


def refusal(*overrides: str, **parallelism: Any) -> str:
    with pytest.raises(InputError) as caught:
        run(*overrides, **parallelism)
    return f"{caught.value.problem} {caught.value.remedy}"


def test_every_name_has_its_facts() -> None:
    assert set(OPTIMIZERS) == set(Optimizer.__args__)  # type: ignore[attr-defined] # typing's own attribute of a Literal


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_loads_with_its_first_implementation(optimizer: str) -> None:
    training = run(f"optimizer={optimizer}").training

    assert training.optimizer == optimizer
    assert training.optimizer_implementation == OPTIMIZERS[optimizer].implementations[0]


@pytest.mark.parametrize("alias", ALIASES)
def test_optimizers_have_their_usual_names(alias: str) -> None:
    assert run(f"optimizer={alias}").training.optimizer == ALIASES[alias]


def test_a_paged_optimizer_updates_one_parameter_after_the_other() -> None:
    training = run("optimizer_options.paged=true").training

    assert (training.optimizer, training.optimizer_implementation) == ("adamw", "for-loop")


@pytest.mark.parametrize(
    ("optimizer", "defaults"),
    [
        # weight decay, momentum and whether it looks ahead: torch.optim 2.13's defaults, and momentum as people set it
        ("sgd", (0.0, 0.0, False)),
        ("momentum", (0.0, 0.9, False)),
        ("adam", (0.0, 0.0, False)),
        ("adamw", (0.01, 0.0, False)),
        ("muon", (0.1, 0.95, True)),
        ("rmsprop", (0.0, 0.0, False)),
    ],
)
def test_options_have_the_libraries_defaults(optimizer: str, defaults: tuple[float, float, bool]) -> None:
    options = run(f"optimizer={optimizer}").training.optimizer_options

    assert (weight_decay(optimizer, options), momentum(optimizer, options), nesterov(optimizer, options)) == defaults


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("optimizer=lion", "optimizer_implementation=fused"),
            "optimizer = lion has no fused implementation. Set optimizer_implementation: foreach or for-loop.",
        ),
        (
            ("optimizer=adam-8bit", "optimizer_implementation=foreach"),
            "optimizer = adam-8bit has no foreach implementation. Set optimizer_implementation: for-loop.",
        ),
        (
            ("optimizer_options.paged=true", "optimizer_implementation=fused"),
            "optimizer = paged adamw has no fused implementation. Set optimizer_implementation: for-loop.",
        ),
        (
            ("optimizer=sgd", "optimizer_options.amsgrad=true"),
            (
                "amsgrad = true is not an option of optimizer = sgd. Leave amsgrad out, or set optimizer: adam or "
                "adamw; sgd has weight_decay."
            ),
        ),
        (
            ("optimizer=rprop", "optimizer_options.weight_decay=0.1"),
            "weight_decay = 0.1 is not an option of optimizer = rprop.",
        ),
        (
            ("optimizer_options.rank=8",),
            (
                "rank = 8 is not an option of optimizer = adamw. Leave rank out, or set optimizer: galore; adamw has "
                "amsgrad, weight_decay, paged."
            ),
        ),
        (
            ("optimizer=momentum", "optimizer_options.nesterov=true", "optimizer_options.momentum=0"),
            "nesterov = true needs a momentum, but momentum = 0. Set momentum above 0, or nesterov: false.",
        ),
        (
            ("optimizer_options.paged=true", "optimizer_options.amsgrad=true"),
            "amsgrad = true is not an option of bitsandbytes' paged optimizers. Set amsgrad: false or paged: false.",
        ),
        (
            ("recipe=mixed-20", "gradient_dtype=bf16"),
            "recipe mixed-20 sums gradients in fp32, but gradient_dtype = bf16.",
        ),
        (
            ("recipe=pure", "gradient_dtype=fp32"),
            "recipe pure sums gradients in bf16, but gradient_dtype = fp32.",
        ),
        (
            ("recipe=mixed-18", "dtype=fp16", "gradient_dtype=bf16"),
            "recipe mixed-18 sums gradients in fp32 or fp16, but gradient_dtype = bf16.",
        ),
        (("optimizer=sparseadam",), "optimizer"),
        (("gradient_clipping=0",), "gradient_clipping"),
        (("optimizer_options.momentum=1",), "momentum"),
        (("optimizer_options.weight_decay=-1",), "weight_decay"),
        (("optimizer_options.amsgrd=true",), "Did you mean optimizer_options.amsgrad"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: tuple[str, ...], message: str) -> None:
    assert message in refusal(*overrides)


@pytest.mark.parametrize("optimizer", ["muon", "galore"])
@pytest.mark.parametrize(
    ("parallelism", "remedy"),
    [
        ({"data_parallel": 2, "zero_stage": 1}, "Set zero_stage: 0, or another optimizer."),
        ({"tensor_parallel": 2}, "Set tensor_parallel: 1, or another optimizer."),
    ],
)
def test_what_splits_matrices_is_refused_where_they_must_be_whole(
    optimizer: str, parallelism: dict[str, int], remedy: str
) -> None:
    assert remedy in refusal(f"optimizer={optimizer}", **parallelism)
    assert run(f"optimizer={optimizer}", data_parallel=2).training.optimizer == optimizer


@pytest.mark.parametrize(
    ("recipe", "dtype", "gradients"),
    [("pure", "bf16", "bf16"), ("amp", "bf16", "fp32"), ("mixed-18", "bf16", "bf16"), ("mixed-18", "fp16", "fp16")],
)
def test_gradients_can_be_named_in_the_dtype_that_they_have(recipe: str, dtype: str, gradients: str) -> None:
    training = run(f"recipe={recipe}", f"dtype={dtype}", f"gradient_dtype={gradients}").training

    assert training.gradient_dtype == gradients


def test_an_average_of_a_model_that_is_mostly_frozen_is_refused() -> None:
    assert "ema = fp32 is not modelled with finetune = lora. Set ema: none, or finetune: full." in refusal(
        "ema=fp32", "finetune=lora"
    )
