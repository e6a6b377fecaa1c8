"""Short options for the fields that people change most: each expands to one or more --set."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from memcalc.cli.options import Budget

GPUS = "gpus"

_OPTIONS: dict[str, Any] = {
    "batch": Annotated[int | None, typer.Option("--batch", "-b", metavar="N", help="Micro-batch: micro_batch_size.")],
    "seq": Annotated[int | None, typer.Option("--seq", metavar="N", help="Tokens per sequence: sequence_length.")],
    "lora": Annotated[
        str | None, typer.Option("--lora", metavar="[RANK]", help="Train LoRA adapters; default rank: that of CONFIG.")
    ],
    "qlora": Annotated[
        str | None, typer.Option("--qlora", metavar="[RANK]", help="Train LoRA adapters on a 4-bit base.")
    ],
    GPUS: Annotated[
        int | None,
        typer.Option("--gpus", "-n", metavar="N", help="Total number of GPUs; sets data_parallel."),
    ],
    "fsdp": Annotated[bool, typer.Option("--fsdp", help="Shard with FSDP2: zero_stage 3.")],
    "zero": Annotated[int | None, typer.Option("--zero", metavar="0|1|2|3", help="Shard with DeepSpeed ZeRO.")],
    "recompute": Annotated[
        str | None,
        typer.Option(
            "--recompute", metavar="[HOW]", help="Recompute activations (gradient checkpointing); default: full."
        ),
    ],
    "budget": Budget,
    "optimizer": Annotated[
        str | None, typer.Option("--optimizer", metavar="NAME", help="Optimizer, such as adamw or adam-8bit.")
    ],
}
_BARE = {"--lora": "", "--qlora": "", "--recompute": "full"}  # what they mean without a value


class ShorthandCommand(TyperCommand):
    """A command with --lora, --qlora and --recompute that need no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill in the value of an option without one."""
        return super().parse_args(ctx, with_values(args))


def with_values(args: list[str]) -> list[str]:
    """Return the arguments, with the default value of each option without a value.

    What follows is its value if it is a whole number (--lora, --qlora), or a word of recomputation (--recompute).
    """
    found: list[str] = []
    for position, word in enumerate(args):
        found.append(word)
        if word == "--":
            return found + args[position + 1 :]
        following = args[position + 1] if position + 1 < len(args) else ""
        if word in _BARE and not _is_value(word, following):
            found[-1] = f"{word}={_BARE[word]}"
    return found


def _is_value(option: str, text: str) -> bool:
    if option != "--recompute":
        return text.isdecimal()
    return text in ("none", "selective", "full") or text.startswith(("every-", "["))


def with_shorthands(
    only: tuple[str, ...] = tuple(_OPTIONS), *, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the short options to a command, which receives their expansion as the first of its `overrides`.

    Args:
        only: names of the short options to add.
        without: short options that the command has itself.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        added = {name: hint for name, hint in _OPTIONS.items() if name in only and name not in without}

        @functools.wraps(function)
        def command(*args: Any, **options: Any) -> Any:
            short = {name: options.pop(name) for name in added}
            overrides = [*assignments(short), *(options.pop("overrides") or ())]
            return function(*args, overrides=overrides or None, **options)

        own = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
        parameters = [each.replace(annotation=hints[name]) for name, each in own.parameters.items()]
        place = 1 + next(number for number, each in enumerate(parameters) if each.name == "overrides")
        parameters[place:place] = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if name == "fsdp" else None,
                annotation=hint,
            )
            for name, hint in added.items()
        ]
        command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        del command.__wrapped__  # typer would read the signature of the original
        return command

    return decorate


def assignments(short: dict[str, Any]) -> Iterator[str]:
    """Yield the expansion of short options, in the syntax of --set.

    Args:
        short: their values by name; None or False: not given.
    """
    given = {name: value for name, value in short.items() if value is not None and value is not False}
    for name, field in (
        ("batch", "micro_batch_size"),
        ("seq", "sequence_length"),
        (GPUS, "parallelism.gpus"),
        ("recompute", "recompute"),
        ("optimizer", "optim"),
        ("budget", "hardware.budget"),
    ):
        if name in given:
            yield f"{field}={given[name]}"
    for name in ("lora", "qlora"):
        if name in given:
            yield f"finetune={name}"
            if given[name]:
                yield f"lora.rank={given[name]}"
    if "fsdp" in given:
        yield "zero_stage=3"
        yield "engine=fsdp2"
    if "zero" in given:
        yield f"zero_stage={given['zero']}"
        if given["zero"]:
            yield "engine=deepspeed"
