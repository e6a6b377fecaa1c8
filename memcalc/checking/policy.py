"""Limits of a config: from the command line, from rules for paths, from its own file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from memcalc.checking.amount import Amount
from memcalc.checking.patterns import matches
from memcalc.spec.hardware.gpus import find_gpu
from memcalc.spec.overrides import CARD, parse_overrides, reject_two_gpus


class Limits(NamedTuple):
    """Limits from one source; None if not set.

    Args:
        gpu: the GPU to check against, in place of the file's own.
        budget: most bytes per GPU, with or without a GPU's limit.
        margin: memory to keep free below the smaller of GPU and budget.
        max_growth: how much a peak may exceed that of the baseline.
        overrides: `field=value` as in --set.
    """

    gpu: str | None = None
    budget: int | None = None
    margin: Amount | None = None
    max_growth: Amount | None = None
    overrides: tuple[str, ...] = ()

    def over(self, below: Limits) -> Limits:
        """Return these limits where set, else those of `below`; overrides are joined, the last one of a field wins."""
        return Limits(
            below.gpu if self.gpu is None else self.gpu,
            below.budget if self.budget is None else self.budget,
            below.margin if self.margin is None else self.margin,
            below.max_growth if self.max_growth is None else self.max_growth,
            below.overrides + self.overrides,
        )

    def with_gpu(self) -> Limits:
        """Return the limits with a GPU that is set as a field moved to `gpu`.

        Raises:
            InputError: both name a GPU.
        """
        found = {word: parse_overrides((word,)).get(CARD) for word in self.overrides}
        names = [name for name in found.values() if isinstance(name, str)]
        if not names:
            return self
        reject_two_gpus(self.gpu, (CARD,))
        find_gpu(names[-1])
        rest = tuple(word for word in self.overrides if not isinstance(found[word], str))
        return self._replace(gpu=names[-1], overrides=rest)


class PathRule(NamedTuple):
    """Limits for the paths that match one of the patterns."""

    patterns: tuple[str, ...]
    limits: Limits


class Policy(NamedTuple):
    """A settings file: default paths and limits. Paths and patterns are relative to `directory`."""

    directory: str = ""
    paths: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limits: Limits = Limits()
    rules: tuple[PathRule, ...] = ()
    baseline: str | None = None
    jobs: int | None = None

    def limits_of(self, path: str, asked: Limits) -> Limits:
        """Return the limits of one file: command line, then matching rules (last first), then the rest."""
        limits = self.limits
        name = self._name(path) if self.rules else ""
        for rule in self.rules:
            if any(matches(pattern, name) for pattern in rule.patterns):
                limits = rule.limits.over(limits)
        return asked.over(limits)

    def excludes(self, path: str) -> bool:
        """Return whether a file found in a directory or by a pattern is excluded."""
        return bool(self.exclude) and any(matches(pattern, self._name(path)) for pattern in self.exclude)

    def idle(self, files: Iterable[str]) -> list[str]:
        """Return the patterns of rules that match none of the checked files."""
        names = [self._name(path) for path in files] if self.rules else []
        patterns = [pattern for rule in self.rules for pattern in rule.patterns]
        return [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]

    def here(self, path: str) -> str:
        """Return a path of the settings relative to the current directory."""
        joined = Path(self.directory, path)
        return os.path.relpath(joined) if self.directory else path

    def _name(self, path: str) -> str:
        return Path(os.path.relpath(path, self.directory or None)).as_posix()


NO_POLICY = Policy()
