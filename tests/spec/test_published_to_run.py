"""Vision-language models of the catalogue as trace and measure build them: with their towers."""

import json
from typing import Any

import pytest

import memcalc
from memcalc.api.sources import load_to_run
from memcalc.catalogue import shipped
from memcalc.spec.model_families.conversion import known_families
from memcalc.spec.model_families.multimodal import language_config

pytest.importorskip("transformers")

NOT_IN_TRANSFORMERS = {"kimi_k25"}


def entries() -> dict[str, dict[str, Any]]:
    """The config.json of each vision-language model, by the first of its hub ids."""
    lines = [json.loads(line) for line in shipped.FILE.read_text(encoding="utf-8").splitlines()]
    found = {next(iter(line["ids"])): line["config"] for line in lines if "ids" in line}
    return {
        name: config
        for name, config in found.items()
        if config["model_type"] not in {*known_families(), *NOT_IN_TRANSFORMERS} and language_config(config) is not None
    }


def test_each_has_a_class_that_sees() -> None:
    models = {name: load_to_run(name, "b=1", "s=64").model for name in entries()}
    classes = {
        name: json.loads(model.transformers_config or "{}")["architectures"][0] for name, model in models.items()
    }

    assert len(classes) == 71
    assert {name for name, each in classes.items() if not each.endswith("ForConditionalGeneration")} == set()


@pytest.mark.long
def test_an_estimate_and_a_trace_count_the_same_parameters() -> None:
    words = ("datalab-to/surya-ocr-2", "b=1", "s=256", "recipe=pure", "optimizer=sgd")

    assert memcalc.trace(*words, steps=2).result.parameters == memcalc.estimate(*words).parameters == 665_701_440
