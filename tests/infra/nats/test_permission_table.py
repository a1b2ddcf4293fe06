"""Who may do what, cell by cell, on a real server with the rendered files: each login and each
subject, to publish, to subscribe, to subscribe in a queue group, and to answer.

What a login may do on a channel follows from the channel table alone, so that new rows have cells
by themselves. Calls of JetStream, of services and of the server follow from `permissions`.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Set
from typing import NamedTuple

import pytest

from infra.nats import permissions, region_config
from infra.nats.permissions import Permissions, covers
from schemas import subjects
from schemas.catalog import CHANNELS, Carrier, Channel, Role
from schemas.ids import RegionId, ReplicaId
from tests.support.nats_regions import mesh_toml, running_regions
from tests.support.until import PATIENCE_S

US, LABEL, AGENT = RegionId("us"), "any", "agent-us-0"
LABELS = f'residency = ["{LABEL}"]\n'
BATCH = 'batch_runners = ["batch-0"]\n'
GROUP = "of-mine"

# What each login is in the channel table; people who look on see other regions' rows as well.
ROLES: dict[str, Set[Role]] = {
    AGENT: {Role.AGENT, Role.PEER_AGENT},
    "router": {Role.ROUTER, Role.PEER_ROUTER},
    "observer": {Role.OBSERVER},
    "operator": {Role.OPERATOR},
    "admin": {Role.ADMIN},
    **dict.fromkeys(("setup", "system", "batch", "batch-setup", "batch-observer"), frozenset()),
}
OWN = {Role.AGENT, Role.ROUTER}  # in their own region only, agents for their own replica
# Who may read all inboxes of its account: people and tools have one of their own.
ALL_INBOXES = {"observer", "operator", "admin", "setup", "system", "batch", "batch-observer"}
PAGE = {"day": "2026-11-29", "page": "1-0"}
FOREIGN = {"region": "eu", "replica": "eu-0", "router": "r1", "asker": "us"} | PAGE
NAMES = (
    {"region": "us", "replica": "us-0", "router": "r1", "asker": "us"} | PAGE,
    {"region": "us", "replica": "us-1", "router": "r2", "asker": "us"} | PAGE,
    FOREIGN,
    FOREIGN | {"asker": "eu"},
)


class Cell(NamedTuple):
    """One thing to try. `group`: of a subscription."""

    verb: str  # of NATS' protocol: PUB or SUB
    subject: str
    group: str = ""

    @property
    def refusal(self) -> str:
        """What the server says who may not."""
        if self.verb == "PUB":
            return f'Publish to "{self.subject}"'
        group = f' using queue "{self.group}"' if self.group else ""
        return f'Subscription to "{self.subject}"{group}'


class Connection:
    """A login at the server, without a client library between."""

    def __init__(self, address):
        self._address = address
        self._sids = 0
        self.heard: set[tuple[str, str]] = set()  # subjects and bodies of messages
        self.replies: dict[str, str] = {}  # the reply subject of the last request on a subject

    async def open(self) -> None:
        host, port = self._address.url.removeprefix("nats://").split(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        user, password = self._address.user, self._address.password
        login = f'{{"user":"{user}","pass":"{password}","verbose":false,"headers":true}}'
        await self._reader.readline()
        assert await self.said([f"CONNECT {login}\r\n"]) == set()

    def close(self) -> None:
        self._writer.transport.abort()

    async def said(self, commands: list[str]) -> set[str]:
        """What it refuses of these."""
        self._writer.write("".join([*commands, "PING\r\n"]).encode())
        refused = set()
        while (line := (await self._reader.readline()).decode()) != "PONG\r\n":
            assert line, f"{self._address.user}: the server closed the connection"
            if found := re.fullmatch(r"-ERR 'Permissions Violation for (.*)'\r\n", line):
                refused.add(found[1])
            elif line.startswith(("MSG", "HMSG")):
                kind, subject, _, *reply, size = line.split()
                data = (await self._reader.readexactly(int(size) + 2))[:-2]
                if kind == "HMSG":  # a server adds headers to what crosses accounts
                    data = data[int(reply.pop()) :]
                self.heard.add((subject, data.decode()))
                if reply:
                    self.replies[subject] = reply[0]
            elif line == "PING\r\n":
                self._writer.write(b"PONG\r\n")
            else:
                assert line.startswith("INFO"), line
        return refused

    async def refused(self, cells: list[Cell]) -> set[Cell]:
        found = await self.said([self._command(cell) for cell in cells])
        known = {cell.refusal: cell for cell in cells}
        assert found <= set(known), found - set(known)
        return {known[one] for one in found}

    def _command(self, cell: Cell) -> str:
        if cell.verb == "PUB":
            return f"PUB {cell.subject} 1\r\n?\r\n"
        self._sids += 1
        return f"SUB {cell.subject} {cell.group} {self._sids}\r\nUNSUB {self._sids}\r\n"

    async def listen(self, subject: str, group: str) -> None:
        assert await self.said([f"SUB {subject} {group} {subject}\r\n"]) == set()

    async def until_heard(self, subject: str, body: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (subject, body) not in self.heard:
                    assert await self.said([]) == set()
        except TimeoutError:
            raise AssertionError(f"{self._address.user} hears no {subject} of {body}") from None

    async def publish(self, subject: str, body: str, reply: str = "") -> None:
        assert await self.said([f"PUB {subject} {reply} {len(body)}\r\n{body}\r\n"]) == set()


@pytest.fixture(scope="module")
def us(tmp_path_factory):
    toml = mesh_toml(("us", "eu"), more={"us": LABELS + BATCH, "eu": LABELS})
    with running_regions(tmp_path_factory.mktemp("table"), toml=toml) as regions:
        yield regions


@contextlib.asynccontextmanager
async def logged_in(us) -> AsyncIterator[dict[str, Connection]]:
    users = [user.name for user in region_config.region_users(us.topology, US)]
    assert {AGENT, *users} == set(ROLES), "say in ROLES what a login is in the channel table"
    found = {name: Connection(us.address("us", name)) for name in ROLES}
    try:
        for connection in found.values():
            await connection.open()
        yield found
    finally:
        for connection in found.values():
            connection.close()


def concrete(pattern: str) -> str:
    """A subject that the pattern matches."""
    return pattern.replace("*", "x").replace(">", "x.y")


def rendered(us, name: str) -> Permissions:
    """What the files say."""
    make = {
        AGENT: lambda: permissions.agent(US, ReplicaId("us-0")),
        "router": lambda: permissions.router(US, us.topology.ground),
        "observer": lambda: permissions.watcher(Role.OBSERVER),
        "operator": lambda: permissions.watcher(Role.OPERATOR),
        "batch-setup": permissions.batch_setup,
        "batch-observer": permissions.batch_observer,
    }
    return make.get(name, getattr(permissions, name, None))()


def may_act(name: str, roles: Set[Role], row: Channel, names: dict[str, str]) -> bool:
    """Whether a row that is open to these roles is so to that login, with those names."""
    for role in ROLES[name] & roles:
        is_own = names["region"] == "us"
        if role is Role.AGENT and "{replica}" in row.template:
            is_own = names["replica"] == "us-0"
        asks_as_us = "{asker}" not in row.template or names["asker"] == "us"
        if (is_own or role not in OWN) and asks_as_us:
            return True
    return False


def channel_cells(name: str) -> Iterator[tuple[Cell, bool]]:
    """Each cell of a login and the channels, and whether it is open."""
    for row in CHANNELS:
        for names in NAMES:
            subject = row.subject(**names, label=LABEL, stream="7")
            is_label = "{label}" in row.template
            # A prompt under a label goes to peers that carry it, and to no other place.
            sends = may_act(name, row.publish, row, names)
            yield Cell("PUB", subject), sends and not (is_label and names["region"] == "us")
            if is_label:
                yield Cell("PUB", row.subject(**names, label="none", stream="7")), False
            hears = may_act(name, row.subscribe, row, names)
            if row.name == "inbox":
                hears |= name in ALL_INBOXES
            if row.name == "requests":
                hears &= names["region"] == "us"
            yield Cell("SUB", subject), hears and row.queue is None
            yield Cell("SUB", subject, GROUP), hears and row.queue is None
            if row.queue is not None:
                yield Cell("SUB", subject, row.queue), hears


OWN_INBOXES = (subjects.INBOX_BATCH_SETUP, subjects.INBOX_CHECK)


def other_cells(us, name: str) -> Iterator[tuple[Cell, bool]]:
    """The same of what is in no row: every call that any login may make, and where answers go."""
    allowed = rendered(us, name)
    templates = {row.subject().split(".")[0] for row in CHANNELS}
    known = {
        concrete(pattern)
        for other in ROLES
        for pattern in rendered(us, other).publish
        if pattern.split(".")[0] not in templates
    }
    answers = ("_R_.x.y", "_INBOX.x", "_INBOX.x.y", *(f"{one}.x" for one in OWN_INBOXES))
    for subject in sorted({*known, *answers, "$JS.API.STREAM.PURGE.CONTROL", "$SYS.REQ.x", "x"}):
        yield Cell("PUB", subject), any(covers(one, subject) for one in allowed.publish)
    for subject in sorted({*known, *answers, ">", "$SYS.>", "$JS.>", "_INBOX.>", "mesh.>"}):
        for group in ("", GROUP):
            words = f"{subject} {group}".strip()
            yield Cell("SUB", subject, group), any(covers(one, words) for one in allowed.subscribe)


async def test_every_cell_of_every_login(us):
    tried, wrong = 0, []
    async with asyncio.timeout(PATIENCE_S), logged_in(us) as logins:
        for name, connection in logins.items():
            # What is published last: one login may delete streams.
            wanted = dict([*channel_cells(name), *other_cells(us, name)])
            cells = sorted(wanted, key=lambda cell: cell.verb, reverse=True)
            refused = await connection.refused(cells)
            tried += len(cells)
            wrong += [
                f"{name} may{' not' * (cell in refused)}: {' '.join(cell)}"
                for cell, is_open in wanted.items()
                if is_open is (cell in refused)
            ]
    assert wrong == []
    assert tried > 1000


async def test_what_is_open_to_both_sides_arrives_and_is_answered(us):
    """By each login that may say it, at each that may hear it, and back where it is a request."""
    names = NAMES[0]
    async with logged_in(us) as logins:
        tried = set()
        for row in CHANNELS:
            if row.carrier in (Carrier.COMPARE_AND_SET, Carrier.REPUBLISHED) or row.name == "inbox":
                continue  # a stream's
            subject = row.subject(**names, label=LABEL, stream="7")
            say = [one for one in logins if may_act(one, row.publish & OWN, row, names)]
            say += [one for one in logins if row.publish & ROLES[one] - OWN - permissions.PEERS]
            hear = [one for one in logins if may_act(one, row.subscribe, row, names)]
            for one in hear:
                await logins[one].listen(subject, row.queue or "")
            for sayer in say:
                tried.add(row.name)
                inbox = subjects.inbox(US, "r1", "8") if sayer == "router" else "_INBOX.mine.8"
                is_asked = row.carrier is Carrier.REQUEST and sayer != AGENT
                if is_asked:
                    await logins[sayer].listen(inbox, "")
                await logins[sayer].publish(subject, sayer, inbox if is_asked else "")
                for hearer in hear:
                    await logins[hearer].until_heard(subject, sayer)
                    if is_asked:
                        await logins[hearer].publish(logins[hearer].replies[subject], hearer)
                        await logins[sayer].until_heard(inbox, hearer)
    assert {"heartbeat", "work", "digest", "held", "requests", "alive"} <= tried
