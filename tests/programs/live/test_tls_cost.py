"""What https and keys cost a router, played short; `make bench-tls` plays it, rivals too."""

from tests.programs.live.tls_cost import KEPT, KEYS, NEW, TLS, play


async def test_both_kinds_of_connection_are_asked_of_all_routers():
    said: list[str] = []
    ratios = await play(1, 4, said.append)
    assert set(ratios) == {f"{what}, {kind}" for what in (TLS, KEYS) for kind in (KEPT, NEW)}
    assert all(len(found) == 1 for found in ratios.values())
    assert len(said) == 4
