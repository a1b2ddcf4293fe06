"""A live router warms what its clients share: cut, marked, and counted with no client's request."""

import asyncio
from itertools import count

import orjson
import pytest

from infra.bus import BusAddress, connect
from mesh.adapters.kept_prefixes import KeptPrefixes
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import BLOCK_BYTES
from mesh.session.client_request import ClientRequest
from mesh.session.session import Session
from schemas import exchange, state, subjects, wire
from schemas.exchange import Frame, pack_frame
from schemas.http import COMPLETIONS
from schemas.state import Heartbeat, ReplicaState
from tests.mesh.core.build import request
from tests.support.flushed import flushed
from tests.support.small_mesh import chat, post, small_mesh

pytestmark = pytest.mark.timeout(120)
SYSTEM = "You are the product. " * 200
REPLICAS = ("us-0", "us-1")
INBOX = subjects.inbox("us", "test", "replicas")


class Replicas:
    """Two replicas as the bus knows them: they beat, take work, and answer it at once."""

    def __init__(self, bus):
        self._bus = bus
        self._taken = 0
        self._seq = 0
        self.work = []

    async def open(self):
        for name in REPLICAS:
            await self._bus.subscribe(subjects.work("us", name), cb=self._on_work)
        await flushed(self._bus)

    async def beat(self):
        while True:
            self._seq += 1
            for name in REPLICAS:
                beat = Heartbeat(
                    region="us", replica=name, epoch=1, seq=self._seq, state=ReplicaState.READY,
                    engine="vllm", models=("tiny",), full=False, pending=0, running=0,
                    outstanding=0, outstanding_max=64, kv_used_ratio=0.0,
                    kv_capacity_tokens=100_000, prefill_queued_tokens=0,
                    prefill_s_per_token=0.0001, taken={"r1": self._taken},
                )  # fmt: skip
                await self._bus.publish(subjects.heartbeat("us", name), state.encode_state(beat))
            await asyncio.sleep(0.05)

    async def _on_work(self, msg):
        self._taken = max(self._taken, int(msg.headers[exchange.H_HANDOFF]))
        name = msg.subject.split(".")[3]
        self.work.append((name, dict(msg.headers), orjson.loads(msg.data)))
        frames = [
            (Frame.HEAD, wire.encode(exchange.Head(200, "application/json", "us", name))),
            (Frame.DATA, b"{}"),
            (Frame.END, wire.encode(exchange.End("done", "", 1000, 0, 1, 0.01))),
        ]
        for number, (kind, payload) in enumerate(frames):
            await self._bus.publish(msg.reply, pack_frame(kind, number, payload))


async def test_a_body_that_cannot_be_cut_is_not_kept_and_its_request_goes_on(caplog):
    """A body that no ingress lets in stands for whatever a reader of bodies may stumble over."""
    asked, fed = ClientRequest(request=request(1), path=COMPLETIONS, body=b"{"), []

    def decide(event, now):
        fed.append(event)
        return [fx.KeepPrefix(1, 7, 2)] if isinstance(event, ev.RequestArrived) else []

    session = Session(
        "us",
        "r1",
        decide=decide,
        clock=lambda: 0.0,
        bus=None,
        prefixes=KeptPrefixes(),
        secret=str,
        keys=count(1),
    )
    session.admit(asked)
    assert fed == [ev.RequestArrived(asked.request), ev.PrefixKept(7, None)]
    assert "request request-1 can't be cut to be kept" in caplog.text


async def test_what_clients_share_is_computed_on_the_other_replica(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", policy="mesh", warm_idle_share=1.0, warm_trend_s=4.0)
        bus = await connect(
            BusAddress(nats_server.url),
            name="replicas",
            inbox_prefix=INBOX,
        )
        mesh.stack.push_async_callback(bus.close)
        replicas = Replicas(bus)
        await replicas.open()
        beats = asyncio.create_task(replicas.beat())
        try:
            await mesh.until_ready("us", 2)
            warming = mesh.routers["us"].core.warming
            for number in range(200):
                body = chat(f"{SYSTEM}{number:04}" + "why? " * 60, cache_salt="acme")
                status, _, _ = await post(mesh, body)
                assert status == 200
                if warming.counts.ended:
                    break
            await mesh.until(lambda: warming.counts.ended > 0, "a warm-up")
        finally:
            beats.cancel()
        [(_, headers, warmed), *_] = [one for one in replicas.work if exchange.H_WARM in one[1]]
        asked = [one for one in replicas.work if exchange.H_WARM not in one[1]]
        text = warmed["messages"][0]["content"]
        assert (SYSTEM + "0000").startswith(text[: len(SYSTEM)])
        assert len("\0user\0" + text) % BLOCK_BYTES == 0
        assert (warmed["max_tokens"], warmed["stream"], warmed["cache_salt"]) == (1, False, "acme")
        assert headers[exchange.H_PRIORITY] == "low"
        assert mesh.sample("us", "mesh_requests_total", outcome="ok") == len(asked)
        assert mesh.sample("us", "mesh_placements_total", placement="local") == len(asked)
        assert mesh.sample("us", "mesh_warm_ups_total", outcome="ended") >= 1
        assert mesh.sample("us", "mesh_kept_prefix_bytes") > 4000
