"""The streams that a region keeps on its own server, and what the last lease in them says.

A lease is heard while we listen, or it is over: its owner renews it four times a lease.
"""

from functools import partial

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import StreamConfig

from infra.topology import Topology
from mesh.adapters import streams
from mesh.doctor.findings import Chart, Verdict
from mesh.doctor.together import together
from schemas import state, subjects, wire
from schemas.ids import RegionId
from schemas.state import Lease

REQUEST_S = 5.0


async def examine_streams(chart: Chart, topology: Topology, client: Client) -> None:
    """Whether they are there, as they are made."""
    region = RegionId(chart.region)
    kept = streams.kept(region, has_peers=bool(topology.peers(region)))

    async def one(config: StreamConfig, page: Chart) -> None:
        await _stream(page, client, config)

    await together(chart, *(partial(one, config) for config in kept))


async def _stream(chart: Chart, client: Client, config: StreamConfig) -> None:
    name = str(config.name)
    try:
        differs = await streams.altered(client, config)
        if not differs:
            info = await client.jsm(timeout=REQUEST_S).stream_info(name)
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError) as error:
        why = str(error) or type(error).__name__
        chart.note("stream", name, Verdict.BAD, f"{why}; is JetStream up?")
        return
    if differs:
        detail = f"not as it is made: {', '.join(differs)}"
        chart.note("stream", name, Verdict.BAD, detail)
    else:
        chart.note("stream", name, Verdict.OK, f"{info.state.messages} last values")


async def examine_owner(
    chart: Chart, topology: Topology, client: Client, heard: Lease | None, listen_s: float
) -> None:
    """Who owns the region's replicas. `heard`: the last write while we listened so long."""
    region = RegionId(chart.region)
    if not topology.peers(region):
        chart.note("lease", "owner", Verdict.OK, "its own routers: there is no other region")
    elif heard is None:
        last = await _last_write(client, region)
        chart.note("lease", "owner", *_unheard(last, listen_s))
    elif heard.owner == region:
        detail = f"its own routers, by {heard.router}, term {heard.term}"
        chart.note("lease", "owner", Verdict.OK, detail)
    else:
        detail = f"adopted by {heard.owner}, by its router {heard.router}, term {heard.term}: "
        detail += "its own routers are not heard"
        chart.note("lease", "owner", Verdict.WARNING, detail)


def _unheard(last: Lease | None, listen_s: float) -> tuple[Verdict, str]:
    if last is None:
        return Verdict.BAD, "nobody: nothing that can be read stands in its stream"
    then = f"the last was {last.owner}, term {last.term}"
    if listen_s < last.lease_s:
        detail = f"not renewed in {listen_s:g} s, shorter than a lease; {then}: listen longer"
        return Verdict.UNKNOWN, detail
    return Verdict.BAD, f"expired: nobody renews it; {then}"


async def _last_write(client: Client, region: RegionId) -> Lease | None:
    manager = client.jsm(timeout=REQUEST_S)
    try:
        last = await manager.get_last_msg(
            subjects.STREAM_LEASES, subjects.lease(region), direct=True
        )
        return None if last.data is None else state.decode_lease(last.data)
    except (nats.js.errors.Error, nats.errors.Error, TimeoutError, wire.WireError):
        return None
