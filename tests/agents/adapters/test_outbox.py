"""Frames on their way out: in order, together where they come together, and nothing kept."""

import asyncio

import nats.errors
import pytest

from agents.adapters.outbox import GATHER_S, HEARD_MAX, MISSED_MAX, BusConnection, Outbox
from infra.process import end_all
from schemas.exchange import Frame, pack_frame, unpack_frame
from schemas.parcels import PARCEL, parcelled, unpack_parcel
from tests.support.until import PATIENCE_S, until


class Bus:
    """Takes messages, or refuses them."""

    def __init__(self) -> None:
        self.received: list[tuple[str, bytes]] = []
        self.away = False
        self.link = BusConnection()
        self._telling = asyncio.create_task(self.link.report(self._hear))

    async def back(self) -> None:
        """The bus is there again."""
        self.link.returned()
        async with asyncio.timeout(PATIENCE_S):
            await self.link.is_up.wait()

    async def close(self) -> None:
        await end_all([self._telling])

    async def _hear(self, event) -> None:
        """A core that does nothing about it."""

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.away:
            raise nats.errors.OutboundBufferLimitError
        self.received.append((subject, payload))

    @property
    def subjects(self) -> list[str]:
        return [subject for subject, _ in self.received]

    def frames(self) -> list[tuple[str, str]]:
        """Every frame with its inbox, in order."""
        found = []
        for subject, payload in self.received:
            router, _, last = subject.rpartition(".")
            if last != PARCEL:
                found.append((subject, text(payload)))
            else:
                posts = unpack_parcel(payload)
                found += [(f"{router}.{stream}", text(frame)) for stream, frame in posts]
        return found


def text(frame: bytes) -> str:
    return bytes(unpack_frame(frame).payload).decode()


def said(bus) -> list[str]:
    return [words for _, words in bus.frames()]


@pytest.fixture
async def bus():
    bus = Bus()
    yield bus
    await bus.close()


@pytest.fixture
async def outbox(bus):
    outbox = Outbox(bus.publish, bus.link)
    running = asyncio.create_task(outbox.run())
    yield outbox
    await end_all([running])


async def sent(outbox):
    async with asyncio.timeout(PATIENCE_S):
        await outbox.sent()


def post(outbox, *streams, router="us.r1", urgent=False, reads_parcels=True):
    for stream in streams:
        name = parcelled(stream) if reads_parcels else stream
        frame = pack_frame(Frame.DATA, 0, stream.encode())
        outbox.sender(f"_INBOX.{router}.{name}")(frame, urgent)


async def test_a_frame_alone_goes_to_its_own_inbox(outbox, bus):
    post(outbox, "1-1")
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.p-1-1"]
    assert bus.frames() == [("_INBOX.us.r1.p-1-1", "1-1")]


async def test_a_router_that_reads_no_parcels_gets_frames(outbox, bus):
    post(outbox, "1-1", "2-1", reads_parcels=False)
    post(outbox, "3-1", "4-1")
    post(outbox, "1-1", reads_parcels=False)
    await sent(outbox)
    alone = [f"_INBOX.us.r1.{stream}" for stream in ("1-1", "2-1", "1-1")]
    assert bus.subjects == ["_INBOX.us.r1.parcel", *alone]


async def test_frames_of_one_moment_go_as_one_message_for_each_router(outbox, bus):
    post(outbox, "1-1", "2-1", "1-1")
    post(outbox, "7-1", router="us.r2")
    post(outbox, "8-1", "9-1", router="eu.r1")
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.parcel", "_INBOX.us.r2.p-7-1", "_INBOX.eu.r1.parcel"]
    assert said(bus) == ["1-1", "2-1", "1-1", "7-1", "8-1", "9-1"]


async def test_a_burst_waits_for_all_of_it_and_goes_out_in_one_message(outbox, bus, monkeypatch):
    monkeypatch.setattr("agents.adapters.outbox.GATHER_S", 3600.0)
    for number in range(30):
        post(outbox, f"{number}-1")
        await asyncio.sleep(0)
    assert bus.received == []
    post(outbox, "30-1", urgent=True)
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.parcel"]
    assert said(bus) == [f"{n}-1" for n in range(31)]


async def test_a_burst_does_not_wait_for_company_for_long(outbox, bus):
    began = asyncio.get_running_loop().time()
    post(outbox, "1-1", "2-1")
    await sent(outbox)
    assert asyncio.get_running_loop().time() - began >= GATHER_S
    assert said(bus) == ["1-1", "2-1"]


async def test_urgent_frames_take_along_what_waits(outbox, bus):
    post(outbox, "1-1")
    await sent(outbox)
    post(outbox, "2-1")
    post(outbox, "3-1", urgent=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bus.subjects[1:] == ["_INBOX.us.r1.parcel"]
    assert said(bus) == ["1-1", "2-1", "3-1"]


async def test_frames_that_wait_for_the_bus_go_with_their_routers_keepalive(outbox, bus):
    bus.link.lost()
    post(outbox, "1-1", "2-1")
    post(outbox, "3-1", urgent=True)
    post(outbox, "7-1", router="eu.r1", urgent=True)
    for _ in range(10):
        await asyncio.sleep(0)
    assert bus.received == []
    await bus.back()
    outbox.resync("_INBOX.eu.r1")
    await until_said(bus, "7-1")
    assert said(bus) == ["7-1"], "the others' router may not be back yet"
    outbox.resync("_INBOX.us.r1")
    post(outbox, "8-1", router="eu.r1", urgent=True)
    await until_said(bus, "8-1")
    assert said(bus) == ["7-1", "1-1", "2-1", "3-1", "8-1"]


async def test_a_router_that_requests_frames_is_there(outbox, bus, monkeypatch):
    monkeypatch.setattr("agents.adapters.outbox.SILENCE_ABROAD_S", 1000.0)
    send(outbox, "1-1", 0)
    await until_said(bus, "1-1#0")
    bus.link.lost()
    send(outbox, "1-1", 1)
    await bus.back()
    outbox.retransmit(f"_INBOX.us.r1.{parcelled('1-1')}", 0)
    await until(lambda: said(bus) == ["1-1#0", "1-1#0", "1-1#1"])


async def test_made_up_names_of_routers_that_request_frames_take_little_room(outbox, bus):
    bus.link.lost()
    await bus.back()
    for number in range(HEARD_MAX + 9):
        outbox.retransmit(f"_INBOX.us.r{number}.1", 0)
    assert len(outbox._alive) == HEARD_MAX


async def test_a_router_without_a_keepalive_after_a_loss_is_waited_for_no_longer(
    outbox, bus, monkeypatch
):
    monkeypatch.setattr("agents.adapters.outbox.SILENCE_ABROAD_S", 0.01)
    bus.link.lost()
    post(outbox, "1-1", urgent=True)
    await bus.back()
    await until_said(bus, "1-1")


async def test_each_loss_begins_the_waiting_anew(outbox, bus):
    for stream in ("1-1", "2-1"):
        bus.link.lost()
        await bus.back()
        post(outbox, stream, urgent=True)
        for _ in range(10):
            await asyncio.sleep(0)
        assert stream not in said(bus)
        outbox.resync("_INBOX.us.r1")
        await until_said(bus, stream)


async def test_who_has_nothing_to_wait_for_can_leave(outbox, bus):
    bus.link.lost()
    post(outbox, "1-1", urgent=True)
    await bus.back()
    await sent(outbox)
    assert said(bus) == [], "its router is not there"
    outbox.resync("_INBOX.us.r1")
    await sent(outbox)
    assert said(bus) == ["1-1"]


def send(outbox, stream, number, kind=Frame.DATA, router="us.r1"):
    frame = pack_frame(kind, number, f"{stream}#{number}".encode())
    outbox.sender(f"_INBOX.{router}.{parcelled(stream)}")(frame, True)


async def until_said(bus, words):
    await until(lambda: words in said(bus))


async def test_what_a_router_misses_is_sent_again_before_all_that_came_since(outbox, bus):
    for number in range(4):
        send(outbox, "1-1", number)
        send(outbox, "2-1", number)
        await sent(outbox)
    bus.received.clear()
    inbox = f"_INBOX.us.r1.{parcelled('1-1')}"
    outbox.retransmit(inbox, 3)
    outbox.retransmit(inbox, 1)  # the later word counts
    await until(lambda: outbox._repeating is None)
    send(outbox, "1-1", 4)
    await until_said(bus, "1-1#4")
    assert said(bus) == ["1-1#1", "1-1#2", "1-1#3", "1-1#4"]


async def test_what_is_sent_again_is_kept_as_it_was(outbox, bus):
    send(outbox, "1-1", 0, Frame.END)
    await sent(outbox)
    kept = outbox._sent.kept_bytes
    for _ in range(3):
        outbox.resync("_INBOX.us.r1")
        await sent(outbox)
    assert said(bus) == ["1-1#0"] * 4
    assert outbox._sent.kept_bytes == kept


async def test_a_request_for_frames_that_are_kept_no_more_gets_none(
    outbox, bus, monkeypatch, caplog
):
    monkeypatch.setattr("agents.adapters.outbox.KEPT_BYTES_MAX", 20)
    for number in range(3):
        send(outbox, "1-1", number)
        await sent(outbox)
    bus.received.clear()
    outbox.retransmit(f"_INBOX.us.r1.{parcelled('1-1')}", 0)
    outbox.retransmit(f"_INBOX.us.r1.{parcelled('9-1')}", 0)
    outbox.retransmit("no inbox", 0)
    await until(lambda: outbox._repeating is None)
    assert said(bus) == []
    assert "_INBOX.us.r1 misses frames of 1 answers" in caplog.text


async def test_only_so_many_are_looked_for_at_once(outbox, bus):
    for number in range(MISSED_MAX + 10):
        outbox.retransmit(f"_INBOX.us.r1.{number}", 0)
    assert len(outbox._missed) == MISSED_MAX


async def test_a_bus_that_is_away_loses_frames_and_no_more(outbox, bus, caplog):
    bus.away = True
    post(outbox, "1-1", "2-1")
    await sent(outbox)
    assert "_INBOX.us.r1.parcel: frames may be lost: OutboundBufferLimitError" in caplog.text
    bus.away = False
    post(outbox, "3-1")
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.p-3-1"]


async def test_whatever_a_socket_raises_the_next_frames_go(outbox, bus):
    async def reset(subject, payload):
        outbox._publish = bus.publish
        raise ConnectionResetError

    outbox._publish = reset
    post(outbox, "1-1", urgent=True)
    await sent(outbox)
    post(outbox, "2-1", urgent=True)
    await sent(outbox)
    assert bus.frames() == [("_INBOX.us.r1.p-2-1", "2-1")]


async def test_any_mix_comes_out_in_order(outbox, bus):
    expected = {}
    for number in range(400):
        inbox = f"_INBOX.us.r{number % 3}.{parcelled(str(number % 7))}"
        expected.setdefault(inbox, []).append(str(number))
        frame = pack_frame(Frame.DATA, 0, str(number).encode())
        outbox.sender(inbox)(frame, number % 11 == 0)
        if number % 5 == 0:
            await asyncio.sleep(0)
    await sent(outbox)
    found = {}
    for inbox, words in bus.frames():
        found.setdefault(inbox, []).append(words)
    assert found == expected
