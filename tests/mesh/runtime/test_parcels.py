"""A router hears frames of several answers in one message; damage harms no more than it must.

The replica is played by the test.
"""

import asyncio

import pytest

from infra.bus import BusAddress, connect
from infra.process import end_all
from schemas import exchange, state, subjects, wire
from schemas.exchange import Frame, pack_frame
from schemas.parcels import PARCEL, pack_parcels
from schemas.state import Heartbeat, ReplicaState
from tests.support.flushed import flushed
from tests.support.small_mesh import PATIENT, chat, post, small_mesh

pytestmark = pytest.mark.timeout(90)
EVENT = b'data: {"choices": []}\n\n'


class Replica:
    """us-0 as the bus knows it: it beats, and keeps the work that it is given."""

    def __init__(self, bus):
        self._bus = bus
        self._taken = 0
        self.inboxes = asyncio.Queue()
        self.credits = asyncio.Queue()
        self.offsets = []

    async def open(self):
        await self._bus.subscribe(subjects.work("us", "us-0"), cb=self._on_work)
        await self._bus.subscribe(subjects.credit("us", "us-0"), cb=self._on_credit)
        await self._bus.subscribe(subjects.body("us", "us-0"), cb=self._on_body)
        await flushed(self._bus)

    async def beat(self):
        for seq in range(1, 100_000):
            beat = Heartbeat(
                region="us", replica="us-0", epoch=1, seq=seq, state=ReplicaState.READY,
                engine="vllm", models=("tiny",), full=False, pending=0, running=0,
                outstanding=0, outstanding_max=64, kv_used_ratio=0.0,
                kv_capacity_tokens=100_000, prefill_queued_tokens=0,
                prefill_s_per_token=0.0001, taken={"r1": self._taken},
            )  # fmt: skip
            await self._bus.publish(subjects.heartbeat("us", "us-0"), state.encode_state(beat))
            await asyncio.sleep(0.05)

    async def _on_work(self, msg):
        self._taken = max(self._taken, int(msg.headers[exchange.H_HANDOFF]))
        await self.inboxes.put(msg.reply)

    async def _on_body(self, msg):
        self.offsets.append(msg.headers[exchange.H_BODY_OFFSET])

    async def _on_credit(self, msg):
        await self.credits.put(wire.decode_as(exchange.Credit, msg.data))

    async def say(self, *posts, cut=0):
        """Frames of answers as one message, its last bytes cut off."""
        [parcel] = pack_parcels([(inbox.rpartition(".")[2], frame) for inbox, frame in posts])
        whole = len(parcel) - cut
        await self._bus.publish(subjects.inbox("us", "r1", PARCEL), parcel[:whole])


def answer(inbox, text=EVENT, first=0):
    """All frames of a short stream; `first`: the number of the first."""
    kinds = [
        (Frame.HEAD, wire.encode(exchange.Head(200, "text/event-stream", "us", "us-0"))),
        (Frame.DATA, text),
        (Frame.END, wire.encode(exchange.End("done", "", 10, 0, 1, 0.01))),
    ]
    numbered = enumerate(kinds, first)
    return [(inbox, pack_frame(kind, number, data)) for number, (kind, data) in numbered]


def mixed(one, other):
    """Frames of two answers in turns."""
    return [post for pair in zip(one, other, strict=True) for post in pair]


@pytest.fixture
async def mesh(nats_server):
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", failures_max=1, **PATIENT)
        bus = await connect(BusAddress(nats_server.url), name="us-0", inbox_prefix="_INBOX.us.g")
        mesh.replica = Replica(bus)
        await mesh.replica.open()
        beats = asyncio.create_task(mesh.replica.beat())
        try:
            await mesh.until_ready("us", 1)
            yield mesh
        finally:
            await end_all([beats])
            await bus.close()


async def asked(mesh):
    """Two requests under way, and the inboxes of their answers."""
    clients = [asyncio.create_task(post(mesh, chat(stream=True))) for _ in range(2)]
    inboxes = [await asyncio.wait_for(mesh.replica.inboxes.get(), 20) for _ in clients]
    return clients, inboxes


async def behind_all(mesh):
    """Wait until the replica has all that the router said to it.

    A client's answer may overtake that; the router's next work comes behind it.
    """
    client = asyncio.create_task(post(mesh, chat(stream=True)))
    inbox = await asyncio.wait_for(mesh.replica.inboxes.get(), 20)
    await mesh.replica.say(*answer(inbox))
    assert (await client)[:2] == (200, EVENT)
    await flushed(mesh.replica._bus)


async def told(clients):
    """Status and body of each answer, as many as there are of a kind."""
    return sorted((status, body) for status, body, _ in await asyncio.gather(*clients))


async def test_answers_in_one_message_reach_their_own_clients(mesh):
    clients, (one, other) = await asked(mesh)
    await mesh.replica.say(*mixed(answer(one, b"data: 1\n\n"), answer(other, b"data: 2\n\n")))
    assert await told(clients) == [(200, b"data: 1\n\n"), (200, b"data: 2\n\n")]


async def test_a_frame_that_can_not_be_read_fails_its_own_answer(mesh):
    clients, (one, other) = await asked(mesh)
    head, _, *_ = answer(other)
    bad = [head, (other, b"?0000"), (other, b"?0000")]
    await mesh.replica.say(*mixed(answer(one), bad))
    (status, body), (failed, _) = await told(clients)
    assert (status, body, failed) == (200, EVENT, 502)


async def test_what_a_cut_parcel_lost_is_asked_for_by_its_number(mesh):
    clients, (one, other) = await asked(mesh)
    first, *rest = answer(other)
    await mesh.replica.say(*answer(one), first, rest[0], cut=1)
    await mesh.replica.say(rest[1])
    for _ in range(2):  # the asking may be lost as well
        credit = await asyncio.wait_for(mesh.replica.credits.get(), 20)
        assert credit == exchange.Credit(other, 0, missing_from=1)
    await mesh.replica.say(*rest)
    assert await told(clients) == [(200, EVENT), (200, EVENT)]
    answers = mesh.routers["us"].requests.session.answers
    await mesh.until(lambda: answers.missing == 0, "no hole is left")


async def test_what_is_lost_for_good_fails_its_own_answer(mesh):
    clients, (one, other) = await asked(mesh)
    first, *rest = answer(other)
    await mesh.replica.say(*answer(one), first, rest[1])
    (status, body), (failed, said) = await told(clients)
    assert (status, body, failed) == (200, EVENT, 502)
    assert b"frame 1 of the answer was lost" in said
    await behind_all(mesh)
    assert mesh.replica.credits.qsize() == 3


async def test_a_body_that_is_wanted_again_is_sent_once(mesh):
    """An agent that says again what it said last still has the parts that came."""
    client = asyncio.create_task(post(mesh, chat("x" * 3 * 1024 * 1024, stream=True)))
    inbox = await asyncio.wait_for(mesh.replica.inboxes.get(), 20)
    wanted = wire.encode(exchange.BodyWanted("us", "us-0"))
    for _ in range(2):
        await mesh.replica.say((inbox, pack_frame(Frame.BODY_WANTED, 0, wanted)))
    await mesh.replica.say(*answer(inbox, first=1))
    assert (await client)[:2] == (200, EVENT)
    await behind_all(mesh)
    offsets = mesh.replica.offsets
    assert len(offsets) > 1
    assert len(set(offsets)) == len(offsets)


async def test_after_a_loss_of_its_bus_a_router_asks_for_the_rest(mesh):
    clients, (one, other) = await asked(mesh)
    (_, head), (_, data), (_, end) = answer(one)
    await mesh.replica.say((one, head), (one, data))
    begun = "mesh_request_ttft_seconds_count"
    await mesh.until(lambda: mesh.sample("us", begun, served="local") == 1, "it to begin")
    mesh.routers["us"]._bus_is_back()  # as after a connection that broke and was made again
    credit = await asyncio.wait_for(mesh.replica.credits.get(), 20)
    assert credit == exchange.Credit(one, 0, missing_from=2)
    await mesh.replica.say((one, end))
    again = await asyncio.wait_for(mesh.replica.inboxes.get(), 20)
    assert again != other, "what had not begun is placed anew"
    await mesh.replica.say(*answer(again))
    assert await told(clients) == [(200, EVENT), (200, EVENT)]


async def test_a_parcel_for_nobody_and_bytes_that_are_none_change_nothing(mesh):
    clients, (one, other) = await asked(mesh)
    await mesh.replica.say(*answer(subjects.inbox("us", "r1", "nobody")))
    await mesh.replica._bus.publish(subjects.inbox("us", "r1", PARCEL), b"\xff" * 7)
    await mesh.replica.say(*answer(one), *answer(other))
    assert await told(clients) == [(200, EVENT)] * 2


async def test_what_a_refusal_names_makes_no_new_series(mesh):
    task = asyncio.create_task(post(mesh, chat()))
    inbox = await asyncio.wait_for(mesh.replica.inboxes.get(), 20)
    invented = wire.encode(exchange.Refused("invented", "ap", "g9", -1, -1))
    await mesh.replica.say((inbox, pack_frame(Frame.REFUSED, 0, invented)))
    await mesh.until(
        lambda: mesh.sample("us", "mesh_refusals_total", reason="other") == 1.0, "the refusal"
    )
    assert mesh.sample("us", "mesh_forwards_total", peer="other", result="refused") == 1.0
    assert mesh.sample("us", "mesh_refusals_total", reason="invented") == 0.0
    await end_all([task])
