"""What every long-running process of ours needs: files, garbage collection, tasks, warnings."""

import asyncio
import gc
import logging
import resource
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

DESCRIPTORS_MAX = 1 << 20  # Linux' own default for the hard limit; some containers give a billion
# Containers made and not freed before a collection: some 500 open requests, 10 MB if all were
# garbage. An older generation is collected after so many collections of the one before.
NEW_MAX = 50_000
COLLECTIONS = (20, 20)
CANCEL_AGAIN_S = 0.1
LOG_S = 10.0  # between two lines of one kind
KINDS_MAX = 64  # those beyond share one line


def write_ready_file(path: Path, fields: Mapping[str, object]) -> None:
    """Write what a program that waits for this one reads: at no moment a part of it."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(orjson.dumps(fields))
    part.replace(path)


def raise_limit() -> int:
    """Raise the limit of open files and sockets to the hard limit; the limit that holds now.

    Shells and service managers start programs with 1,024 for the sake of `select`, which nothing
    here uses. Children inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):  # macOS names a hard limit that its kernel does not grant
            return soft
        return limit
    return limit if soft == resource.RLIM_INFINITY else soft


def collect_seldom() -> None:
    """Collect garbage in cycles seldom; call it once, when all is imported.

    Requests leave no cycles, so reference counts free what they use. Python's default of 700 new
    containers is reached by a few dozen open requests, and examining them again and again was a
    sixth to a quarter of a request's CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_MAX, *COLLECTIONS)


async def end_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel until all have ended. Who awaits them gets what they raise.

    One cancel is not enough. Python 3.11's `asyncio.wait_for`, with which nats-py awaits replies,
    loses a cancel that comes together with its result (python/cpython#86296, mended in 3.12), and
    nats-py's `Client._flush_pending`, which every publish may pass, swallows one on purpose. If the
    caller is cancelled meanwhile, it ends when all tasks have.
    """
    cancelled: asyncio.CancelledError | None = None
    while tasks := [task for task in tasks if not task.done()]:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def run_all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them together until one fails, which raises, or the caller is cancelled; then end them.

    A TaskGroup would cancel each only once, and a cancel can get lost: see `end_all`.
    """
    if not (tasks := [asyncio.create_task(work) for work in works]):
        return
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await end_all(tasks)
    for task in done:
        task.result()


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Return, or raise, as the first of them does; then end the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_all(tasks)


class LimitedLog:
    """Warnings about messages of others, which may come by the thousand.

    Of each kind one line in LOG_S, which counts those left out before.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._due_at: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def warning(self, channel: str, reason: str, text: str, *args: object) -> None:
        """Log `text % args`. `channel` and `reason` are its kind, and never come from a message."""
        kind, now = (channel, reason), self._clock()
        if kind not in self._due_at and len(self._due_at) >= KINDS_MAX:
            kind = self._room(now, kind)
        if now < self._due_at.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._due_at[kind] = now + LOG_S
        if left_out := self._left_out.pop(kind, 0):
            text, args = text + " (and %d more such messages before)", (*args, left_out)
        self._log.warning(text, *args)

    def _room(self, now: float, kind: tuple[str, str]) -> tuple[str, str]:
        """Forget kinds that are due; the kind to use, which is shared if all are in use."""
        for other in [other for other, due_at in self._due_at.items() if due_at <= now]:
            del self._due_at[other]
            self._left_out.pop(other, None)
        return kind if len(self._due_at) < KINDS_MAX else ("", "")
