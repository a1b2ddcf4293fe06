"""Engines that load models on demand: an agent finds out about them and makes them load nothing."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

import orjson
import pytest

from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_kinds import KINDS
from agents.adapters.listed_models import served
from agents.adapters.loaded_pages import PAGES, TRIES_MAX, state_of
from agents.adapters.optional_paths import GIVEN_UP
from agents.config import MODELS_MAX
from agents.core.engine_pages import FAILURES_MAX
from agents.core.events import EngineScraped, ScrapeFailed
from agents.core.loaded_models import ModelState, is_one_model
from agents.core.model_routes import RETRY_S
from agents.core.model_routes import TRIES_MAX as ROUTE_TRIES_MAX
from schemas.engine_routes import OPTIONAL_PATHS
from schemas.http import EMBEDDINGS, MESSAGES
from tests.agents.adapters.test_relay import whole
from tests.agents.scripted_engine import Conversation, ScriptedEngine, plain, running
from tests.support.until import PATIENCE_S

LOADED, LOADING, UNLOADED = ModelState.LOADED, ModelState.LOADING, ModelState.UNLOADED
OF_PAGE = {
    "/api/ps": {"models": [{"name": "a", "model": "a"}]},
    "/running": {
        "running": [{"model": "a", "state": "ready"}, {"model": "b", "state": "starting"}]
    },
    "/api/v0/models": {
        "data": [{"id": "a", "state": "loaded"}, {"id": "b", "state": "not-loaded"}]
    },
}


class OnDemandServer:
    """Refuses a request without a body as Ollama does; one with a body loads its model."""

    def __init__(self) -> None:
        self.loads = 0

    async def script(self, talk: Conversation) -> None:
        self.loads += bool(talk.request.body)
        await talk.send(plain(400, b'{"error":{"message":"EOF"}}'))


@contextlib.asynccontextmanager
async def on_demand(
    *models: str, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[EngineClient, ScriptedEngine, OnDemandServer]]:
    server = OnDemandServer()
    async with running(server.script) as engine:
        engine.models, engine.also_serves = list(models), (MESSAGES, EMBEDDINGS)
        client = EngineClient(
            api_url=engine.url,
            metrics_url="",
            kind=KINDS["openai"],
            clock=clock,
            options=EngineOptions(scrape_timeout_s=30.0),
        )
        try:
            yield client, engine, server
        finally:
            client.close()


async def scraped(client: EngineClient) -> EngineScraped:
    client.refresh_models()
    found = await client.scrape()
    assert isinstance(found, EngineScraped)
    return found


async def test_routes_are_found_out_without_a_load() -> None:
    async with on_demand("a", "b") as (client, engine, server):
        found = await scraped(client)
        for _ in range(3):
            assert (await scraped(client)).routes == found.routes
    assert found.routes is not None and found.routes.unknown == (EMBEDDINGS, MESSAGES)
    assert found.paths == () and server.loads == 0
    assert len(engine.requests) == 2, "each route is asked for once"


async def test_what_was_found_out_is_asked_again_when_the_engine_was_down_only() -> None:
    async with on_demand("a", "b") as (client, engine, _):
        engine.pages["/api/ps"] = b'{"models":[]}'
        found = await scraped(client)
        asked = len(engine.requests)
        for failures, times in ((1, 1), (FAILURES_MAX, 2)):
            engine.raw_pages["/v1/models"] = plain(503, b"busy")
            client.refresh_models()
            for _ in range(failures):
                assert isinstance(await client.scrape(), ScrapeFailed)
            engine.raw_pages.clear()
            assert (await scraped(client)).states == found.states
            assert len(engine.requests) == times * asked


async def test_one_model_that_is_not_loaded_is_not_asked_either() -> None:
    async with on_demand("a") as (client, engine, server):
        engine.pages["/api/ps"] = b'{"models":[]}'
        found = await scraped(client)
    assert found.states == {"a": UNLOADED} and server.loads == 0
    assert found.routes is not None and found.routes.unknown == (EMBEDDINGS, MESSAGES)


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_a_page_that_fails_is_asked_again_and_nothing_is_loaded_meanwhile(status) -> None:
    async with on_demand("a") as (client, engine, server):
        engine.raw_pages["/api/ps"] = plain(status, b"busy")
        found = await scraped(client)
        assert found.states_unknown and server.loads == 0 and not engine.requests
        assert found.routes is not None and set(found.routes.unknown) == OPTIONAL_PATHS
        del engine.raw_pages["/api/ps"]
        engine.pages["/api/ps"] = b'{"models":[]}'
        found = await scraped(client)
    assert found.states == {"a": UNLOADED} and not found.states_unknown and server.loads == 0


async def test_a_page_that_never_answers_either_way_counts_as_none_in_the_end() -> None:
    async with on_demand("a") as (client, engine, server):
        engine.raw_pages["/api/ps"] = plain(403, b"no")
        told = [(await scraped(client)).states_unknown for _ in range(TRIES_MAX + 1)]
        asked = sum(one.path == "/api/ps" for one in engine.scrapes)
    assert told == [True] * (TRIES_MAX - 1) + [False] * 2 and asked == TRIES_MAX
    assert server.loads, "it is asked for its paths as any engine of one model"


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_page_that_is_not_there_is_asked_for_once(status) -> None:
    async with on_demand("a") as (client, engine, _):
        engine.raw_pages.update({path: plain(status, b"") for path in PAGES})
        assert not (await scraped(client)).states_unknown
        sought = len(engine.scrapes)
        await scraped(client)
        assert [one.path for one in engine.scrapes[sought:]] == ["/v1/models"]


async def test_a_client_s_answer_tells_for_its_model() -> None:
    async with on_demand("a", "b") as (client, _, _):
        await scraped(client)
        client.answered("a", MESSAGES, 200, b"{}")
        client.answered("b", MESSAGES, 404, b'{"error":"model \'b\' not found"}')
        client.answered("b", EMBEDDINGS, 501, b"{}")
        found = await scraped(client)
    assert found.paths == (MESSAGES,) and found.routes is not None
    assert found.routes.unknown == (EMBEDDINGS, MESSAGES)
    assert found.routes.lacking == {"b": (EMBEDDINGS,)}


@pytest.mark.parametrize("models", [("a",), ("a", "b")])
async def test_an_engine_that_tells_of_no_path_is_asked_a_few_times_and_that_is_logged(
    models, caplog
) -> None:
    caplog.set_level(logging.INFO, "agents.adapters.optional_paths")
    now = [0.0]
    async with on_demand(*models, clock=lambda: now[0]) as (client, engine, _):
        engine.script = whole(plain(503, b"busy"))
        for _ in range(2 * ROUTE_TRIES_MAX):
            await scraped(client)
            await scraped(client)  # at the same moment: not asked again
            now[0] += RETRY_S
        assert not client.optional.to_try
        asked = Counter(one.path for one in engine.requests)
    paths = (EMBEDDINGS, MESSAGES)
    assert asked == dict.fromkeys(paths, ROUTE_TRIES_MAX)
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [
        (logging.INFO, GIVEN_UP % (engine.url, path)) for path in paths
    ]


async def test_an_answer_about_a_path_may_come_long_after_the_scrape_that_asked() -> None:
    gate = asyncio.Event()

    async def late(talk: Conversation) -> None:
        await gate.wait()
        await talk.send(plain(200, b"{}"))

    async with on_demand("a") as (client, engine, _):
        engine.script, client.optional._timeout_s = late, 0.01  # how long a scrape waits for it
        ends_at = time.monotonic() + 10 * client.optional._timeout_s
        while time.monotonic() < ends_at:
            assert (await scraped(client)).paths == () and client.optional.to_try
        assert [one.path for one in engine.requests] == [EMBEDDINGS], "it is still asked"
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            while (await scraped(client)).paths != (EMBEDDINGS, MESSAGES):
                pass
    assert [one.path for one in engine.requests] == [EMBEDDINGS, MESSAGES], "each was asked once"


@pytest.mark.parametrize("path", PAGES)
async def test_the_page_that_tells_what_is_loaded_is_found_and_read_again(path) -> None:
    async with on_demand("a", "b") as (client, engine, _):
        engine.pages[path] = orjson.dumps(OF_PAGE[path])
        found = await scraped(client)
        expected = LOADING if path == "/running" else UNLOADED
        assert found.states == {"a": LOADED, "b": expected}
        sought = len(engine.scrapes)
        await scraped(client)
        assert [one.path for one in engine.scrapes[sought:]] == ["/v1/models", path]
        del engine.pages[path]
        assert (await scraped(client)).states == found.states, "what was read last holds"


async def test_names_that_engines_take_beside_those_that_they_list() -> None:
    swap = {"meta": {"llamaswap": {"aliases": ["gpt", "a", 3, "", None]}}}
    rows = [
        {"id": "a:latest", "status": "loaded"},
        {"id": "b", **swap, "status": {"value": "unloaded"}},
        {"id": "c", "meta": {"llamaswap": {"aliases": "no"}}},
        {"id": "d", "meta": 7},
    ]
    found = served(orjson.dumps({"data": rows}), "")
    assert found.names == ("a:latest", "b", "c", "d", "a", "gpt")
    assert found.states == {"a:latest": LOADED, "a": LOADED, "b": UNLOADED, "gpt": UNLOADED}
    one = served(b'{"data":[{"id":"a:latest","root":"/models/a"}]}', "")
    assert one.names == ("a:latest", "a") and is_one_model(one.names, one.cards)
    rows = [{"id": f"m{number}:latest"} for number in range(MODELS_MAX)]
    assert len(served(orjson.dumps({"data": rows}), "").names) == MODELS_MAX
    async with on_demand("a:latest", "b") as (client, engine, _):
        engine.pages["/api/ps"] = b'{"models":[{"model":"a:latest"}]}'
        assert (await scraped(client)).states == {"a:latest": LOADED, "a": LOADED, "b": UNLOADED}


async def test_pages_of_other_things_tell_nothing() -> None:
    odd = [b"<html>", b"[]", b'{"models":{}}', b'{"running":[1]}', b'{"data":[{"id":"a"}]}']
    for page in odd:
        async with on_demand("a") as (client, engine, _):
            engine.pages.update(dict.fromkeys(PAGES, page))
            assert (await scraped(client)).states == {}
            sought = len(engine.scrapes)
            await scraped(client)
            assert [one.path for one in engine.scrapes[sought:]] == ["/v1/models"]


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"value": "loaded"}, LOADED),
        ({"value": "unloaded", "args": []}, UNLOADED),
        ("Loading", LOADING),
        ("active", None),
        ({"value": 3}, None),
        (None, None),
        ([], None),
    ],
)
def test_a_list_of_models_may_tell_by_itself(status, state) -> None:
    assert state_of(status) is state


async def test_an_engine_that_only_serves_one_model_is_asked_as_ever() -> None:
    async with on_demand("a") as (client, engine, server):
        found = await scraped(client)
    assert found.states == {} and found.routes is None and found.paths == ()
    assert server.loads == 2 and len(engine.requests) == 2  # the others are 404 before its script
    assert len(OPTIONAL_PATHS) > 2
