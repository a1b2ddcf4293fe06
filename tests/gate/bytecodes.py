"""What a request costs the router, counted so that the same code always gives the same number.

    make gate-renew

CPU time on a shared machine spreads by more than the losses that matter. So here bytecodes are
counted instead, those that this project's own functions execute: the same under any load, and off
by nothing when the clock, the kernel or a library changes. What it can't see is time inside C and
inside libraries; `make bench-workers` and `make decide` measure that.

Seven acts: a plain request, one of a key with limits and a stream of 32 chunks, from HTTP bytes in
to HTTP bytes out through the real server, session, core and a real bus, each frame of the answer
heard alone; a heartbeat; and a decision among 64 replicas that hold 20,000 blocks, with what it
leaves to be learned; and the same two requests at an agent (`agent`). `test_gate.py` holds them to
`bytecodes.json`, which `renew` writes. Other versions of Python compile to other bytecodes: 3.13 to
a tenth fewer than 3.11. So the file says of which one its figures are, and any other one has more
room.
"""

import asyncio
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from infra import bus
from infra.auth_table import AuthTable
from infra.bus import BusAddress
from infra.tenant_table import TenantTable, key_hash, listed_callers
from mesh.adapters.access_log import AccessLog
from mesh.adapters.bus import Listeners, RouterBus
from mesh.adapters.metrics import RouterMetrics
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings
from mesh.core.policies import make_policy
from mesh.core.router import RouterCore
from mesh.core.state import RouterState
from mesh.http.routes import HttpApi, Served
from mesh.http.server import HttpServer
from mesh.runtime.config import RouterConfig
from mesh.runtime.request_manager import RequestManager
from schemas import exchange, subjects
from schemas.exchange import Frame, pack_frame
from schemas.ids import RegionId, RouterId
from schemas.limits import LimitsTable
from schemas.wire import encode
from tests.programs.live.load.fleet import CHUNK, DONE, MODEL, PLAIN, replica
from tests.programs.studies import decide

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).with_name("bytecodes.json")
OURS = tuple(str(ROOT / folder) for folder in ("mesh", "schemas", "infra"))
US, R1 = RegionId("us"), RouterId("r1")
WARM, COUNTED = 5, 20
CHUNKS, DECISION_REPLICAS, DECISION_BLOCKS = 32, 64, 20_000
WAIT_S, TURNS = 10.0, 16
WRITTEN_EVERY_S = 3600.0  # the access log; here its lines are written by COUNTED
PROMPT = "word " * 800  # 16 blocks

KEY = "sk-gate"
MANY = LimitsTable(requests_per_minute=1_000_000, tokens_per_minute=1_000_000_000)
LIMITED = {"acme": TenantTable(key_sha256=(key_hash(KEY),), limits=MANY, key_limits=MANY)}

Figures = dict[str, float]


class Bytecodes:
    """Counts what functions of these files execute in this thread, while it is entered."""

    def __init__(self, files: tuple[str, ...] = OURS) -> None:
        self.count, self._files = 0, files

    def __enter__(self) -> "Bytecodes":
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: types.FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._traced

    def _traced(self, frame: types.FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.count += 1
        return self._traced


class Wire(asyncio.Transport):
    """The client's end of a connection: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def writelines(self, chunks: Any) -> None:
        self.write(b"".join(chunks))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is written at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Everything is read at once."""

    def resume_reading(self) -> None:
        """Nothing was paused."""


class Edge:
    """A router without a clock of its own: its HTTP side, session and core, on a real bus."""

    def __init__(
        self, url: str, tenants: dict[str, TenantTable], *, key_required: bool = False
    ) -> None:
        config = RouterConfig(
            region=US, router=R1, peers=(), http_host="", http_port=0, bus=BusAddress(url),
            settings=RouterSettings(), hash_key="gate", epoch=1, seed=1,
            keys=listed_callers(tenants), tenants=tenants, auth=AuthTable(required=key_required),
        )  # fmt: skip
        clock = asyncio.get_running_loop().time
        core = RouterCore(
            RouterState(region=US, router=R1, epoch=1, settings=config.settings, dice=Random(1))
        )
        metrics = RouterMetrics(core, CollectorRegistry(), clock)
        self.bus = RouterBus(US, R1, (), config.bus)
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        self.log = AccessLog("us/r1", descriptor=self._nowhere, every_s=WRITTEN_EVERY_S)
        self.requests = RequestManager(
            config, core, self.bus, metrics, clock, core.handle, self.log
        )
        served = Served(callers=self.requests.callers)
        core.state.models.see((MODEL,), 0.0)
        core.state.models.expire(60.0)  # it has not just started
        api = HttpApi(US, self.requests, metrics.registry, served)
        self._key = KEY if tenants else ""
        self._server = HttpServer(api.handle, completions=api.completions)
        self._fleet: Client | None = None
        self._work: asyncio.Queue[Msg] = asyncio.Queue()
        self._beats = [replica(number) for number in range(4)]
        self._heard = 0

    async def open(self, url: str) -> None:
        """Join the bus, with replicas that are ready."""
        self.log.open()

        def heard(msg: Msg) -> None:
            self._heard += 1
            self.requests.messages.receive_answer(msg)

        def deaf(*_: object) -> None:
            """Nobody else is there."""

        await self.bus.open(Listeners(
            heartbeat=deaf, digest=deaf, trie=deaf, siblings=deaf, trie_ask=deaf, lease=deaf,
            control=deaf, answer=heard, ingress=deaf, ping=deaf, lost=deaf, back=deaf,
        ))  # fmt: skip
        self._fleet = await bus.connect(BusAddress(url), name="fleet", inbox_prefix="_INBOX")
        await self._fleet.subscribe(subjects.work(US, subjects.ANY), cb=self._work.put)
        await self._fleet.flush()

    async def close(self) -> None:
        """Leave the bus."""
        assert self._fleet is not None
        await self._fleet.close()
        await self.bus.close()
        await self.log.close()
        os.close(self._nowhere)

    def hear_beats(self) -> int:
        """Every replica says that it is idle; returns how many did."""
        for one in self._beats:
            head, beat, *_ = one.line().split(b"\r\n")
            self.requests.messages.read_heartbeat(head.split()[1].decode(), beat)
        return len(self._beats)

    async def ask(self, counter: Bytecodes, chunks: int) -> None:
        """One request on a connection of its own, answered in so many chunks; 0: a plain one."""
        self.hear_beats()
        protocol, wire = self._server(), Wire()
        protocol.connection_made(wire)
        with counter:
            protocol.data_received(_request(stream=bool(chunks), key=self._key))
            async with asyncio.timeout(WAIT_S):
                msg = await self._work.get()
                await self._answer(msg, chunks)
                while not wire.written.endswith(b"\r\n0\r\n\r\n" if chunks else PLAIN):
                    await asyncio.sleep(0)
            await _settle()
        taken = (msg.headers or {})[exchange.H_HANDOFF]
        self._beats[int(msg.subject.split(".")[3].rpartition("-")[2])].taken[R1] = int(taken)
        protocol.connection_lost(None)
        await _settle()

    async def ask_with(self, counter: Bytecodes, key: str) -> bytes:
        """One request with a key that is not taken: the status line of its answer."""
        protocol, wire = self._server(), Wire()
        protocol.connection_made(wire)
        with counter:
            protocol.data_received(_request(stream=False, key=key))
            async with asyncio.timeout(WAIT_S):
                while not wire.written:
                    await asyncio.sleep(0)
            await _settle()
        protocol.connection_lost(None)
        await _settle()
        return wire.written.partition(b"\r\n")[0]

    async def _answer(self, msg: Msg, chunks: int) -> None:
        name = msg.subject.split(".")[3]
        kind = "text/event-stream" if chunks else "application/json"
        data = [*([CHUNK] * chunks), DONE] if chunks else [PLAIN]
        frames = [
            (Frame.HEAD, encode(exchange.Head(200, kind, US, name))),
            *((Frame.DATA, each) for each in data),
            (Frame.END, encode(exchange.End("done", "", 1000, 500, len(data), 0.02))),
        ]
        assert self._fleet is not None
        for number, (frame, payload) in enumerate(frames):
            before = self._heard
            await self._fleet.publish(msg.reply, pack_frame(frame, number, payload))
            while self._heard == before:  # each is heard alone: the count must not hang on luck
                await asyncio.sleep(0)
            await _settle()


async def _settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def _request(*, stream: bool, key: str) -> bytes:
    messages = [{"role": "user", "content": PROMPT}]
    body = orjson.dumps({"model": MODEL, "stream": stream, "messages": messages})
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: mesh\r\ncontent-type: application/json\r\n"
    if key:
        head += f"authorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def count_edge(url: str, files: tuple[str, ...] = OURS) -> Figures:
    """Bytecodes of a heartbeat, plain requests and a stream, through a router on that bus."""
    streams = {"a plain request": 0, f"a stream of {CHUNKS} chunks": CHUNKS}
    figures = await _count_requests(url, files, {}, streams)
    limited = await _count_requests(url, files, LIMITED, {"a request of a key with limits": 0})
    return limited | figures


async def _count_requests(
    url: str, files: tuple[str, ...], tenants: dict[str, TenantTable], acts: dict[str, int]
) -> Figures:
    edge = Edge(url, tenants)
    await edge.open(url)
    try:
        figures = {}
        for name, chunks in acts.items():
            for _ in range(WARM):
                await edge.ask(Bytecodes(files), chunks)
            edge.log.pass_on()
            counter = Bytecodes(files)
            for _ in range(COUNTED):
                await edge.ask(counter, chunks)
            with counter:
                edge.log.pass_on()
            figures[name] = counter.count / COUNTED
        with Bytecodes(files) as counter:
            beats = sum(edge.hear_beats() for _ in range(COUNTED))
        figures["a heartbeat"] = counter.count / beats
    finally:
        await edge.close()
    return figures


def count_decisions() -> Figures:
    """Bytecodes of a decision among many replicas, by the default policy."""
    dice, settings = Random(1), RouterSettings()
    policy = make_policy(settings.policy, settings, Random(2))
    core = RouterCore(RouterState(
        region=US, router=R1, epoch=1, settings=settings, dice=Random(3),
        makers={settings.policy: lambda settings, dice: policy},
    ))  # fmt: skip
    for number in range(DECISION_REPLICAS):
        core.handle(ev.HeartbeatSeen(decide.heartbeat(number, dice)), decide.NOW)
    seen = decide.filled(policy, DECISION_REPLICAS, DECISION_BLOCKS, dice)
    deciding: Callable[[Any], object] = decide.deciding(core)
    leaving: Callable[[Any], object] = decide.leaving(core)
    counter = Bytecodes()
    for asked in decide.asks(seen, COUNTED, dice):
        with counter:
            deciding(asked)
            core.finish()
        leaving(asked)
    return {f"a decision among {DECISION_REPLICAS}": counter.count / COUNTED}


def python_version() -> str:
    """The minor version that compiles here."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
