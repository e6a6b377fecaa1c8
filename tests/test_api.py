"""The public names: what `import memcalc` offers, and that it costs nothing until it is used."""

import re
import subprocess
import sys

import pytest

import memcalc


def test_public_names() -> None:
    assert memcalc.__all__ == [
        "InputError",
        "MemcalcError",
        "Result",
        "Spec",
        "check",
        "diff",
        "dry_run",
        "estimate",
        "fit",
        "load",
        "measure",
        "null_device",
        "oom",
        "recompute",
        "replay",
        "sweep",
        "trace",
    ]
    assert all(getattr(memcalc, name) for name in memcalc.__all__)
    assert set(memcalc.__all__) <= set(dir(memcalc))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'estimat'"):
        memcalc.estimat  # noqa: B018 -- looking it up is the test


def test_import_is_nearly_free() -> None:
    program = "import sys; before = set(sys.modules); import memcalc; print(*sorted(set(sys.modules) - before))"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert process.stdout.split() == ["__future__", "memcalc"]


def test_a_spec_goes_straight_through() -> None:
    spec = memcalc.load("gpt2")

    assert memcalc.load(spec) is spec
    assert memcalc.load(spec, "b=4").training.micro_batch_size == 4
    assert memcalc.load(spec, gpu="t4").hardware.gpu == "t4"


def test_every_kind_of_source_gives_the_same() -> None:
    spec = memcalc.load("gpt2", "b=2")
    peaks = {
        memcalc.estimate(source, *overrides).ledger.peak_bytes
        for source, overrides in ((spec, ()), ("gpt2", ("b=2",)), ({"preset": "gpt2"}, ("b=2",)))
    }

    assert len(peaks) == 1


def test_results_show_themselves_in_one_line() -> None:
    """A notebook prints what its last line returns: a ledger would fill pages."""
    result = memcalc.estimate({"name": "a\nb", "preset": "gpt2"}, gpu="t4")
    shown = {
        repr(result): r"<Result a\\x0ab: peak 2\.83 GiB in optimizer_step_1; t4: fits>",
        repr(memcalc.fit("gpt2", gpu="t4")): r"<Fit gpt2 on 1 t4: fits; \d+ layouts fit>",
        repr(memcalc.diff("gpt2", "gpt2-medium")): r"<Comparison of <Result gpt2: .+>, <Result gpt2-medium: .+>>",
        repr(memcalc.oom("docs/examples/oom.log")): r"<Diagnosis of docs/examples/oom\.log: 1 reports; line 7>",
    }
    for text, pattern in shown.items():
        assert re.fullmatch(pattern, text), text
        assert len(text) < 200
