"""The nats-servers of a rendered topology on free ports, linked: real files, real processes."""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from infra import bus, topology
from infra.address import SERVERS
from infra.nats import bundle, server
from infra.nats.region_config import LeafAddresses, Site, settings, to_text, users
from infra.topology import Topology
from mesh.adapters import streams
from schemas import subjects
from tests.support.ports import free_ports
from tests.support.server_process import ServerProcess
from tests.support.until import PATIENCE_S

Edit = Callable[[str, dict[str, Any]], None]


def mesh_toml(
    regions: tuple[str, ...] = ("us", "eu", "ap"),
    *,
    replicas: int = 2,
    more: Mapping[str, str] | None = None,
    clusters: Collection[str] = (),
) -> str:
    """A mesh.toml on free ports; `more`: lines that a region's table has besides; `clusters`: those
    with three nats-servers."""
    ports = iter(free_ports(3 * len(regions) + 7 * len(clusters)))

    def addresses(key: str, count: int) -> str:
        found = json.dumps([f"127.0.0.1:{next(ports)}" for _ in range(count)])
        return f"{key} = {found if count > 1 else found.strip('[]')}"

    tables = []
    for name in regions:
        count = SERVERS if name in clusters else 1
        lines = [f"[regions.{name}]", addresses("http", 1)]
        lines += [addresses("nats", count), addresses("leaf", count)]
        if count > 1:
            lines.append(addresses("cluster", count))
        tables.append("\n".join([*lines, f"replicas = {replicas}", (more or {}).get(name, ""), ""]))
    links = [
        f'[[links]]\nbetween = ["{a}", "{b}"]\nrtt_ms = 1\n'
        for number, a in enumerate(regions)
        for b in regions[number + 1 :]
    ]
    return "\n".join(['[mesh]\nname = "test"', *tables, *links])


class NatsRegions:
    """The running nats-servers of each region; those of a cluster are `us-1`, `us-2`, `us-3`."""

    def __init__(
        self,
        mesh: Topology,
        directory: Path,
        *,
        edit: Edit | None = None,
        binaries: Mapping[str, Path] | None = None,
        tls: bool = False,
        leaf_addresses: LeafAddresses | None = None,
    ) -> None:
        """`binaries`: a server's program where it is not the one that is found here.
        `leaf_addresses`: as `bundle.write` takes them, where something stands between."""
        self.topology, self.directory, self._tls = mesh, directory, tls
        self.files = bundle.write(mesh, directory, tls=tls, leaf_addresses=leaf_addresses)
        if edit is not None:
            _edit_configs(mesh, directory, self.files, edit)
        found = server.find()
        self._logs: dict[str, Path] = {}
        self._servers: dict[str, ServerProcess] = {}
        for name, region in mesh.regions.items():
            for each, config in zip(region.servers, self.files[name].configs, strict=True):
                this = f"{name}{each.suffix}"
                log = self._logs[this] = directory / name / f"nats{each.suffix}.log"
                self._servers[this] = ServerProcess(
                    (binaries or {}).get(this, found), config, log=log
                )
        self._clients: list[tuple[asyncio.AbstractEventLoop, Client]] = []

    async def start(self) -> None:
        """Start every server, make its streams, and return when every link is up."""
        for region in self._acceptors_first():
            for name in self.servers(region):
                await self._servers[name].start()
        for region in self.topology.regions:
            await self.set_up(region)
        async with asyncio.timeout(PATIENCE_S):
            for name in self.topology.regions:
                await self._until_linked(name)

    def render(self, **how: bool) -> None:
        """Write the files again, as `bundle.write` does."""
        self.files = bundle.write(self.topology, self.directory, tls=self._tls, **how)

    def reload(self) -> None:
        """Have every server read its files again."""
        for process in self._servers.values():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGHUP)

    def _acceptors_first(self) -> list[str]:
        """A link whose acceptor does not listen yet is dialled again a second later."""
        solicited = Counter(link.solicitor for link in self.topology.links)
        return sorted(self.files, key=lambda region: solicited[region])

    def servers(self, region: str) -> list[str]:
        """The names of its servers."""
        return [f"{region}{each.suffix}" for each in self.topology.region(region).servers]

    async def set_up(self, region: str) -> dict[str, str]:
        """Make the region's streams, as `mesh infra streams` does."""
        users = [
            user for user in ("setup", "batch-setup") if user in self.files[region].credentials
        ]
        setup, batch_setup = [*(self.address(region, user) for user in users), None][:2]
        return await streams.set_up_region(self.topology, region, setup, batch_setup)

    async def stop(self) -> None:
        """Close the clients that `connect` opened in this event loop, then stop the servers.

        Without its server a client reconnects for ever, and one cancel may not end that.
        """
        here = asyncio.get_running_loop()
        for loop, client in self._clients:
            if loop is here:
                await bus.close(client)
        for process in self._servers.values():
            await process.stop()

    async def stop_one(self, region: str) -> None:
        await self._servers[region].stop()

    async def start_one(self, region: str) -> None:
        await self._servers[region].start()

    def kill_one(self, server: str) -> None:
        self._servers[server].kill()

    def pid(self, region: str) -> int:
        pid = self._servers[region].pid
        assert pid is not None
        return pid

    def log(self, region: str) -> str:
        """What the region's server has written."""
        return self._logs[region].read_text()

    def forbade(self, region: str, user: str, subject: str) -> bool:
        """Whether the region's server has written that this user may not say this."""
        said = ("Publish Violation", user, f'Subject "{subject}"')
        lines = self._logs[region].read_text().splitlines()
        return any(all(part in line for part in said) for line in lines)

    def address(self, region: str, user: str) -> bus.BusAddress:
        lines = self.files[region].credentials[user].read_text().splitlines()
        variables = dict(line.split("=", 1) for line in lines)
        return bus.BusAddress.of_credentials(variables)

    async def connect(
        self,
        region: str,
        user: str,
        *,
        inbox_prefix: str | None = None,
        on_error: Callable[[Exception], None] | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> Client:
        own = subjects.INBOX_BATCH_SETUP if user == "batch-setup" else subjects.INBOX_ROOT
        client = await bus.connect(
            self.address(region, user),
            name=user,
            inbox_prefix=inbox_prefix or own,
            on_error=on_error,
            on_lost=on_lost,
        )
        self._clients.append((asyncio.get_running_loop(), client))
        return client

    async def _until_linked(self, region: str) -> None:
        """Each server that dials has its links; the region's have them all together."""
        links = [self.topology.link(region, peer) for peer in self.topology.peers(region)]
        wanted = sum(len(self.servers(link.solicitor)) for link in links)
        client = await self.connect(region, "system")
        try:
            while len(await self.leaf_links(client, len(self.servers(region)))) != wanted:
                await asyncio.sleep(0.02)
        finally:
            await client.close()

    async def leaf_links(self, client: Client, servers: int = 1) -> list[dict[str, Any]]:
        """Those of which the servers report, each of its own."""
        inbox, found = client.new_inbox(), []
        replies = await client.subscribe(inbox)
        await client.publish("$SYS.REQ.SERVER.PING.LEAFZ", reply=inbox)
        for _ in range(servers):
            reply = await replies.next_msg(timeout=PATIENCE_S)
            found += json.loads(reply.data)["data"]["leafs"] or []
        await replies.unsubscribe()
        return found


@contextlib.contextmanager
def running_regions(
    directory: Path, *, toml: str | None = None, edit: Edit | None = None, tls: bool = False
) -> Iterator[NatsRegions]:
    """Three linked regions, or those of `toml`. `edit` may alter a region's settings first."""
    mesh = topology.parse(toml or mesh_toml(), "mesh.toml")
    regions = NatsRegions(mesh, directory, edit=edit, tls=tls)
    try:
        asyncio.run(regions.start())
        yield regions
    finally:
        asyncio.run(regions.stop())


def _edit_configs(mesh: Topology, directory: Path, files: bundle.Written, edit: Edit) -> None:
    kept = bundle.keep_passwords(
        directory.absolute() / bundle.PASSWORDS, [user.key for user in users(mesh)]
    )
    for name, written in files.items():
        site = Site(kept, directory / name / bundle.STATE)
        for number, config in enumerate(written.configs):
            tree: dict[str, Any] = settings(mesh, name, site, number)
            edit(name, tree)
            config.write_text(to_text(tree))
