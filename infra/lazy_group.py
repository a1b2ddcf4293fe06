"""A click group that imports a subcommand's module only when that subcommand runs."""

import gc
import importlib
from collections.abc import Mapping

import click

from schemas import problems


class LazyGroup(click.Group):
    """`--help` and every start-up stay quick: a module is loaded only for its own command."""

    def __init__(self, *, modules: Mapping[str, tuple[str, str]], help: str) -> None:
        """`modules`: subcommand → (module, one line about it). The module holds it as `command`, or
        as the name behind a colon."""
        super().__init__(help=help, context_settings={"show_default": True})
        self._modules = dict(modules)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return None
        return _imported(self._modules[cmd_name][0])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._modules and not name.startswith("-"):
            raise click.UsageError(
                f"no command {name!r:.60}{problems.did_you_mean(name, self._modules)}", ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self._modules.items()])


def _imported(place: str) -> click.Command:
    """That command. What it imports stays: to collect meanwhile is a tenth of the time."""
    module, _, name = place.partition(":")
    collects = gc.isenabled()
    gc.disable()
    try:
        command: click.Command = getattr(importlib.import_module(module), name or "command")
    finally:
        if collects:
            gc.enable()
    return command
