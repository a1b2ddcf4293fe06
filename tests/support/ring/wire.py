"""A bus in memory: messages by subject, in order, unless a seed says otherwise."""

import asyncio
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from schemas.subjects import INBOX_ROOT

DELAY_S = 0.001
LATE_S = 0.8


class Message(NamedTuple):
    """As nats-py's `Msg`, as far as it is read."""

    subject: str
    reply: str
    headers: Mapping[str, str] | None
    data: bytes


Take = Callable[[Message], object]
Watch = Callable[[str, Message], object]  # the member's name first


@dataclass(slots=True)
class Trouble:
    """Shares of messages that are lost, come twice, or come late and are overtaken.

    A nats-server repeats nothing: only frames come twice, as agents retransmit them. `spared`:
    messages that are never lost.
    """

    lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    spared: Callable[[Message], bool] = lambda message: False


class Member:
    """One process on the wire, from its start to its end."""

    def __init__(self, wire: "Wire", name: str) -> None:
        self._wire = wire
        self.name = name
        self.is_alive, self.is_connected = True, True
        self._subscriptions: list[tuple[str, Take]] = []
        self._takers: dict[str, list[Take]] = {}  # by subject, as far as some was sent to it

    def subscribe(self, pattern: str, take: Take) -> None:
        self._subscriptions.append((pattern, take))
        self._takers.clear()

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if self.is_alive and self.is_connected:
            self._wire.carry(self, Message(subject, reply, headers, bytes(data)))

    def takers(self, subject: str) -> list[Take]:
        if (found := self._takers.get(subject)) is None:
            subscribed = self._subscriptions
            found = [take for pattern, take in subscribed if _fits(pattern, subject)]
            self._takers[subject] = found
        return found


class Wire:
    """Carries messages between its members, and keeps a fingerprint of all that arrived."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dice: Random) -> None:
        self._loop, self._dice = loop, dice
        self.members: list[Member] = []
        self.trouble = Trouble()
        self._last: dict[tuple[str, str], float] = {}  # when each pair's last message arrives
        self.fingerprint = 0
        self.carried = 0
        self.sent: Watch = lambda name, message: None
        self.arrived: Watch = lambda name, message: None

    def join(self, name: str) -> Member:
        member = Member(self, name)
        self.members.append(member)
        return member

    def leave(self, member: Member) -> None:
        member.is_alive = False
        self.members.remove(member)

    def carry(self, sender: Member, message: Message) -> None:
        self.carried += 1
        self.sent(sender.name, message)
        takers = [member for member in self.members if member.takers(message.subject)]
        for member in takers:
            self._send(sender, member, message)
        if not takers and message.reply:
            nobody = Message(message.reply, "", {"Status": "503"}, b"")
            self._send(sender, sender, nobody)

    def _send(self, sender: Member, to: Member, message: Message) -> None:
        dice, trouble = self._dice.random(), self.trouble
        if dice < trouble.lost and not trouble.spared(message):
            return
        now, edge = self._loop.time(), (sender.name, to.name)
        at = self._last[edge] = max(now + DELAY_S, self._last.get(edge, 0.0) + 1e-6)
        is_frame = message.subject.startswith(INBOX_ROOT)
        if is_frame and dice < trouble.lost + trouble.twice:
            self._loop.call_at(at + DELAY_S, self._arrive, to, message)
        elif 1.0 - dice < trouble.late:
            at += self._dice.random() * LATE_S
        self._loop.call_at(at, self._arrive, to, message)

    def _arrive(self, to: Member, message: Message) -> None:
        if not (to.is_alive and to.is_connected):
            return
        what = f"{self._loop.time():.6f} {to.name} {message.subject} {message.headers}".encode()
        self.fingerprint = zlib.crc32(message.data, zlib.crc32(what, self.fingerprint))
        self.arrived(to.name, message)
        for take in to.takers(message.subject):
            take(message)


def _fits(pattern: str, subject: str) -> bool:
    wanted, tokens = pattern.split("."), subject.split(".")
    pairs = zip(wanted, tokens, strict=False)
    return len(wanted) == len(tokens) and all(want in ("*", token) for want, token in pairs)


class Client:
    """Stands where an agent has nats-py's client: one member, one message after another."""

    is_closed = False

    def __init__(self, member: Member, run: Callable[[Any], object]) -> None:
        """`run` makes a task of a coroutine."""
        self._member = member
        self._arrived: asyncio.Queue[tuple[Any, Message]] = asyncio.Queue()
        run(self._call_back())

    @property
    def is_connected(self) -> bool:
        return self._member.is_connected

    async def subscribe(self, subject: str, *, cb: Any, **limits: Any) -> None:
        self._member.subscribe(subject, lambda message: self._arrived.put_nowait((cb, message)))

    async def publish(self, subject: str, payload: bytes = b"") -> None:
        self._member.publish(subject, payload)

    async def flush(self, timeout: float = 0.0) -> None:
        """Whatever was published is on the wire."""

    async def _call_back(self) -> None:
        while True:
            callback, message = await self._arrived.get()
            await callback(message)
