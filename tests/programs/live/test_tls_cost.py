"""What https costs a router, played short; `make bench-tls` plays it."""

from tests.programs.live.tls_cost import KEPT, NEW, play


async def test_both_kinds_of_connection_are_asked_of_both_routers():
    said: list[str] = []
    ratios = await play(1, 4, said.append)
    assert [len(ratios[kind]) for kind in (KEPT, NEW)] == [1, 1]
    assert len(said) == 2
