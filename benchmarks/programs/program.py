"""A training program as a user has it, and how one is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

T = TypeVar("T")

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 3  # optimizer steps of a dry run: the first creates the optimizer state, the second is the steady state


class Sized(NamedTuple):
    """How `memcalc estimate` is given a program.

    Args:
        file: the user's file, one of the program's.
        settings: `--set` for what the file cannot know: the number of GPUs, the length of sequences that data decide.
        framework: the program, for `training.framework`.
    """

    file: str
    settings: tuple[str, ...] = ()
    framework: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One training program, as a user has it.

    Args:
        files: the user's files by name, verbatim.
        command: what the user types; its first word is a program of the environment.
        card: of `memcalc gpus`.
        gpus: of them, on one machine.
        sized: how `memcalc estimate` is given it.
        models: hub ids of the models that it loads.
        data: name of a data set of benchmarks/programs/data.py; each program finds it as the directory `data`.
        options: of `memcalc dry-run`, besides the GPU and the number of steps.
        checkpoint: kind of the checkpoint that it reads as `checkpoints/ORG/NAME`, see checkpoints.py; "": none.
        checkout: name of a repository that is linked into its directory; "": none.
        timeout: seconds.
    """

    files: Mapping[str, str]
    command: str
    card: str
    sized: Sized
    models: tuple[str, ...]
    data: str
    gpus: int = 1
    options: Mapping[str, Any] = field(default_factory=lambda: {"random_weights": True, "steps": STEPS})
    checkpoint: str = ""
    checkout: str = ""
    timeout: int = 600


class Environment(NamedTuple):
    """Where a program runs.

    Args:
        name: of the environment.
        requirements: the packages for `pip install`, before `pip install --no-deps torch===... triton==...`.
        packages: those with versions that decide memory.
    """

    name: str
    requirements: tuple[str, ...]
    packages: tuple[str, ...]


class Draw:
    """Choices of one program of many: each list of choices is dealt like a deck of cards.

    The programs 0, 1, 2, ... of one seed together see each choice equally often, and each list is shuffled by itself.

    Args:
        seed: of all programs.
        number: of this program.
    """

    def __init__(self, seed: str, number: int) -> None:
        self.seed = seed
        self.number = number

    def of(self, name: str, choices: Sequence[T]) -> T:
        """One of the choices; `name` tells this decision from others."""
        order = list(choices)
        # A new shuffle for each round of the deck, so that two decks of one length do not move in step.
        random.Random(f"{self.seed}/{name}/{self.number // len(order)}").shuffle(order)
        return order[self.number % len(order)]


class Family(NamedTuple):
    """The programs of one framework at one release.

    Args:
        name: of the family, and of its records.
        environment: where they run.
        draw: one program.
    """

    name: str
    environment: Environment
    draw: Callable[[Draw], Program]

    def program(self, seed: str, number: int) -> Program:
        """The program of this number."""
        return self.draw(Draw(f"{self.name}/{seed}", number))


def written_yaml(fields: Mapping[str, Any]) -> str:
    """A user's YAML file; fields without a value are left out."""
    return dumped_yaml({name: value for name, value in fields.items() if value is not None})


def dumped_yaml(fields: Mapping[str, Any]) -> str:
    """The same with all fields: some programs want them named."""
    return yaml.safe_dump(dict(fields), sort_keys=False, default_flow_style=False)


def script(name: str) -> str:
    """A script of the directory scripts, as a user has it."""
    return (SCRIPTS / name).read_text()
