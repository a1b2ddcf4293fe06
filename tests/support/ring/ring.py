"""One run of a ring: who is in it, what is asked, what goes wrong, all by one seed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from agents.core.routers import SILENCE_S
from mesh.session.answer import BUFFERED_BYTES_MAX
from schemas import subjects
from schemas.exchange import Cancel, Frame, FrameView, unpack_frame
from schemas.parcels import PARCEL, unpack_parcel
from schemas.wire import decode_as
from tests.support.ring.engine import Answer, Engine
from tests.support.ring.members import Ask, RingAgent, RingClient, RingRouter
from tests.support.ring.virtual_time import VirtualLoop, play
from tests.support.ring.wire import LATE_S, Message, Trouble, Wire

BEGINS_S = 0.5  # all have seen each other by then
CANCELLED_S = 0.2  # from a cancel's arrival until the agent sends nothing new
SILENT_S = SILENCE_S + LATE_S + 0.5  # from a router's end; its last keep-alive may come late
KEPT_S = 30.0  # nothing is remembered of a request for longer


class LateData:
    """Watches the wire for new frames of answers that nobody wants any more."""

    def __init__(self, wire: Wire, now: Callable[[], float]) -> None:
        self._now = now
        self._ends_at: dict[str, float] = {}  # of inboxes: nothing new may be sent to it from then
        self._next: dict[str, int] = {}  # of inboxes, the first number that was not sent
        self.found: list[str] = []
        wire.sent, wire.arrived = self._sent, self._arrived

    def router_lost(self, router: RingRouter) -> None:
        prefix = f"{subjects.inbox_prefix(router.region, router.name)}."
        for inbox in [each for each in self._next if each.startswith(prefix)]:
            self._ends_at.setdefault(inbox, self._now() + SILENT_S)

    def excuse(self) -> None:
        """An agent was cut off: what waited in it is sent when it is back."""
        self._ends_at.clear()

    def _arrived(self, name: str, message: Message) -> None:
        if message.subject.endswith(".work"):
            self._ends_at.pop(message.reply, None)  # that it comes twice is no fault of the agent's
            self._next[message.reply] = 0
        elif message.subject.endswith(".cancel"):
            inbox = decode_as(Cancel, message.data).inbox
            self._ends_at.setdefault(inbox, self._now() + CANCELLED_S)

    def _sent(self, name: str, message: Message) -> None:
        for inbox, (kind, number, _) in frames_of(message):
            if kind is Frame.DATA and number >= self._next.get(inbox, 0):
                self._next[inbox] = number + 1
                if self._now() > self._ends_at.get(inbox, float("inf")):
                    self.found.append(f"{self._now():.3f} {name}: frame {number} to {inbox}")


def frames_of(message: Message) -> Iterator[tuple[str, FrameView]]:
    """The frames of answers in it, and the inbox of each."""
    if not message.subject.startswith(subjects.INBOX_ROOT) or message.headers is not None:
        return
    prefix, _, last = message.subject.rpartition(".")
    if last == PARCEL:
        for stream, frame in unpack_parcel(message.data):
            yield f"{prefix}.{stream}", unpack_frame(frame)
    else:
        yield message.subject, unpack_frame(message.data)


@dataclass
class Ring:
    """`dice` decide what is asked and what goes wrong; the wire and the engines have others."""

    loop: VirtualLoop
    dice: Random
    wire: Wire
    late_data: LateData
    routers: list[RingRouter] = field(default_factory=list)
    agents: list[RingAgent] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    clients: list[RingClient] = field(default_factory=list)
    expected: int = 0  # clients, when all have come

    def after(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.loop.call_later(delay_s, call, *args)

    def ask(self, delay_s: float, ask: Ask) -> None:
        """Of any router."""
        self.expected += 1
        self.after(delay_s, self._ask, self.dice.choice(self.routers), ask)

    def _ask(self, router: RingRouter, ask: Ask) -> None:
        self.clients.append(RingClient(router, len(self.clients) + 1, ask))

    def said_to(self, client: RingClient) -> list[Answer]:
        """What engines said to its request, attempt by attempt."""
        said = (answer for engine in self.engines for answer in engine.answers)
        return [answer for answer in said if answer.number == client.number]

    async def end(self, limit_s: float = 60.0) -> None:
        """Until every client is answered, and what was kept of that is forgotten."""
        end_at = self.loop.time() + limit_s
        while self.loop.time() < end_at and not self._all_ended():
            await asyncio.sleep(0.1)
            self._check_bounds()
        end_at = self.loop.time() + KEPT_S
        while self.loop.time() < end_at and not self.is_empty():
            await asyncio.sleep(0.5)

    def is_empty(self) -> bool:
        """Whether nobody holds anything of a request any more."""
        routers = [router for router in self.routers if router.is_alive]
        sessions = [router.session for router in routers]
        return not (
            any(len(one) + one.forwarded + one.answers.missing for one in sessions)
            or any(router.kept_bytes for router in routers)
            or any(len(router.core.inflight) + len(router.core.held) for router in routers)
            or any(agent.core.outstanding for agent in self.agents)
            or any(engine.open for engine in self.engines)
        )

    def _all_ended(self) -> bool:
        return len(self.clients) == self.expected and all(one.outcome for one in self.clients)

    def _check_bounds(self) -> None:
        for router in self.routers:
            for record in router.session if router.is_alive else ():
                assert record.answer is None or record.answer.buffered_bytes <= BUFFERED_BYTES_MAX

    def lose(self, router: RingRouter) -> None:
        """As kill -9."""
        self.late_data.router_lost(router)
        router.kill()

    # What may go wrong, for a while.

    def bad_wire(self, begin_s: float, lasts_s: float, trouble: Trouble) -> None:
        """Messages are lost, repeated and late."""
        self.after(begin_s, setattr, self.wire, "trouble", trouble)
        self.after(begin_s + lasts_s, setattr, self.wire, "trouble", Trouble())

    def agent_cut_off(self, begin_s: float, lasts_s: float) -> None:
        agent = self.dice.choice(self.agents)

        def back() -> None:
            agent.returned()
            self.late_data.excuse()

        self.after(begin_s, lambda: agent.member.is_alive and agent.cut())
        self.after(begin_s + lasts_s, back)

    def router_cut_off(self, begin_s: float, lasts_s: float) -> None:
        router = self.dice.choice(self.routers)
        self.after(begin_s, lambda: router.is_alive and router.cut())
        self.after(begin_s + lasts_s, lambda: router.is_alive and router.returned())

    def agent_restarts(self, begin_s: float, lasts_s: float) -> None:
        agent = self.dice.choice(self.agents)

        def start() -> None:
            if not agent.member.is_alive:
                self.loop.create_task(agent.start())

        self.after(begin_s, lambda: agent.member.is_alive and agent.kill())
        self.after(begin_s + lasts_s, start)

    def router_restarts(self, begin_s: float, lasts_s: float) -> None:
        router = self.dice.choice(self.routers)
        self.after(begin_s, lambda: router.is_alive and self.lose(router))
        self.after(begin_s + lasts_s, lambda: router.is_alive or router.start())


def play_ring(
    seed: int,
    script: Callable[[Ring], Awaitable[None]],
    *,
    routers: tuple[str, ...] = ("us.r1", "us.r2"),
    agents: tuple[str, ...] = ("us.g0", "us.g1"),
) -> Ring:
    """The ring as it is when `script` is over. Names are region.process."""
    engines: dict[str, Engine] = {}
    played: list[Ring] = []

    async def run(loop: VirtualLoop) -> None:
        wire = Wire(loop, Random(f"wire {seed}"))
        ring = Ring(loop, Random(seed), wire, LateData(wire, loop.time))
        played.append(ring)
        regions = sorted({name.split(".")[0] for name in (*routers, *agents)})
        policy = ring.dice.choice(("mesh", "mesh", "power-of-two", "cache-aware"))
        for full in routers:
            region, name = full.split(".")
            peers = tuple(each for each in regions if each != region)
            ring.routers.append(RingRouter(wire, name, region, peers, seed, policy))
            ring.routers[-1].start()
        for full in agents:
            region, name = full.split(".")
            engines[name] = Engine(name, loop, Random(f"{name} {seed}"))
            ring.engines.append(engines[name])
            ring.agents.append(RingAgent(wire, engines[name], region))
            await ring.agents[-1].start()
        await asyncio.sleep(BEGINS_S)
        await script(ring)

    play(lambda host, protocol: engines[host].connect(protocol), run)
    return played[0]
