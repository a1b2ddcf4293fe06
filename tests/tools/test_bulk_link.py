"""A large body on a narrow link between two regions fails no ordinary request beside it."""

import pytest

from tests.programs.live.bulk_link import Load, play

pytestmark = [pytest.mark.timeout(180), pytest.mark.tools]


async def test_no_ordinary_request_fails_beside_a_large_body(tmp_path):
    load = Load(
        mbits=20.0,
        rtt_ms=80.0,
        big=2,
        at_a_time=2,
        mebibytes=8.0,
        ordinary=200,
        seconds=14.0,
        answers=False,
        both=True,
    )
    found = await play(load, tmp_path)
    assert found.statuses == {"200": load.ordinary}, str(found)
    assert found.big == {"200": load.big}, str(found)
    assert found.cuts == 0, str(found)
