"""The allocators and settings to try."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from memcalc.errors import InputError

# The trials of --compare: each allocator with default settings, and common settings of the PyTorch allocator.
COMPARED = (
    ("pytorch", ""),
    ("pytorch", "expandable_segments:True"),
    ("pytorch", "max_split_size_mb:128"),
    ("pytorch", "max_split_size_mb:512"),
    ("pytorch", "roundup_power2_divisions:8"),
    ("paddle-auto-growth", ""),
    ("paddle-naive-best-fit", ""),
    ("tensorflow", ""),
    ("tensorflow", "allow_growth=true"),
    ("ideal", ""),
)
NONE = "none"  # in a sweep: the setting is omitted


def swept(policy: str, config: str, sweeps: Iterable[str]) -> list[str]:
    """Return the settings of a sweep, with one value of each "key=v1,v2,none" replaced at a time.

    Raises:
        InputError: for a sweep with invalid syntax.
    """
    axes = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        words = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", values)
        if not equals or not key or not words:
            raise InputError(
                f"{sweep!r} does not name a setting with values.",
                "Write key=value,value, such as max_split_size_mb=32,128,none.",
            )
        axes.append([(key.strip(), word.strip()) for word in words])
    return [_with(policy, config, choice) for choice in product(*axes)]


def _with(policy: str, config: str, choice: Iterable[tuple[str, str]]) -> str:
    """Return the settings with some of them replaced; "none" removes one."""
    joint = ":" if policy == "pytorch" else "="
    pairs = re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", config)
    for key, value in choice:
        pairs = [
            pair
            for pair in pairs
            if re.split("[:=]", pair.strip())[0].removeprefix("FLAGS_") != key.removeprefix("FLAGS_")
        ]
        if value.lower() != NONE:
            pairs.append(f"{key}{joint}{value}")
    return ",".join(pairs)
