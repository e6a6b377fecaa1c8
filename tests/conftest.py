"""Settings of all tests: screens are compared with tests/golden, and examples of properties are sampled."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The tensors of tests are tiny: a second thread would only occupy a core that another test process needs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests find models in the catalogue only, not on the hub or in the local hub cache.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = str(Path(__file__).parent / "no-hub-cache")

IMPORTS = 20  # modules: objects of so many are worth a collection

GOLDEN = Path(__file__).parent / "golden"

# Every run has the same examples, regardless of the load of the machine; MEMCALC_EXPLORE=1 samples new ones.
settings.register_profile(
    "memcalc",
    derandomize="MEMCALC_EXPLORE" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", parent=settings.get_profile("memcalc"), max_examples=8)
settings.load_profile("memcalc")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite tests/golden/*.txt with what is printed now")


def pytest_configure(config: pytest.Config) -> None:
    """Try properties on a sixteenth of the examples if the long tests are omitted.

    Of a table of cases such a run has a sample; the other cases are marked long (`tests.thinning`).
    """
    if config.option.markexpr == "not long":
        os.environ.setdefault("MEMCALC_EXAMPLES", "0.0625")
        if "MEMCALC_EXPLORE" not in os.environ:
            settings.load_profile("quick")


def pytest_sessionstart() -> None:
    # A shell that starts the tests in the background makes them ignore Ctrl-C, and child processes inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # pytest's collection of thousands of tests creates hardly any garbage


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _garbage_collection() -> None:
    """Exclude existing objects from garbage collections, which traces and recorders request often.

    Automatic collections are as rare as in a command (`memcalc.startup`), regardless of earlier commands.
    """
    _exclude_existing_objects()
    gc.set_threshold(200_000, 50, 1000)


@pytest.fixture(autouse=True)
def _modules_are_no_garbage(_garbage_collection: None) -> Iterator[None]:
    """Exclude the objects of modules that a test has imported: torch's and transformers' take half a second to search."""
    before = len(sys.modules)
    yield
    if len(sys.modules) - before >= IMPORTS:
        _exclude_existing_objects()


def _exclude_existing_objects() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that compares a text with tests/golden/<name>.txt; `pytest --regenerate` writes that file.

    Verdicts use pinned records, so that screens do not change with every new record.
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
