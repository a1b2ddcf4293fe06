"""Requests as large as a server takes: with headers, which it counts too, and from anybody."""

import asyncio

import pytest

from infra.bus import BusAddress, close, connect
from schemas import exchange, subjects, wire
from tests.support.small_mesh import PATIENT, chat, client, one_replica, upload
from tests.support.until import PATIENCE_S

ASKED = {
    exchange.H_REQUEST: "request-1",
    exchange.H_MODEL: "tiny",
    exchange.H_PATH: "/v1/chat/completions",
    exchange.H_ATTEMPT: "1",
    exchange.H_DEADLINE_MS: "60000",
    exchange.H_HOPS: "1",
    exchange.H_ORIGIN: "eu",
}


@pytest.fixture
async def mesh(nats_server):
    """A router and an agent of us, to whom eu is a peer that is silent."""
    async with one_replica(nats_server, peers=("us", "eu"), **PATIENT) as mesh:
        yield mesh


def of_bytes(size: int) -> bytes:
    """A chat of exactly that size."""
    body = upload(chat("")).getvalue()
    return body.replace(b'"content":""', b'"content":"' + b"x" * (size - len(body)) + b'"')


async def test_no_trace_state_of_a_client_ends_its_router(mesh):
    state = ",".join(f"v{n}={'x' * 220}" for n in range(32))
    bus = mesh.routers["us"]._bus
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00", "tracestate": state}
    body = of_bytes(bus.payload_bytes_max)
    async with client() as session:
        url = mesh.urls["us"] + "/v1/chat/completions"
        async with session.post(url, data=upload(body), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
    assert not bus.sending.done()


async def test_no_request_of_a_peer_ends_a_router(mesh, nats_server):
    peer = await connect(BusAddress(nats_server.url), name="t", inbox_prefix="_INBOX.eu.r1")
    frames = await peer.subscribe("_INBOX.eu.r1.7")
    size = peer.max_payload - 300  # what is left beside the headers that it needs
    for more in ({}, {"tracestate": "a=\u00ff"}, {exchange.H_SESSION: "x" * 9000}):
        body = of_bytes(size - 9000 if more else size)
        await peer.publish(subjects.ingress("us"), body, "_INBOX.eu.r1.7", ASKED | more)
        frame = exchange.unpack_frame((await frames.next_msg(timeout=PATIENCE_S)).data)
        assert frame.kind is exchange.Frame.REFUSED
        assert wire.decode_as(exchange.Refused, frame.payload).reason == exchange.Refusal.BAD_WORK
    await asyncio.sleep(0)
    assert not mesh.routers["us"]._bus.sending.done()
    await close(peer)
