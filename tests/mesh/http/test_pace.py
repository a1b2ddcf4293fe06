import asyncio

from mesh.adapters.refused import RequestRefused
from mesh.http.files_api import Pace, Transfers


async def test_all_transfers_together_keep_to_the_pace():
    pace, clock = Pace(1_000_000), asyncio.get_running_loop().time
    began_at = clock()

    async def carry() -> None:
        for _ in range(10):
            await pace.wait(5_000)

    await asyncio.gather(*(carry() for _ in range(4)))
    assert clock() - began_at >= 0.95 * (200_000 - 5_000) / 1_000_000


async def test_time_without_transfers_is_not_saved_up():
    pace, clock = Pace(1_000_000), asyncio.get_running_loop().time
    await pace.wait(1)
    await asyncio.sleep(0.05)
    began_at = clock()
    for _ in range(5):
        await pace.wait(10_000)
    assert clock() - began_at >= 0.95 * 0.04


def test_a_transfer_that_is_refused_takes_no_place():
    some = Transfers(1, "uploads")
    with some.one_more():
        for _ in range(3):
            try:
                with some.one_more():
                    raise AssertionError("there is one")
            except RequestRefused:
                pass
        assert some.open == 1
    assert some.open == 0
