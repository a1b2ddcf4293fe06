"""Results of a benchmark as a page: its tables, and what they were measured with.

A program gets `--write FOLDER` by one line above its click command:

    @result_page("workers", "Workers of one router")
    @click.command()
    ...

With the option, or `make TARGET WRITE=FOLDER`, what the program prints on stdout is kept as
FOLDER/NAME.md as well. The head of the page has the command, the commit, the date and the machine,
so that a stale table shows.
"""

import contextlib
import io
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import click

OPTION, VARIABLE = "--write", "WRITE"
ROOT = Path(__file__).parents[2]


def result_page(name: str, title: str) -> Callable[[click.Command], click.Command]:
    """A decorator of click commands: adds the option that keeps the output as a page."""

    def decorated(command: click.Command) -> click.Command:
        program = command.callback
        assert program is not None

        def kept(write: Path | None, **options: Any) -> Any:
            if write is None:
                return program(**options)
            facts = conditions()
            printed = io.StringIO()
            with contextlib.redirect_stdout(_Both(sys.stdout, printed)):
                try:
                    returned = program(**options)
                except SystemExit:
                    _keep(write / f"{name}.md", page(title, facts, printed.getvalue()))
                    raise
            _keep(write / f"{name}.md", page(title, facts, printed.getvalue()))
            return returned

        command.callback = kept
        command.params.append(
            click.Option(
                [OPTION],
                type=click.Path(file_okay=False, path_type=Path),
                envvar=VARIABLE,
                help=f"Keep the results as {name}.md in this folder.",
            )
        )
        return command

    return decorated


def conditions() -> dict[str, str]:
    """What the head of a page says, taken before the program begins."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return {
        "command": f"`{command_line(sys.orig_argv[1:])}`",
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, {gib:.0f} GiB, "
        f"{platform.system()}, Python {platform.python_version()}, load {load:.1f} at the start",
    }


def command_line(arguments: list[str]) -> str:
    """As it would be typed, without the option that keeps the page."""
    left = [*arguments]
    if OPTION in left:
        at = left.index(OPTION)
        del left[at : at + 2]
    left = [argument for argument in left if not argument.startswith(f"{OPTION}=")]
    return shlex.join(["python", *left])


def commit(root: Path = ROOT) -> str:
    """The commit of the checkout, and whether tracked files differ from it."""
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with changes" if changed else head


def page(title: str, facts: dict[str, str], printed: str) -> str:
    """The Markdown. Tables of Markdown stay as they are; everything else is shown as printed."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    text = printed.strip("\n")
    is_markdown = any(line.startswith("| ") for line in text.splitlines())
    shown = text if is_markdown else f"```\n{text}\n```"
    return f"# {title}\n\n| | |\n|---|---|\n{rows}\n\n{shown}\n"


class _Both(io.TextIOBase):
    """Writes to the terminal and to memory."""

    def __init__(self, terminal: TextIO, memory: TextIO) -> None:
        self._terminal, self._memory = terminal, memory

    def write(self, text: str) -> int:
        self._memory.write(text)
        return self._terminal.write(text)

    def flush(self) -> None:
        self._terminal.flush()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    click.echo(f"kept as {path}", err=True)
