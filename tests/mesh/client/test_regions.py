"""The helper against faces and against a real mesh, with the OpenAI SDK as its users have it."""

import asyncio
import urllib.error
import urllib.request
from contextlib import AsyncExitStack

import openai
import pytest

from mesh.client import AsyncRegions, Regions, regions
from tests.mesh.client.face import face
from tests.support.nats_pair import nats_pair
from tests.support.ports import free_ports
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import small_mesh
from tests.support.until import PATIENCE_S

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def three(monkeypatch):
    """Faces of three regions, the second one nearest."""
    monkeypatch.setattr(regions, "PAUSE_S", 0.01)
    async with AsyncExitStack() as stack:
        faces = [await stack.enter_async_context(face()) for _ in range(3)]
        for one, delay_s in zip(faces, (0.2, 0.0, 0.4), strict=True):
            one.delay_s = delay_s
        yield faces


def fetch(url):
    with urllib.request.urlopen(url + "/chat", timeout=20) as answer:
        return answer.read().decode()


def used(faces, **options):
    return Regions([one.url for one in faces], lambda url: url, **options)


async def measured(mesh, *order):
    """Let it measure until it is right: what stands still for a moment looks far."""
    async with asyncio.timeout(PATIENCE_S):
        while mesh.order != tuple(one.url for one in order):
            await asyncio.to_thread(mesh.refresh)


async def test_the_nearest_is_measured_and_called(three):
    mesh = used(three)
    await measured(mesh, three[1], three[0], three[2])
    assert await asyncio.to_thread(mesh.nearest) == three[1].url
    assert await asyncio.to_thread(mesh.call, fetch) == three[1].url


async def test_the_next_one_is_called_when_the_nearest_is_gone_or_answers_503(three):
    mesh = used(three)
    await measured(mesh, three[1], three[0], three[2])
    await three[1].close()
    assert await asyncio.to_thread(mesh.call, fetch) == three[0].url
    three[0].status = 503
    assert await asyncio.to_thread(mesh.call, fetch) == three[2].url
    assert three[0].asked == 2


async def test_an_error_that_is_the_same_everywhere_is_raised_at_once(three):
    three[1].status = 429
    mesh = used(three)
    await measured(mesh, three[1], three[0], three[2])
    with pytest.raises(urllib.error.HTTPError):
        await asyncio.to_thread(mesh.call, fetch)
    assert [one.asked for one in three] == [0, 1, 0]


async def test_tries_are_counted_and_the_last_error_is_raised(three):
    for one in three:
        one.status = 503
    with pytest.raises(urllib.error.HTTPError, match="503"):
        await asyncio.to_thread(used(three, tries_max=7).call, fetch)
    assert sorted(one.asked for one in three) == [2, 2, 3]


async def test_a_mesh_that_comes_back_between_two_rounds_answers(three):
    for one in three:
        one.status = 503

    def fetch_at_last(url):
        if sum(one.asked for one in three) == 3:
            three[2].status = 200
        return fetch(url)

    assert await asyncio.to_thread(used(three, tries_max=6).call, fetch_at_last) == three[2].url


async def test_measurements_are_refreshed_aside(three):
    mesh = used(three, refresh_s=0.05)
    await measured(mesh, three[1], three[0], three[2])
    three[1].ready = False
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(mesh.nearest) != three[0].url:
            await asyncio.sleep(0.02)


async def test_regions_name_others_and_those_are_measured_too(three):
    three[0].others = {"data": [{"endpoint": three[1].url}]}
    mesh = used(three[:1])
    await measured(mesh, three[1], three[0])
    alone = used(three[:1], learn=False)
    assert await asyncio.to_thread(alone.nearest) == three[0].url


@pytest.mark.parametrize("kind", [Regions, AsyncRegions])
async def test_a_client_with_https_urls_does_not_learn_http_ones(three, caplog, kind):
    [port] = free_ports(1)
    given = [f"https://127.0.0.1:{port}/v1", three[0].url]  # nobody is behind the first
    other = three[1].url
    three[0].others = {"data": [{"endpoint": other}, {"endpoint": three[0].url}]}

    async def order(**options):
        mesh = kind(given, str, **options)
        for _ in range(2):
            await (mesh.refresh() if kind is AsyncRegions else asyncio.to_thread(mesh.refresh))
        return set(mesh.order)

    assert await order() == set(given)
    [warning] = [one for one in caplog.messages if "ignored" in one]
    assert other in warning and "learn_plain=True" in warning
    assert await order(learn_plain=True) == {*given, other}


def test_no_region_is_an_error():
    with pytest.raises(ValueError, match="one region at least"):
        Regions([], str)


@pytest.fixture
async def mesh(tmp_path):
    """Two real regions; us is the nearer one by what is measured, or eu: it doesn't matter."""
    async with (
        nats_pair(tmp_path, "us", "eu") as servers,
        scripted_engine() as near,
        scripted_engine() as far,
        small_mesh(servers) as mesh,
    ):
        for region, engine in (("us", near), ("eu", far)):
            await mesh.router(region, policy="skywalker")
            await mesh.agent(region, f"{region}-0", engine)
            await mesh.until_ready(region, 1)
        yield mesh


def base_urls(mesh):
    return [url + "/v1" for url in mesh.urls.values()]


async def close_nearest(mesh, url):
    [region] = [name for name, root in mesh.urls.items() if root + "/v1" == url]
    await mesh.routers[region].close()


async def test_the_openai_sdk_fails_over(mesh):
    def make(url):
        return openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=20)

    helper = Regions(base_urls(mesh), make)

    def ask():
        return helper.call(lambda client: client.chat.completions.create(**CHAT))

    first = await asyncio.to_thread(ask)
    await close_nearest(mesh, helper.order[0])
    second = await asyncio.to_thread(ask)
    assert first.choices[0].message.content == second.choices[0].message.content == "hello"
    for url in base_urls(mesh):
        helper.client(url).close()


async def test_the_asynchronous_sdk_streams_and_fails_over(mesh, monkeypatch):
    # Or its rest may be over by then.
    monkeypatch.setattr("mesh.client.region_choice.REST_S", 600.0)

    def make(url):
        return openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=20)

    helper = AsyncRegions(base_urls(mesh), make)

    async def ask():
        stream = await helper.call(
            lambda client: client.chat.completions.create(stream=True, **CHAT)
        )
        return [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]

    assert await ask() == ["hello"]
    nearest = await helper.nearest()
    await close_nearest(mesh, nearest)
    assert await ask() == ["hello"]
    assert helper.order[0] != nearest
    await helper.refresh()
    assert helper.order[0] != nearest
    for url in base_urls(mesh):
        await helper.client(url).close()


async def test_a_region_without_replicas_is_skipped(mesh):
    """Its router answers, and says that it is not ready."""
    helper = Regions(base_urls(mesh), str)
    for name in ("us-0", "eu-0"):
        await mesh.kill_agent(name)
    await mesh.until(
        lambda: all(one.requests.not_ready_because() for one in mesh.routers.values()),
        "nobody is ready",
    )
    await asyncio.to_thread(helper.refresh)
    assert sorted(helper.order) == sorted(base_urls(mesh))  # all rest; somebody is named still
