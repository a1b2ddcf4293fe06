"""Frames on their way out: in order, together where they come together, and nothing kept."""

import asyncio
import contextlib

import nats.errors
import pytest

from agents.adapters.outbox import GATHER_S, Outbox
from schemas.parcels import PARCEL, unpack_parcel

WAIT_S = 20.0


class Bus:
    """Takes messages, or refuses them."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.away = False

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.away:
            raise nats.errors.OutboundBufferLimitError
        self.heard.append((subject, payload))

    @property
    def subjects(self) -> list[str]:
        return [subject for subject, _ in self.heard]

    def frames(self) -> list[tuple[str, bytes]]:
        """Every frame with its inbox, in order."""
        found = []
        for subject, payload in self.heard:
            router, _, last = subject.rpartition(".")
            if last != PARCEL:
                found.append((subject, payload))
            else:
                posts = unpack_parcel(payload)
                found += [(f"{router}.{stream}", bytes(frame)) for stream, frame in posts]
        return found


@pytest.fixture
def bus():
    return Bus()


@pytest.fixture
async def outbox(bus):
    outbox = Outbox(bus.publish)
    running = asyncio.create_task(outbox.run())
    yield outbox
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def sent(outbox):
    async with asyncio.timeout(WAIT_S):
        await outbox.sent()


def post(outbox, *streams, router="us.r1", urgent=False):
    for stream in streams:
        outbox.post(f"_INBOX.{router}.{stream}", stream.encode(), urgent=urgent)


async def test_a_frame_alone_goes_to_its_own_inbox(outbox, bus):
    post(outbox, "1-1")
    await sent(outbox)
    assert bus.heard == [("_INBOX.us.r1.1-1", b"1-1")]


async def test_frames_of_one_moment_go_as_one_message_for_each_router(outbox, bus):
    post(outbox, "1-1", "2-1", "1-1")
    post(outbox, "7-1", router="us.r2")
    post(outbox, "8-1", "9-1", router="eu.r1")
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.parcel", "_INBOX.us.r2.7-1", "_INBOX.eu.r1.parcel"]
    assert [inbox.rpartition(".")[2] for inbox, _ in bus.frames()] == [
        *("1-1", "2-1", "1-1"),
        "7-1",
        *("8-1", "9-1"),
    ]


async def test_a_burst_goes_out_in_two_messages(outbox, bus):
    loop = asyncio.get_running_loop()
    began = loop.time()
    post(outbox, "1-1")
    await sent(outbox)
    for number in range(2, 30):
        post(outbox, f"{number}-1")
        await asyncio.sleep(0)
    if loop.time() - began < GATHER_S:  # else the machine was elsewhere, and they may go
        assert len(bus.heard) == 1
    await sent(outbox)
    assert loop.time() - began >= GATHER_S
    assert [frame.decode() for _, frame in bus.frames()] == [f"{n}-1" for n in range(1, 30)]


async def test_urgent_frames_take_along_what_waits(outbox, bus):
    post(outbox, "1-1")
    await sent(outbox)
    post(outbox, "2-1")
    post(outbox, "3-1", urgent=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bus.subjects[1:] == ["_INBOX.us.r1.parcel"]
    assert [frame for _, frame in bus.frames()] == [b"1-1", b"2-1", b"3-1"]


async def test_a_bus_that_is_away_loses_frames_and_no_more(outbox, bus, caplog):
    bus.away = True
    post(outbox, "1-1", "2-1")
    await sent(outbox)
    assert "_INBOX.us.r1.parcel: frames are lost: OutboundBufferLimitError" in caplog.text
    bus.away = False
    post(outbox, "3-1")
    await sent(outbox)
    assert bus.subjects == ["_INBOX.us.r1.3-1"]


async def test_any_mix_comes_out_in_order(outbox, bus):
    expected = {}
    for number in range(400):
        router, stream = f"us.r{number % 3}", f"{number % 7}-1"
        inbox = f"_INBOX.{router}.{stream}"
        frame = f"{number}".encode()
        expected.setdefault(inbox, []).append(frame)
        outbox.post(inbox, frame, urgent=number % 11 == 0)
        if number % 5 == 0:
            await asyncio.sleep(0)
    await sent(outbox)
    found = {}
    for inbox, frame in bus.frames():
        found.setdefault(inbox, []).append(frame)
    assert found == expected
