"""What operators' commands keep of a change, and how they list it: who, why, a table."""

import getpass
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import click

from mesh.explain.terminal import printable

CREDENTIALS_HELP = "The directory that `mesh infra nats --out` wrote, with the region's admin.env."


def reason_option(shown_by: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--reason`; `shown_by`: the command that lists such changes."""
    help = f"Kept with the change; `{shown_by}` shows it."
    return click.option("--reason", default="", show_default=False, help=help)


def user() -> str:
    """Whose command it is, as it may be printed."""
    return printable(f"{_user()}@{socket.gethostname()}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"


def echo_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print the rows, the first of which is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        click.echo("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
