"""The tree of commands. A command's module is imported when that command is run or its help is shown."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

# Typer exports only the leaf of its family of usage errors; older versions take them from Click, newer carry their
# own. All of them are [BadParameter, UsageError, ClickException, ...].
USAGE_ERRORS: type[Exception] = typer.BadParameter.__mro__[2]

COMMANDS = (
    "estimate",
    "trace",
    "measure",
    "dry-run",
    "replay",
    "oom",
    "fit",
    "sweep",
    "recompute",
    "check",
    "diff",
    "models",
    "gpus",
    "schema",
)

_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """The commands of memcalc by name, each loaded on first use."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._loaded: dict[str, TyperCommand] = {}
        # Names only, for help, completion and the suggestions for a mistyped command.
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self._loaded:
            module = import_module(f"memcalc.cli.{cmd_name.replace('-', '_')}")
            self._loaded[cmd_name] = _build(cmd_name, module.command, getattr(module, "CommandClass", TyperCommand))
        return self._loaded[cmd_name]


def _typer(**settings: Any) -> typer.Typer:
    # Plain help and plain errors: they are read in CI logs too, and Rich's own would cost start-up time.
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=_SETTINGS, **settings)


def _build(name: str, function: Callable[..., Any], cls: type[TyperCommand]) -> Any:
    single = _typer(add_completion=False)
    single.command(name, cls=cls)(function)
    return typer.main.get_command(single)


@cache
def command_tree() -> Any:
    """Return the root command `memcalc`."""
    app = _typer(cls=LazyGroup, add_completion=True, invoke_without_command=True)
    app.callback()(_root)
    return typer.main.get_command(app)


def _version(wanted: bool) -> None:
    if wanted:
        from memcalc import __version__

        typer.echo(f"memcalc {__version__}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Calculate the peak memory of each GPU in LLM training, and whether the run fits."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
