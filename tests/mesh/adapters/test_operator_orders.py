"""What a write of an operator's orders learns from the stream's answer."""

import json

import nats
import pytest

from mesh.adapters.operator_orders import ORDERS
from mesh.adapters.region_records import RecordsUnavailable
from schemas import subjects
from schemas.control import RegionControl
from schemas.ids import RegionId

US = RegionId("us")


# The second code is that of streams with copies, while a write before is still being copied.
@pytest.mark.parametrize("code", [10071, 10164])
async def test_a_write_that_comes_too_late_is_tried_again(nats_server, code):
    assert await _answered(nats_server, {"error": {"err_code": code}}) is None


async def test_any_other_refusal_is_told(nats_server):
    with pytest.raises(RecordsUnavailable, match="no space"):
        await _answered(nats_server, {"error": {"err_code": 10077, "description": "no space"}})


async def _answered(nats_server, answer):
    client = await nats.connect(nats_server.url)
    try:

        async def stream(message):
            await message.respond(json.dumps(answer).encode())

        await client.subscribe(subjects.control(US), cb=stream)
        return await ORDERS.write(client, US, RegionControl(region=US), 7)
    finally:
        await client.close()
