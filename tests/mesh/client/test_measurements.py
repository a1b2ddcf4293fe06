"""Looking at a region over real HTTP, and at what is none."""

import asyncio

import pytest

from mesh.client import regions as look
from tests.mesh.client.face import face
from tests.support.ports import free_ports


def round_trip(url, timeout_s=20.0):
    return asyncio.to_thread(look.round_trip_s, url, timeout_s)


def endpoints(url):
    return asyncio.to_thread(look.endpoints, url, 20.0)


async def test_a_round_trip_is_timed_to_a_region_that_is_ready():
    async with face() as region:
        near = min([await round_trip(region.url) for _ in range(5)])
        region.delay_s = 0.1
        far = await round_trip(region.url)
        region.ready = False
        assert await round_trip(region.url) is None
    assert 0.0 < near < far
    assert far >= 0.1


async def test_a_region_that_is_not_there_or_too_slow_is_not_ready():
    [port] = free_ports(1)
    assert await round_trip(f"http://127.0.0.1:{port}/v1") is None
    async with face() as region:
        region.delay_s = 0.5
        assert await round_trip(region.url, timeout_s=0.1) is None


@pytest.mark.parametrize(
    "url", ["", "us.example.com/v1", "ftp://us/v1", "http://", "http://a:b/v1"]
)
async def test_an_invalid_url_is_not_ready(url):
    assert await round_trip(url) is None
    assert await endpoints(url) == ()


async def test_regions_name_others():
    async with face() as region:
        named = [{"endpoint": "https://eu/v1"}, {"endpoint": None}, {}, {"endpoint": "eu"}]
        region.others = {"data": named}
        assert await endpoints(region.url) == ("https://eu/v1",)
        region.others = {"data": [{"endpoint": f"http://r{n}/v1"} for n in range(99)]}
        assert len(await endpoints(region.url)) == look.ENDPOINTS_MAX


@pytest.mark.parametrize("others", [[], {"data": 3}, {"data": [7]}, {"data": None}, "text", None])
async def test_an_invalid_list_names_no_region(others):
    async with face() as region:
        region.others = others
        assert await endpoints(region.url) == ()
