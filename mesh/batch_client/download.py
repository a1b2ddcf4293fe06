"""Download a file whole: what a cut leaves is kept beside it, and the rest is asked for.

The part is named after the file's id, so a later run goes on where this one ended, and bytes of
another file are never mixed in. The file appears under its own name only when it has its size.
"""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

from mesh.batch_client.endpoint import (
    PAUSE_S_MAX,
    RANGE_WRONG,
    Endpoint,
    EndpointError,
    Progress,
    Refused,
    Transfer,
    pause_after,
)


async def download(endpoint: Endpoint, file_id: str, to: Path, received: Progress) -> int:
    """Its size in bytes. Raises EndpointError, if nothing came for the endpoint's patience, and
    OSError."""
    if not re.fullmatch(r"[\w-]{1,128}", file_id, re.ASCII):
        raise EndpointError(f"the endpoint named a file {file_id!r:.60}, which is no id")
    size = (await endpoint.file(file_id)).bytes
    part = to.with_name(f"{to.name}.{file_id}.part")
    part.touch()
    until, pause_s, before = time.monotonic() + endpoint.patience_s, endpoint.pause_s, -1
    while (have := part.stat().st_size) < size:
        if have > before:  # it went on: patience begins anew
            until, pause_s, before = time.monotonic() + endpoint.patience_s, endpoint.pause_s, have
        try:
            await endpoint.download(file_id, have, lambda got: _append(part, got, size, received))
            if part.stat().st_size < size:
                raise _wrong_size(file_id, part.stat().st_size, size)
        except EndpointError as error:
            if isinstance(error, Refused) and error.status == RANGE_WRONG:
                raise _wrong_size(file_id, have, size) from error
            wait_s = pause_after(error, pause_s)
            if wait_s is None or time.monotonic() + wait_s > until:
                raise
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
    if part.stat().st_size != size:
        found = part.stat().st_size
        part.unlink()
        raise _wrong_size(file_id, found, size)
    await asyncio.to_thread(part.replace, to)
    return size


async def _append(part: Path, got: Transfer, size: int, received: Callable[[int], None]) -> None:
    """Write what comes; never more than `size`, which would fill the disk."""
    with part.open("r+b") as file:
        file.truncate(got.start)
        file.seek(got.start)
        have = got.start
        async for chunk in got.chunks():
            have += len(chunk)
            if have > size:
                raise _wrong_size(part.name, have, size)
            await asyncio.to_thread(file.write, chunk)
            received(have)


def _wrong_size(what: str, found: int, size: int) -> EndpointError:
    return EndpointError(f"{what} has {found} bytes where the endpoint named {size}")
