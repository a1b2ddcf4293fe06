"""Any number of replicas as one process on the bus: heartbeats in time, answers at once.

    python -m tests.programs.live.load.fleet --nats-url nats://127.0.0.1:4222 --replicas 1000

The engines and agents of a benchmark that is about the router. Heartbeats are written to a
connection of their own without a client library, spread evenly over their interval, and count
what was handed over as an agent's would. A request is answered with HEAD, as many DATA frames as
its `max_tokens` if it wants a stream, one if not, and END. At SIGTERM it prints what it has sent.
"""

import asyncio
import re
import signal
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import click
import orjson
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from infra import bus
from infra.bus import BusAddress
from schemas import exchange, subjects
from schemas.exchange import Frame, pack_frame
from schemas.ids import RegionId, ReplicaId
from schemas.wire import encode

REGION, MODEL = RegionId("us"), "tiny"
SLICES_PER_S = 100  # heartbeats leave in as many writes
CHUNK = b'data: {"object":"chat.completion.chunk","choices":[{"delta":{"content":"la"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PLAIN = b'{"object":"chat.completion","choices":[{"message":{"content":"la"}}]}'
MAX_TOKENS = re.compile(rb'"max_tokens": ?([0-9]{1,4})')


@dataclass(slots=True)
class Replica:
    """One replica's heartbeat, changed in place."""

    name: ReplicaId
    prefix: bytes
    beat: dict[str, object]
    taken: dict[str, int] = field(default_factory=dict)
    seq: int = 0
    answered: int = 0

    def line(self) -> bytes:
        """The next heartbeat, as the bus wants it published."""
        self.seq += 1
        self.beat.update(seq=self.seq, served_total=self.answered, taken=self.taken)
        body = orjson.dumps(self.beat)
        return b"%b%d\r\n%b\r\n" % (self.prefix, len(body), body)


def replica(number: int) -> Replica:
    """Ready and idle, with memory for 31,250 blocks, as an engine reports it."""
    name = ReplicaId(f"us-{number}")
    beat: dict[str, object] = {
        "v": 1, "region": REGION, "replica": name, "epoch": 1, "seq": 0, "state": "ready",
        "engine": "vllm", "models": [MODEL], "full": False, "pending": 0, "running": 0,
        "outstanding": 0, "outstanding_max": 512, "prefill_queued_tokens": 0, "batch_max": 256,
        "batch_occupancy": 0.0, "kv_used_ratio": 0.1, "kv_capacity_tokens": 2_000_000,
        "prefill_s_per_token": 1e-4, "prefill_base_s": 0.02, "decode_tokens_per_s": 40.0,
        "prefix_hit_ratio": 0.5, "engine_age_s": 0.05, "served_total": 0, "refused_total": 0,
        "taken": {}, "residency": None, "owner": None, "owner_taken": {}, "term": 0,
    }  # fmt: skip
    return Replica(name, f"PUB {subjects.heartbeat(REGION, name)} ".encode(), beat)


class Fleet:
    """All replicas, and the bus that they publish on."""

    def __init__(self, client: Client, replicas: int) -> None:
        self._client = client
        self._replicas = {each.name: each for each in map(replica, range(replicas))}

    async def listen(self) -> None:
        """Take the work of all of them."""
        await self._client.subscribe(subjects.work(REGION, subjects.ANY), cb=self._answer)
        await self._client.flush()

    async def beat(self, url: str, each_per_s: float) -> None:
        """Publish heartbeats for ever."""
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(b'CONNECT {"verbose":false,"pedantic":false,"name":"fleet"}\r\n')
        hearing = asyncio.create_task(_answer_pings(reader, writer))
        loop, ring, sent = asyncio.get_running_loop(), list(self._replicas.values()), 0
        began = loop.time()
        try:
            while True:
                due = int((loop.time() - began) * each_per_s * len(ring))
                writer.write(b"".join(ring[n % len(ring)].line() for n in range(sent, due)))
                sent = due
                await writer.drain()
                await asyncio.sleep(1 / SLICES_PER_S)
        finally:
            hearing.cancel()

    async def _answer(self, msg: Msg) -> None:
        name = msg.subject.split(".")[3]
        headers = msg.headers or {}
        one = self._replicas[ReplicaId(name)]
        one.taken[headers[exchange.H_FROM]] = int(headers[exchange.H_HANDOFF])
        one.answered += 1
        is_stream = b'"stream":true' in msg.data
        found = MAX_TOKENS.search(msg.data)
        chunks = [CHUNK] * int(found[1]) + [DONE] if is_stream and found else [PLAIN]
        kind = "text/event-stream" if is_stream else "application/json"
        publish = self._client.publish
        await publish(
            msg.reply, pack_frame(Frame.HEAD, 0, encode(exchange.Head(200, kind, REGION, name)))
        )
        for number, chunk in enumerate(chunks, 1):
            await publish(msg.reply, pack_frame(Frame.DATA, number, chunk))
        end = exchange.End("done", "", 1000, 500, len(chunks), 0.001)
        await publish(msg.reply, pack_frame(Frame.END, len(chunks) + 1, encode(end)))

    def sent(self) -> dict[str, int]:
        """What was sent in all."""
        return {
            "beats": sum(each.seq for each in self._replicas.values()),
            "answers": sum(each.answered for each in self._replicas.values()),
        }


async def _answer_pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        if line.startswith(b"PING"):
            writer.write(b"PONG\r\n")


async def _run(url: str, replicas: int, each_per_s: float) -> None:
    client = await bus.connect(BusAddress(url), name="fleet", inbox_prefix=subjects.INBOX_ROOT)
    fleet = Fleet(client, replicas)
    await fleet.listen()
    beating = asyncio.create_task(fleet.beat(url, each_per_s))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    click.echo("ready")
    ended = asyncio.create_task(stop.wait())
    await asyncio.wait((beating, ended), return_when=asyncio.FIRST_COMPLETED)
    if beating.done():
        beating.result()
    beating.cancel()
    click.echo(orjson.dumps(fleet.sent()))
    await client.close()


@click.command()
@click.option("--nats-url", required=True)
@click.option("--replicas", type=click.IntRange(1), required=True)
@click.option("--each-per-s", type=click.FloatRange(0, min_open=True), default=10.0)
def main(nats_url: str, replicas: int, each_per_s: float) -> None:
    """Be a fleet until SIGTERM."""
    uvloop.run(_run(nats_url, replicas, each_per_s))


if __name__ == "__main__":
    main()
