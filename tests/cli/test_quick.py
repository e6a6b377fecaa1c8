"""Modules that start-up does not import are not needed by any command."""

import subprocess
import sys

PROGRAM = """
import sys
from memcalc.startup import start_quickly
start_quickly()
import pydantic
from memcalc.spec.spec import Spec
print("importlib.metadata" in sys.modules)
from pydantic.plugin import _loader
print(list(_loader.get_plugins()), _loader.PYDANTIC_ENTRY_POINT_GROUP)
print("importlib.metadata" in sys.modules)
"""


def test_plugins_are_not_searched_for_but_the_real_loader_is_there_for_who_asks() -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert process.stdout == "False\n[] pydantic\nTrue\n"
