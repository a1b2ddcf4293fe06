"""Keeping what is said of a stream, so that it may go on elsewhere, costs next to nothing."""

from mesh.runtime.stream_continuations import StreamContinuations
from tests.gate import bytecodes

DEARER_MAX = 1.03


async def test_a_stream_that_does_not_break_costs_hardly_more(nats_server, monkeypatch):
    name = f"a stream of {bytecodes.CHUNKS} chunks"
    kept = await bytecodes.count_edge(nats_server.url)
    monkeypatch.setattr(StreamContinuations, "begun", lambda self, record: None)
    not_kept = await bytecodes.count_edge(nats_server.url)
    assert not_kept[name] < kept[name] <= DEARER_MAX * not_kept[name]
