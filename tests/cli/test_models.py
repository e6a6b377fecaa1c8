"""`memcalc models`: presets without a query, published models with one."""

import json
from collections.abc import Callable

from tests.cli.conftest import Run


def test_a_query_searches_the_published_models(run: Callable[..., Run]) -> None:
    done = run("models", "qwen3", "14b")

    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["hub", "id", "parameters", "model_type", "estimated", "by"]
    assert lines[1].split() == ["Qwen/Qwen3-14B", "14.77", "B", "qwen3", "formulas"]
    assert "4 models. Estimate one with `memcalc estimate ORG/NAME`." in done.out
    assert run("models", "qwen3 14b").out == done.out


def test_many_are_cut_and_counted(run: Callable[..., Run]) -> None:
    some, everything = run("models", "qwen"), run("models", "qwen", "--all")

    assert len(some.out.splitlines()) == 1 + 20 + 2
    assert "models shown; --all shows the others." in some.out
    assert len(everything.out.splitlines()) > 280


def test_each_has_its_source_in_json(run: Callable[..., Run]) -> None:
    found = json.loads(run("models", "Llama-3.1-8B", "meta-llama/", "instruct", "--format", "json").out)[0]

    assert found["hub_id"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert (found["parameters"], found["answered_by"], found["verified"]) == (8_030_261_248, "formulas", True)
    assert found["source"]
    assert found["check"] == "equal to the published parameter total"


def test_none_is_an_answer(run: Callable[..., Run]) -> None:
    assert run("models", "xyzzy").code == 0
    assert "No model of the catalogue has 'xyzzy' in its hub id." in run("models", "xyzzy").out
