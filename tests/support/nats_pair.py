"""Two regions' nats-servers, joined by a leaf link and open to anyone: no users and no rules.

For tests of what passes between regions; `nats_regions` starts servers as they are rendered.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.nats_server import NatsServer, running_nats_server
from tests.support.ports import free_ports


@contextlib.asynccontextmanager
async def nats_pair(
    directory: Path,
    first: str,
    second: str,
    *,
    port: int | None = None,
    dialled: int | None = None,
) -> AsyncIterator[dict[str, NatsServer]]:
    """A server for each of the two regions. The link comes up by itself, soon.

    `port`: where the first one accepts it, if that has to be known; `dialled`: where the second
    one dials, if something stands between.
    """
    if port is None:
        [port] = free_ports(1)
    accepts = f"leafnodes {{ listen: 127.0.0.1:{port}, no_advertise: true }}"
    solicits = (
        f'leafnodes {{ reconnect: 1, remotes: [{{ url: "nats://127.0.0.1:{dialled or port}" }}] }}'
    )
    async with (
        running_nats_server(directory / first, config=accepts, domain=first) as near,
        running_nats_server(directory / second, config=solicits, domain=second) as far,
    ):
        yield {first: near, second: far}
