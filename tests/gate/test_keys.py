"""A key that is not taken costs the router less than one whose request is served."""

import pytest

from mesh.http import wrong_keys
from tests.gate.bytecodes import COUNTED, KEY, LIMITED, WARM, Bytecodes, Edge


@pytest.mark.parametrize(("tries", "status"), [(1000.0, b" 401 "), (0.0, b" 429 ")])
async def test_an_unknown_key_costs_less_than_a_known_one(nats_server, monkeypatch, tries, status):
    """Also one that is not looked at any more."""
    monkeypatch.setattr(wrong_keys, "TRIES", tries)
    served, refused = Bytecodes(), Bytecodes()
    edge = Edge(nats_server.url, LIMITED, key_required=True)
    edge.requests.callers.know_made(())
    await edge.open(nats_server.url)
    try:
        for counted in (False, True):
            for number in range(COUNTED if counted else WARM):
                await edge.ask(served if counted else Bytecodes(), 0)
                counter = refused if counted else Bytecodes()
                assert status in await edge.ask_with(counter, f"{KEY}-{number}")
    finally:
        await edge.close()
    assert 0 < refused.count < served.count / 4
