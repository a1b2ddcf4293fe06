"""Before anything is examined: does anything run there at all?

A mesh that is down, or another one's file, would otherwise be a table of broken logins after half
a minute of trying.
"""

import asyncio
from collections.abc import Mapping
from urllib.parse import urlsplit

from mesh.doctor.logins import Logins
from schemas.ids import RegionId

DIAL_S = 2.0
NATS_PORT = 4222


class NothingRuns(ConnectionError):
    """Nobody listens at any of the addresses; the message names them."""


async def must_run(logins: Mapping[RegionId, Logins]) -> None:
    """Raises NothingRuns unless one server at least takes connections."""
    urls = dict.fromkeys(
        address.url
        for login in logins.values()
        for address in (login.operator, login.router, login.system)
        if address is not None
    )
    if not any(await asyncio.gather(*map(_listens, urls))):
        raise NothingRuns(f"no nats-server listens at {', '.join(urls)}")


async def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or NATS_PORT)
    except OSError:  # a timeout is one, too
        return False
    writer.close()
    return True
