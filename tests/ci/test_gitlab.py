"""The GitLab example: by GitLab's published schema, and its script as a job runs it."""

import json
import subprocess
import xml.etree.ElementTree as ET
from importlib.resources import files
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = yaml.safe_load((ROOT / "docs" / "examples" / "project" / ".gitlab-ci.yml").read_text())


def test_the_example_is_valid() -> None:
    schema = json.loads((files("check_jsonschema") / "builtin_schemas" / "vendor" / "gitlab-ci.json").read_text())

    jsonschema.validate(EXAMPLE, schema)


def test_the_script_writes_the_reports_it_names(project: Path, path_with_memcalc: str) -> None:
    job = EXAMPLE["memcalc"]
    script = "\n".join(("set -eo pipefail", *job["script"]))
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=project,
        env={"PATH": path_with_memcalc},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    suite = ET.parse(project / job["artifacts"]["reports"]["junit"]).getroot()

    assert process.returncode == 0, process.stderr
    assert suite.get("tests") == "3"
    assert all((project / name).exists() for name in job["artifacts"]["paths"])
