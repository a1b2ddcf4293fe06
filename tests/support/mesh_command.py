"""Commands of `mesh`, run in a thread: a process of its own reads all modules for a second."""

import asyncio
import threading

from click.testing import CliRunner, Result

from mesh.cli.main import main

_one = threading.Lock()  # click exchanges the process's streams while a command runs


async def mesh_command(*words: object, columns: int = 200) -> tuple[int, str, str]:
    """Status, output and errors. Raises what the command failed to report."""
    ended = await asyncio.to_thread(_run, words, columns)
    return ended.exit_code, ended.stdout, ended.stderr


async def said_by(*words: object) -> tuple[int, str]:
    """Status, and output and errors as a terminal shows them."""
    ended = await asyncio.to_thread(_run, words, 200)
    return ended.exit_code, ended.output


def _run(words: tuple[object, ...], columns: int) -> Result:
    with _one:
        ended = CliRunner().invoke(main, [*map(str, words)], env={"COLUMNS": str(columns)})
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended
