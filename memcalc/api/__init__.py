"""The functions of memcalc. Each command of the command line calls the function of its name.

Each takes a `source`: a path to a YAML file or a Hugging Face config.json, the name of a preset, a mapping with
the keys of the YAML, or a loaded Spec. Overrides have the syntax of the command line: "b=4",
"parallelism.zero_stage=3". Invalid input raises `InputError`. Nothing is printed.
"""

from __future__ import annotations

from memcalc.api.diagnosing import oom
from memcalc.api.measuring import compare_measured, compare_records, measure, measure_suite
from memcalc.api.recomputing import describes_chain, recompute, recompute_chain, verified
from memcalc.api.running import dry_run, replay, trace
from memcalc.api.searching import check, fit, sweep, sweep_command, sweep_runs
from memcalc.api.sizing import diff, estimate
from memcalc.api.sources import Source, load, load_to_run
from memcalc.jupyter import write_with

__all__ = [
    "Source",
    "check",
    "compare_measured",
    "compare_records",
    "describes_chain",
    "diff",
    "dry_run",
    "estimate",
    "fit",
    "load",
    "load_to_run",
    "measure",
    "measure_suite",
    "oom",
    "recompute",
    "recompute_chain",
    "replay",
    "sweep",
    "sweep_command",
    "sweep_runs",
    "trace",
    "verified",
]


def _html(result: object) -> str:
    """Return what a notebook shows of a result: its reports are loaded when a notebook asks."""
    from memcalc.report.html.notebook import result_html

    return result_html(result)


write_with(_html)
