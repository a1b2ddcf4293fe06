"""What a request costs an agent, in bytecodes: the other half of `bytecodes`.

A real agent on a real bus beside a scripted engine on a real socket; each chunk is sent when the
frame of the one before was heard, so that no burst depends on luck. Its clock stands still, and so
do heartbeats. What its asker spends on reading frames is counted as well.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from nats.aio.msg import Msg

from agents.adapters.bus import AgentBus
from agents.adapters.engine import EngineClient
from agents.adapters.engine_kinds import KINDS
from agents.adapters.outbox import BusConnection
from agents.config import AgentConfig
from agents.core.agent import AgentCore
from agents.core.events import EngineReading, EngineScraped
from agents.core.replica_config import ReplicaConfig
from agents.runtime.agent import Agent
from infra import bus
from infra.bus import BusAddress
from infra.process import end_all
from schemas import exchange, subjects
from schemas.exchange import Frame, unpack_frame
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.parcels import PARCEL, parcelled, unpack_parcel
from tests.agents.scripted_engine import CHUNKED, LAST_CHUNK, Conversation, chunk, plain, running
from tests.gate.bytecodes import CHUNKS, COUNTED, OURS, ROOT, WAIT_S, WARM, Bytecodes, Figures
from tests.programs.live.load.fleet import CHUNK, DONE, MODEL, PLAIN

US, G0, R1 = RegionId("us"), ReplicaId("us-0"), RouterId("r1")
FILES = (*OURS, str(ROOT / "agents"))
NOW = 1_000.0
HEADERS = {
    exchange.H_MODEL: subjects.encode_model(MODEL),
    exchange.H_PATH: "/v1/chat/completions",
    exchange.H_ATTEMPT: "1",
    exchange.H_DEADLINE_MS: "60000",
    exchange.H_FROM: R1,
    exchange.H_PREFILL_TOKENS: "500",
}


class Asker:
    """A router as an agent sees it, and the engine's script, which waits for it."""

    def __init__(self) -> None:
        self.chunks = 0
        self._heard, self._ended = asyncio.Event(), asyncio.Event()
        self._asked = 0

    async def script(self, talk: Conversation) -> None:
        """What the engine does with a request."""
        if not self.chunks:
            await talk.send(plain(200, PLAIN))
            return
        data = [*([CHUNK] * self.chunks), DONE]
        await talk.send(CHUNKED)
        for each in data:
            self._heard.clear()
            await talk.send(chunk(each))
            await self._heard.wait()
        await talk.send(LAST_CHUNK)

    async def hear(self, msg: Msg) -> None:
        """Frames, alone or together."""
        alone = not msg.subject.endswith(PARCEL)
        for frame in [msg.data] if alone else [frame for _, frame in unpack_parcel(msg.data)]:
            kind = unpack_frame(frame).kind
            if kind is Frame.DATA:
                self._heard.set()
            elif kind is Frame.END:
                self._ended.set()

    async def ask(self, client: bus.Client, chunks: int) -> None:
        """One request, to the end of its answer."""
        self.chunks, self._asked = chunks, self._asked + 1
        self._ended.clear()
        inbox = subjects.inbox(US, R1, parcelled(f"{self._asked:x}"))
        told = {exchange.H_REQUEST: f"q-{self._asked}", exchange.H_HANDOFF: str(self._asked)}
        if chunks:
            told[exchange.H_ADD_USAGE] = "1"
        await client.publish(subjects.work(US, G0), b'{"x":1}', inbox, headers=HEADERS | told)
        async with asyncio.timeout(WAIT_S):
            await self._ended.wait()


@contextlib.asynccontextmanager
async def _serving(url: str, engine_url: str) -> AsyncIterator[None]:
    """An agent that takes work."""
    config = AgentConfig(
        region=US, replica=G0, engine_kind="vllm", engine_url=engine_url, nats_url=url
    )
    replica = ReplicaConfig(
        region=US, replica=G0, epoch=1, engine="vllm", outstanding_max=256, heartbeat_s=0.1
    )
    client = await bus.connect(BusAddress(url), name="agent", inbox_prefix="_INBOX")
    engine = EngineClient(
        api_url=engine_url, metrics_url=engine_url, kind=KINDS["vllm"], clock=lambda: NOW
    )
    ears = AgentBus(client, BusConnection(), US, G0)
    async with asyncio.TaskGroup() as tasks:
        agent = Agent(config, AgentCore(replica), ears, engine, lambda: NOW, tasks)
        await ears.listen(agent.feed, agent.credit)
        await agent.feed(EngineScraped(NOW, EngineReading(waiting=0, running=0), (MODEL,)))
        outbox = tasks.create_task(ears.outbox.run())
        try:
            yield
        finally:
            await end_all([outbox])
            engine.close()
            await client.close()


async def count_agent(url: str) -> Figures:
    """Bytecodes of a plain request and of a stream, through an agent on that bus."""
    asker, figures = Asker(), {}
    client = await bus.connect(BusAddress(url), name="asker", inbox_prefix="_INBOX")
    try:
        await client.subscribe(subjects.inbox(US, R1, subjects.ANY), cb=asker.hear)
        async with running(asker.script, MODEL) as engine, _serving(url, engine.url):
            for name, chunks in (("a plain answer", 0), (f"an answer of {CHUNKS} chunks", CHUNKS)):
                for _ in range(WARM):
                    await asker.ask(client, chunks)
                with Bytecodes(FILES) as counter:
                    for _ in range(COUNTED):
                        await asker.ask(client, chunks)
                figures[f"{name}, at the agent"] = counter.count / COUNTED
    finally:
        await client.close()
    return figures
