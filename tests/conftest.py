"""Shared by all tests: whole screens compared with the ones kept in tests/golden, and how examples are drawn."""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The tests' tensors are tiny: a second thread only waits, at the cost of a core that another process of tests has use for.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests look for models in the catalogue only: not on the hub, nor among what this machine has downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = str(Path(__file__).parent / "no-hub-cache")

GOLDEN = Path(__file__).parent / "golden"

# The same examples in every run, however busy the machine is; MEMCALC_EXPLORE=1 draws new ones.
settings.register_profile(
    "memcalc",
    derandomize="MEMCALC_EXPLORE" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("memcalc")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite tests/golden/*.txt with what is printed now")


def pytest_configure(config: pytest.Config) -> None:
    """Where the long tests are left out, properties are tried on half as many examples."""
    if config.option.markexpr == "not long":
        os.environ.setdefault("MEMCALC_EXAMPLES", "0.5")


def pytest_sessionstart() -> None:
    # A shell that starts the tests in the background has them ignore Ctrl-C, and what they start inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # collecting thousands of tests makes no garbage to speak of


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _what_was_there_before() -> None:
    """Stays out of collections: traces and recorders ask for them again and again, and the tests alone are many.

    Automatic collections are as rare as in a command (`memcalc.startup`), and not as the last command has left them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 1000)


@pytest.fixture
def golden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Compares a text with tests/golden/<name>.txt; `pytest --regenerate` writes that file instead.

    Verdicts rest on pinned records, so that screens do not change with every new record.
    """
    from tests.records import pin_records

    pin_records(monkeypatch)

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        clean = "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"
        if request.config.getoption("--regenerate"):
            path.write_text(clean)
        assert clean == path.read_text(), f"{path.name} is stale: look at it after `pytest --regenerate`"

    return compare
