"""The shipped schemas are those of the code, and they accept what the loader accepts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from memcalc.documents.schema import config_schema, result_schema
from memcalc.spec.presets import presets_folder

DATA = Path(__file__).parents[2] / "memcalc" / "data"

SHIPPED = {"config.schema.json": config_schema, "result.schema.json": result_schema}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_schemas_are_fresh(name: str, request: pytest.FixtureRequest) -> None:
    text = json.dumps(SHIPPED[name](), indent=2, ensure_ascii=False) + "\n"
    if request.config.getoption("--regenerate"):
        (DATA / name).write_text(text)

    assert (DATA / name).read_text() == text, "stale: pytest --regenerate tests/report/test_schema.py"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_schemas_are_schemas(name: str) -> None:
    validators = pytest.importorskip("jsonschema.validators")
    schema = json.loads((DATA / name).read_text())

    validators.validator_for(schema).check_schema(schema)


@pytest.fixture(scope="module")
def validator() -> Any:
    """Return a validator of the configuration schema, created once for all tests."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = config_schema()
    return jsonschema.validators.validator_for(schema)(schema)


@pytest.mark.parametrize("path", sorted(presets_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_are_valid(path: Path, validator: Any) -> None:
    validator.validate(yaml.safe_load(path.read_text()))


ACCEPTED = [
    {"preset": "gpt3"},
    {"hf_config": "config.json", "training": {"b": 4, "dropout": 0}},
    {"model": {"preset": "gpt3", "num_layers": 2}},
    {"model": {"l": 2, "d": 64, "h": 4, "V": 100, "head_dim": None}, "training": {"recipe": "zero"}},
    {"preset": "gpt2", "training": {"teacher": "gpt2-medium"}},
    {"preset": "gpt2", "training": {"teacher": {"preset": "gpt2-medium", "num_layers": 12}}},
    {"name": None, "preset": "gpt3", "training": {"recompute": [0, 2]}},
]
REFUSED = [
    {},
    {"model": {"l": 2, "d": 64, "h": 4}},
    {"model": {"l": -2, "d": 64, "h": 4, "V": 100}},
    {"preset": "gpt3", "training": {"batch": 1}},
    {"preset": "gpt3", "parallelism": {"zero_stage": 4}},
    {"preset": "gpt3", "training": {"recipe": "mixed"}},
]


@pytest.mark.parametrize("config", ACCEPTED, ids=str)
def test_accepted(config: dict[str, object], validator: Any) -> None:
    validator.validate(config)


@pytest.mark.parametrize("config", REFUSED, ids=str)
def test_refused(config: dict[str, object], validator: Any) -> None:
    from jsonschema import ValidationError

    with pytest.raises(ValidationError):
        validator.validate(config)
