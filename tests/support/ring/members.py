"""The processes of the ring: routers with their clients, and agents."""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from agents.adapters.bus import AgentBus
from agents.adapters.outbox import BusConnection
from agents.config import AgentConfig
from agents.core.agent import AgentCore
from agents.core.events import EngineReading, EngineScraped
from agents.runtime.agent import Agent
from agents.runtime.process import engine_client, replica_config
from mesh.adapters.bus import body_parts
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import Prompt
from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from mesh.session.answer import AnswerReceiver, Held
from mesh.session.headers import read_forwarded
from mesh.session.record import Home, Identifiers, Observer, OpenRequest
from mesh.session.session import Session
from schemas import exchange, subjects
from schemas.exchange import Frame, pack_frame
from schemas.ids import ModelId, RegionId, ReplicaId, RequestId, RouterId
from schemas.parcels import PARCEL
from schemas.state import decode_digest, decode_heartbeat, encode_state
from schemas.wire import encode
from tests.support.ring.engine import Engine
from tests.support.ring.wire import Client as BusClient
from tests.support.ring.wire import Message, Wire

MODEL = ModelId("m")
TICK_S = 0.1
SCRAPE_S = 0.5
HEARTBEAT_MS = 200
MESSAGE_BYTES_MAX = 64 * 1024  # a larger body goes in parts
OF_PEERS: dict[type, Frame] = {
    exchange.Placed: Frame.PLACED,
    exchange.Lost: Frame.LOST,
    exchange.Refused: Frame.REFUSED,
}


class Tasks:
    """An asyncio.TaskGroup's `create_task`, for tasks that end in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: dict[asyncio.Task[Any], None] = {}

    def create_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(coroutine)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._loop.call_exception_handler({"message": "a task failed", "exception": problem})

    def kill(self) -> None:
        for task in self._running:
            task.cancel()


class RingAgent:
    """One replica's agent and its engine: `start` it, `kill` it, start it again."""

    def __init__(self, wire: Wire, engine: Engine, region: str) -> None:
        self.name, self.region = engine.name, region
        self._wire, self._engine, self._loop = wire, engine, engine.loop
        self.epoch = 0

    async def start(self) -> None:
        self.epoch += 1
        self._tasks = tasks = Tasks(self._loop)
        self.member = self._wire.join(self.name)
        self._connection = BusConnection()
        region, replica = RegionId(self.region), ReplicaId(self.name)
        client: Any = BusClient(self.member, tasks.create_task)
        bus = AgentBus(client, self._connection, region, replica)
        url, clock = f"http://{self.name}", self._loop.time
        config = AgentConfig(
            region=region,
            replica=replica,
            nats_url="nats://ring",
            engine_kind="vllm",
            engine_url=url,
            models=(MODEL,),
            outstanding_max=4,
            heartbeat_ms=HEARTBEAT_MS,
            speed_probe=False,
        )
        engine = engine_client(config, clock)
        self.core = AgentCore(replica_config(config, self.epoch, None))
        group: Any = tasks
        self._agent = agent = Agent(config, self.core, bus, engine, clock, group)
        for part in (
            self._connection.report(agent.feed),
            bus.outbox.run(),
            agent.keep_time(),
            agent.keep_alive(),
            self._scrape(),
        ):
            tasks.create_task(part)
        await bus.listen(agent.feed, agent.credit)

    async def _scrape(self) -> None:
        """What an engine's pages show of requests that it has."""
        while True:
            reading = EngineReading(waiting=0, running=len(self._engine.open))
            await self._agent.feed(EngineScraped(self._loop.time(), reading, (MODEL,)))
            await asyncio.sleep(SCRAPE_S)

    def kill(self) -> None:
        """As kill -9: its connections end with it."""
        self._wire.leave(self.member)
        self._tasks.kill()
        for connection in list(self._engine.open):
            connection.end()

    def cut(self) -> None:
        """Its bus is away, until `returned`."""
        if self.member.is_connected:
            self.member.is_connected = False
            self._connection.lost()

    def returned(self) -> None:
        if not self.member.is_connected:
            self.member.is_connected = True
            self._connection.returned()


class BodiesKept(Observer):
    """Counts the bytes of bodies that a router still keeps."""

    def __init__(self, router: "RingRouter") -> None:
        self._router = router

    def body_dropped(self, kept_bytes: int) -> None:
        self._router.kept_bytes -= kept_bytes


class RingRouter:
    """One router, its core and its session; it is its session's bus."""

    def __init__(
        self, wire: Wire, name: str, region: str, peers: tuple[str, ...], seed: int, policy: str
    ) -> None:
        self.name, self.region = name, RegionId(region)
        self._wire, self._seed = wire, seed
        self._peers = tuple(map(RegionId, peers))
        self._settings = RouterSettings(policy=policy, trie_bytes_per_s=0, digest_s=0.2)
        self.loop = asyncio.get_running_loop()
        self.epoch = 0
        self._keys, self._tokens = count(1), count(1)
        self.clients: dict[int, RingClient] = {}

    def start(self) -> None:
        self.epoch += 1
        self.kept_bytes = 0  # of clients' bodies
        router = RouterId(self.name)
        self.core = RouterCore(
            RouterState(
                region=self.region,
                router=router,
                epoch=self.epoch,
                settings=self._settings,
                dice=Random(f"{self._seed} {self.name} {self.epoch}"),
                peers=self._peers,
            )
        )
        self.session = Session(
            Home(self.region, router),
            decide=self.core.handle,
            clock=self.loop.time,
            bus=self,
            ids=Identifiers(lambda: f"{next(self._tokens):x}", self._keys),
            observer=BodiesKept(self),
        )
        others = dict.fromkeys(
            (
                fx.PublishTrie, fx.PublishToSiblings, fx.AskTrie, fx.AnswerTrie, fx.ClaimLease,
                fx.OwnershipChanged, fx.AskHeld, fx.HearReplicas,
            ),
            lambda effect: None,
        )  # fmt: skip
        self.session.performers |= {**others, fx.PublishDigest: self._publish_digest}
        self.member = member = self._wire.join(self.name)
        member.subscribe(subjects.inbox(self.region, router, "*"), self._answered)
        member.subscribe(subjects.heartbeat(self.region, "*"), self._heartbeat)
        member.subscribe(subjects.ingress(self.region), self._ingress)
        for peer in self._peers:
            member.subscribe(subjects.digest(peer), self._digest)
        self._tick(self.session, 0)

    def kill(self) -> None:
        """As kill -9: its clients' connections end with it."""
        self._wire.leave(self.member)
        del self.session
        for client in list(self.clients.values()):
            client.end("router lost")

    @property
    def is_alive(self) -> bool:
        return self.member.is_alive

    def cut(self) -> None:
        """Its bus is away, until `returned`."""
        if self.member.is_connected:
            self.member.is_connected = False
            self.session.feed(ev.BusLost())

    def returned(self) -> None:
        if not self.member.is_connected:
            self.member.is_connected = True
            self.session.bus_returned()

    def _tick(self, session: Session, number: int) -> None:
        if getattr(self, "session", None) is not session:
            return
        session.tick()
        if number % round(exchange.ALIVE_S / TICK_S) == 0:
            alive = subjects.alive(self.region, RouterId(self.name))
            self.member.publish(alive, encode(exchange.Alive(self.epoch)))
        self.loop.call_later(TICK_S, self._tick, session, number + 1)

    # Messages of the bus.

    def _answered(self, message: Message) -> None:
        answers, inbox = self.session.answers, message.subject
        if message.headers is not None:
            answers.no_subscriber(inbox)
        elif inbox.endswith(f".{PARCEL}"):
            answers.receive_parcel(inbox.removesuffix(PARCEL), message.data)
        elif not answers.receive_frame(inbox, message.data):
            answers.receive_stray(inbox, message.data)

    def _heartbeat(self, message: Message) -> None:
        self.session.feed(ev.HeartbeatSeen(decode_heartbeat(message.data)))

    def _digest(self, message: Message) -> None:
        self.session.feed(ev.DigestSeen(decode_digest(message.data)))

    def _ingress(self, message: Message) -> None:
        headers, now = dict(message.headers or {}), self.loop.time()
        request = read_forwarded(
            headers,
            lambda model, path: Prompt(100, ()),
            key=next(self.session.keys),
            home=self.region,
            label=None,
            inbox=message.reply,
            now=now,
        )
        body = b"" if exchange.H_BODY_BYTES in headers else message.data
        path = headers[exchange.H_PATH]
        record = OpenRequest(request=request, path=path, body=body, received=headers)
        self.session.admit_forwarded(record)

    def _publish_digest(self, effect: fx.PublishDigest) -> None:
        self.member.publish(subjects.digest(self.region), encode_state(effect.digest))

    # The session's bus.

    @property
    def is_connected(self) -> bool:
        return self.member.is_connected

    def send_work(
        self,
        record: OpenRequest,
        region: RegionId,
        replica: ReplicaId,
        inbox: str,
        headers: dict[str, str],
    ) -> bool:
        self._send(subjects.work(region, replica), record, inbox, headers)
        return True

    def send_ingress(
        self, record: OpenRequest, peer: RegionId, inbox: str, headers: dict[str, str]
    ) -> bool:
        self._send(subjects.ingress(peer), record, inbox, headers)
        return True

    def _send(self, subject: str, record: OpenRequest, inbox: str, headers: dict[str, str]) -> None:
        body = record.body
        if len(body) > MESSAGE_BYTES_MAX:
            headers[exchange.H_BODY_BYTES], body = str(len(body)), b""
        self.member.publish(subject, body, inbox, headers)

    def send_body(
        self, record: OpenRequest, region: RegionId, replica: ReplicaId, inbox: str, is_wanted: Any
    ) -> bool:
        for payload, headers in body_parts(record.body, inbox, MESSAGE_BYTES_MAX):
            self.member.publish(subjects.body(region, replica), payload, "", headers)
        return True

    def send_blocks(self, region: RegionId, replica: ReplicaId, blocks: Any) -> None:
        """These engines publish no KV events."""

    def link_returned(self, region: RegionId) -> None:
        """Nothing is paced."""

    def send_cancel(self, region: RegionId, replica: ReplicaId, inbox: str) -> None:
        self.member.publish(subjects.cancel(region, replica), encode(exchange.Cancel(inbox)))

    def send_credit(self, region: RegionId, replica: ReplicaId, credit: exchange.Credit) -> None:
        self.member.publish(subjects.credit(region, replica), encode(credit))

    def answer_peer(self, inbox: str, message: Any) -> None:
        if isinstance(message, Held):
            frame = pack_frame(Frame.HELD, message.hops)
        else:
            frame = pack_frame(OF_PEERS[type(message)], 0, encode(message))
        self.member.publish(inbox, frame)


@dataclass(frozen=True, slots=True)
class Ask:
    """What one client asks, and how it reads. `answer`: as `Engine` understands it."""

    answer: dict[str, Any]
    body_bytes: int = 200
    deadline_s: float = 20.0
    reads_every_s: float = 0.0  # 0: at once
    hangs_up_after_s: float | None = None
    streams_past: bool = True  # reads what flows past the answer's buffer, as HTTP/1.1 does


class RingClient:
    """One request. `outcome`: how it ended, as its client saw it; None before."""

    def __init__(self, router: RingRouter, number: int, ask: Ask) -> None:
        self.number, self.ask = number, ask
        self.received = bytearray()
        self.outcome: str | None = None
        self.ends = 0
        self.took_s = 0.0  # from its request to its end
        self._router, self._loop = router, router.loop
        self._asked_at = router.loop.time()
        self._answer: AnswerReceiver | None = None  # once its first byte was sent
        self._is_behind = False  # it reads again later
        if not router.is_alive:
            self.end("router lost")
            return
        now = self._loop.time()
        body = json.dumps({"n": number, **ask.answer, "pad": "p" * ask.body_bytes}).encode()
        request = Request(
            key=next(router.session.keys),
            request_id=RequestId(f"q{number}"),
            model=MODEL,
            prompt=Prompt(100, ()),
            arrived_at=now,
            deadline=now + ask.deadline_s,
            hops=0,
            origin=router.region,
            streams=ask.answer["kind"] != "plain",
        )
        self._session = router.session
        kept = {"body": body, "kept_bytes": len(body)}
        self._record = OpenRequest(request=request, changed=self._changed, **kept)
        router.kept_bytes += len(body)
        router.clients[number] = self
        self._session.admit(self._record)
        if ask.hangs_up_after_s is not None:
            self._loop.call_later(ask.hangs_up_after_s, self._hang_up)

    def _hang_up(self) -> None:
        if self.outcome is None:
            self._session.feed(ev.ClientGone(self._record.request.key))
            self._close("gone")

    def _changed(self) -> None:
        record = self._record
        if self.outcome is not None:
            return
        if self._answer is not None:
            self._read()
        elif record.failure is not None:
            self._close(record.failure.fault.value.code)
        elif record.pass_engine_error:
            self._close("engine's error")
        elif record.answer is not None and record.answer.is_startable:
            self._answer = record.answer
            self._session.started(record)
            self._read()

    def pass_on(self, frame: bytes) -> bool:
        """Frames that need no buffer (`mesh.session.record.DirectWriter`)."""
        assert self._answer is not None
        data = self._answer.passing(frame)
        self.received += data
        if data and self._answer.taken_bytes >= self._answer.credit_at_bytes:
            self._session.passed(self._record)
        return bool(data)

    def _read(self) -> None:
        answer, record = self._answer, self._record
        assert answer is not None
        record.direct_writer = None
        if self._is_behind:
            return
        if self.ask.reads_every_s:
            self._is_behind = True
            self._loop.call_later(self.ask.reads_every_s, self._read_on)
        while data := answer.take():
            self.received += data
            self._session.passed(record)
        if answer.end is not None and record.failure is None:
            self._close("ok")
        elif record.failure is not None:
            self._close("ok" if answer.is_whole else "broken")
        elif self.ask.streams_past and not self.ask.reads_every_s:
            record.direct_writer = self

    def _read_on(self) -> None:
        self._is_behind = False
        self._changed()

    def _close(self, outcome: str) -> None:
        self._record.direct_writer = None
        assert self._session.close(self._record), "it was open"
        self.end(outcome)

    def end(self, outcome: str) -> None:
        """Its connection is over."""
        self.outcome = self.outcome or outcome
        self.ends += 1
        self.took_s = self._loop.time() - self._asked_at
        self._router.clients.pop(self.number, None)
