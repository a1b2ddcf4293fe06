"""Looks at an engine over real HTTP."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import orjson
import pytest

from agents.adapters import http_client
from agents.adapters.engine import EngineClient, EngineOptions
from agents.adapters.engine_call import UnexpectedAnswer
from agents.adapters.engine_kinds import KINDS
from agents.adapters.listed_models import served
from agents.adapters.loaded_pages import PAGES
from agents.adapters.optional_paths import CONFIRMED_S
from agents.core.engine_pages import FAILURES_MAX
from agents.core.events import (
    NOTHING_KNOWN,
    PAGES_GOOD,
    EngineScraped,
    PagesSeen,
    ScrapeFailed,
)
from schemas.engine_routes import OPTIONAL_PATHS
from schemas.state import CARDS_MAX, ModelCard, ReplicaState
from tests.agents.core.bench import Bench
from tests.agents.scripted_engine import Conversation, ScriptedEngine, plain, running


async def _no_answers(talk: Conversation) -> None:
    raise AssertionError("no request is sent")


IDLE = {"sglang": "sglang:num_queue_reqs 0\n", "llamacpp": "llamacpp:requests_deferred 0\n"}


@contextlib.asynccontextmanager
async def looking(
    kind="vllm", metrics_path="/metrics", scrape_timeout_s=30.0, clock=time.monotonic, **known
) -> AsyncIterator[tuple[EngineClient, ScriptedEngine]]:
    async with running(_no_answers) as server:
        server.metrics = IDLE.get(kind, server.metrics)
        client = EngineClient(
            api_url=server.url,
            metrics_url=server.url + metrics_path,
            kind=KINDS[kind],
            clock=clock,
            options=EngineOptions(scrape_timeout_s=scrape_timeout_s, **known),
        )
        try:
            yield client, server
        finally:
            client.close()


async def test_a_scrape_has_models_and_metrics() -> None:
    async with looking() as (client, _):
        scraped = await client.scrape()
    assert isinstance(scraped, EngineScraped)
    assert scraped.models == ("org/llama",)
    assert (scraped.reading.waiting, scraped.reading.running) == (0, 0)


async def test_models_are_read_less_often_and_again_when_wanted() -> None:
    async with looking(clock=lambda: 1000.0) as (client, server):
        await client.scrape()
        server.models = ["other"]
        assert (await client.scrape()).models is None
        client.refresh_models()
        assert (await client.scrape()).models == ("other",)


async def test_the_metrics_of_an_engine_without_them_are_never_requested() -> None:
    async with looking("openai") as (client, server):
        server.metrics = "never read"
        scraped = await client.scrape()
    assert scraped.reading is NOTHING_KNOWN


async def test_the_models_of_an_engine_that_comes_back_are_read() -> None:
    async with looking() as (client, server):
        await client.scrape()
        await server.stop()
        failed = await client.scrape()
        assert isinstance(failed, ScrapeFailed)
        assert not failed.timed_out
        assert failed.detail
        server.models = ["other"]
        await server.start()
        assert (await client.scrape()).models == ("other",)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda server: server.models.clear(), "no model"),
        (lambda server: setattr(server, "models", [None, 7]), "no model"),
        (lambda server: setattr(server, "metrics", "x" * 9_000_000), "more than"),
    ],
)
async def test_odd_engines(change, complaint) -> None:
    async with looking() as (client, server):
        change(server)
        scraped = await client.scrape()
    assert isinstance(scraped, ScrapeFailed)
    assert complaint in scraped.detail


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data": 7}', b'{"data": ["x"]}', b"<html>"])
def test_what_is_no_list_of_models(body) -> None:
    with pytest.raises(UnexpectedAnswer):
        served(body, "http://engine/v1/models")


async def test_a_page_that_is_not_there() -> None:
    async with looking(metrics_path="/nowhere") as (client, _):
        scraped = await client.scrape()
    assert "/nowhere answers HTTP 404" in scraped.detail


async def test_a_hanging_engine_times_out() -> None:
    async with looking(scrape_timeout_s=0.05) as (client, server):
        server.hangs = True
        scraped = await client.scrape()
    assert isinstance(scraped, ScrapeFailed)
    assert scraped.timed_out


async def test_words_of_an_engine_hold_no_password() -> None:
    async with running(_no_answers) as server:
        client = EngineClient(
            api_url=f"http://me:s3cret@127.0.0.1:{server.port}/elsewhere",
            metrics_url="",
            kind=KINDS["openai"],
            clock=time.monotonic,
            options=EngineOptions(scrape_timeout_s=30.0),
        )
        scraped = await client.scrape()
        client.close()
    assert scraped.detail == f"http://127.0.0.1:{server.port}/elsewhere/v1/models answers HTTP 404"


async def test_a_scrape_whose_kept_connection_closes_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "KEEPALIVE_S", 60.0)
    asked, handlers = 0, set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        handlers.add(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(plain(200, b'{"data":[{"id":"m"}]}'))
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            asked += 1
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = EngineClient(
        api_url=url,
        metrics_url="",
        kind=KINDS["openai"],
        clock=time.monotonic,
        options=EngineOptions(scrape_timeout_s=30.0),
    )
    for _ in range(3):
        client.refresh_models()
        assert isinstance(await client.scrape(), EngineScraped)
    client.close()
    await asyncio.gather(*handlers)
    server.close()
    once = len(OPTIONAL_PATHS) + len(PAGES)
    assert asked == 2 + once, "two lists of models, and each path and page that some have"


@pytest.mark.parametrize(
    ("told", "page", "owner", "problem"),
    [
        ("vllm", plain(200, b"llamacpp:requests_deferred 0\n"), "me", "llamacpp, not vllm"),
        ("vllm", plain(501, b"{}"), "llamacpp", "llamacpp, not vllm"),
        ("llamacpp", plain(404, b"{}"), "sglang", "sglang, not llamacpp"),
        ("vllm", plain(200, b""), "vllm", None),
        ("sglang", plain(200, b""), "openai", None),
        ("vllm", plain(401, b"{}"), "llamacpp", None),
    ],
)
async def test_an_engine_that_is_recognisably_of_another_kind_is_named(
    told, page, owner, problem
) -> None:
    """By the series of its page, and by who its list of models says owns them."""
    async with looking(told) as (client, server):
        server.raw_pages["/metrics"] = page
        listed = {"data": [{"id": "m", "owned_by": owner}]}
        server.raw_pages["/v1/models"] = plain(200, orjson.dumps(listed))
        for _ in range(FAILURES_MAX):
            scraped = await client.scrape()
    if problem is None:
        assert client._pages.seen.problem is None
        return
    assert isinstance(scraped, EngineScraped), "it is up at once"
    kind = problem.partition(",")[0]
    assert scraped.pages.problem == f"metrics: looks like {problem}: give --engine-kind {kind}"
    assert scraped.pages.is_blind


KEY = "sk-s3cret"


async def test_every_scrape_sends_the_key() -> None:
    async with looking("llamacpp", key=KEY) as (client, server):
        server.key, server.pages["/props"] = KEY, b'{"total_slots": 4}'
        scraped = await client.scrape()
        assert isinstance(scraped, EngineScraped), scraped
        asked = {request.path: request.headers.get("authorization") for request in server.scrapes}
    assert asked == dict.fromkeys(("/v1/models", "/metrics", "/props"), f"Bearer {KEY}")


async def test_a_page_of_metrics_elsewhere_does_not_get_the_key() -> None:
    async with running(_no_answers) as server, running(_no_answers) as elsewhere:
        client = EngineClient(
            api_url=server.url,
            metrics_url=elsewhere.url + "/metrics",
            kind=KINDS["vllm"],
            clock=time.monotonic,
            options=EngineOptions(scrape_timeout_s=30.0, key=KEY),
        )
        assert isinstance(await client.scrape(), EngineScraped)
        client.close()
    keys = {request.path: request.headers["authorization"] for request in server.scrapes}
    assert keys == dict.fromkeys(("/v1/models", "/version"), f"Bearer {KEY}")
    assert ["authorization" in request.headers for request in elsewhere.scrapes] == [False]


@pytest.mark.parametrize("known", [{}, {"key": "wrong-s3cret"}])
async def test_the_error_of_an_engine_with_a_key_names_the_option(known) -> None:
    async with looking(**known) as (client, server):
        server.key = KEY
        scraped = await client.scrape()
    assert isinstance(scraped, ScrapeFailed)
    says = "answers HTTP 401: it requires an API key, or another one (--engine-key-file)"
    assert scraped.detail == f"{server.url}/v1/models {says}"


async def test_models_that_are_given_are_not_read() -> None:
    async with looking(models=("mine", "other")) as (client, server):
        server.models.clear()
        assert (await client.scrape()).models == ("mine", "other")
        assert [request.path for request in server.scrapes] == ["/metrics", "/version"]


@pytest.mark.parametrize(
    ("status", "is_there"), [(200, True), (404, True), (401, False), (500, False), (503, False)]
)
async def test_where_nothing_else_is_read_health_shows_whether_it_is_there(status, is_there):
    async with looking("openai", models=("mine",)) as (client, server):
        server.scrape_response = lambda: plain(status, b"{}")
        scraped = await client.scrape()
        read = [request.path for request in server.scrapes if request.path not in PAGES]
        assert read == ["/health"]
    assert isinstance(scraped, EngineScraped) is is_there
    if not is_there:
        assert f"/health answers HTTP {status}" in scraped.detail


async def test_the_size_of_the_batch_is_read_once_and_again_after_a_failure() -> None:
    now = 1000.0
    async with looking("llamacpp", clock=lambda: now) as (client, server):
        server.metrics = "llamacpp:requests_deferred 0\n"
        server.pages["/props"] = b'{"total_slots": 4}'
        for _ in range(3):
            assert (await client.scrape()).reading.batch_max == 4
        assert [request.path for request in server.scrapes].count("/props") == 1
        now = 2000.0
        server.pages["/props"] = b"busy"  # what was known is not forgotten for it
        assert (await client.scrape()).reading.batch_max == 4
        assert [request.path for request in server.scrapes].count("/props") == 2
        server.scrape_response = lambda: plain(503, b"loading")
        assert isinstance(await client.scrape(), ScrapeFailed)
        server.scrape_response, server.pages["/props"] = None, b'{"total_slots": 8}'
        assert (await client.scrape()).reading.batch_max == 8


@pytest.mark.parametrize("page", [b"rubbish", b'{"total_slots": -1}', None])
async def test_an_engine_without_a_batch_size_is_read_all_the_same(page):
    async with looking("llamacpp") as (client, server):
        server.metrics = "llamacpp:requests_deferred 3\n"
        if page is not None:
            server.pages["/props"] = page
        reading = (await client.scrape()).reading
    assert (reading.waiting, reading.batch_max) == (3, None)


@pytest.mark.parametrize(
    ("kind", "path", "page"),
    [
        ("vllm", "/version", b'{"version":"0.32.0"}'),
        ("sglang", "/server_info", b'{"version":"0.32.0"}'),
        ("sglang", "/get_server_info", b'{"version":"0.32.0"}'),
        ("llamacpp", "/props", b'{"build_info":"0.32.0"}'),
    ],
)
async def test_an_engines_version(kind, path, page) -> None:
    async with looking(kind) as (client, server):
        assert isinstance(await client.scrape(), EngineScraped)
        assert client.version is None
        wrong_pages = (b'{"version":7,"build_info":[]}', b"{", page[:-2] + b"x" * 999 + b'"}')
        for wrong in wrong_pages:
            server.pages[path] = wrong
            client._settings_due_at = float("-inf")
            assert isinstance(await client.scrape(), EngineScraped)
            assert client.version is None
        server.pages[path] = page
        client._settings_due_at = float("-inf")
        assert isinstance(await client.scrape(), EngineScraped)
        assert client.version == "0.32.0"
        server.scrape_response = lambda: plain(503, b"another one starts")
        assert isinstance(await client.scrape(), ScrapeFailed)
        assert client.version is None


async def test_sglangs_settings_have_two_paths_and_are_read_on_only_where_needed() -> None:
    """It stops its scheduler to answer."""
    times = itertools.count(1000.0, 20.0)  # each scrape reads the clock more than once
    page = b'{"version":"1","internal_states":[{"effective_max_running_requests_per_dp":32}]}'
    for asks, expected in ((True, 32), (False, None)):
        async with looking("sglang", reads_batch_max=asks, clock=lambda: next(times)) as (
            client,
            server,
        ):
            server.pages["/get_server_info"] = page
            for _ in range(3):
                assert (await client.scrape()).reading.batch_max == expected
            asked = [request.path for request in server.scrapes]
            assert asked.count("/get_server_info") == asked.count("/server_info")
            assert asked.count("/server_info") == (3 if asks else 1)  # which is not deprecated


async def test_settings_that_never_come_delay_one_scrape() -> None:
    """Not once for each of their names."""
    async with looking("sglang", scrape_timeout_s=2.0) as (client, server):
        server.silent = frozenset(("/get_server_info", "/server_info"))
        assert isinstance(await client.scrape(), EngineScraped)
        asked = [request.path for request in server.scrapes]
    assert len(server.silent & {*asked}) == 1


def test_cards_keep_what_has_the_right_shape_of_the_first_models():
    rows = [{"id": f"m{number}", "max_model_len": number} for number in range(CARDS_MAX + 3)]
    rows[0] |= {"owned_by": "vllm", "root": 7, "parent": "x" * 10_000, "created": -1}
    rows[1]["max_model_len"] = True
    cards = served(orjson.dumps({"data": rows}), "http://engine/v1/models").cards
    assert cards["m0"] == ModelCard(owned_by="vllm", max_model_len=0)
    assert "m1" not in cards  # it says nothing
    assert len(cards) == CARDS_MAX - 1


@pytest.mark.parametrize(
    ("kind", "status", "computes"),
    [
        ("vllm", 200, True),
        ("vllm", 400, False),
        ("openai", 400, True),
        ("openai", 500, False),
    ],
)
async def test_a_probe_counts_only_answers_of_an_engine_that_computes(
    kind, status, computes
) -> None:
    """An HTTP server in front of one that hangs refuses requests too: then its numbers decide."""

    async def script(talk: Conversation) -> None:
        await talk.send(plain(status, b"{}"))

    async with looking(kind) as (client, server):
        server.script = script
        assert await client.probe("/v1/completions", "org/llama", 30.0) is computes


EMBEDDINGS = "/v1/embeddings"


async def _paths(*answers: bytes) -> tuple[list[tuple[str, ...]], ScriptedEngine]:
    """What scrapes a minute apart find of an engine that answers so on that path."""
    left, now = list(answers), 0.0

    async def script(talk: Conversation) -> None:
        assert orjson.loads(talk.request.body) == {"model": "org/llama", "input": "1"}
        await talk.send(left.pop(0))

    async with running(script) as server:
        server.embeds = True
        client = EngineClient(
            api_url=server.url,
            metrics_url="",
            kind=KINDS["openai"],
            clock=lambda: now,
            options=EngineOptions(scrape_timeout_s=30.0),
        )
        found = []
        for _ in range(3):
            now += 60.0
            found.append((await client.scrape()).paths)
        client.close()
    assert not left
    return found, server


@pytest.mark.parametrize("status", [404, 405, 501, 400, 422])
async def test_an_engine_that_has_no_embeddings_is_asked_once(status) -> None:
    found, _ = await _paths(plain(status, b"{}"))
    assert found == [()] * 3


async def test_an_engine_that_makes_embeddings_is_asked_once() -> None:
    found, _ = await _paths(plain(200, b'{"data":[]}'))
    assert found == [(EMBEDDINGS,)] * 3


async def test_an_engine_in_trouble_is_asked_again_later() -> None:
    found, _ = await _paths(plain(503, b"{}"), plain(429, b"{}"), plain(200, b"{}"))
    assert found == [(), (), (EMBEDDINGS,)]


async def test_other_models_may_have_other_paths_and_a_path_may_be_lost() -> None:
    now = [1000.0]
    async with running(lambda talk: talk.send(plain(200, b"{}"))) as server:
        server.embeds = True
        client = EngineClient(
            api_url=server.url,
            metrics_url="",
            kind=KINDS["openai"],
            clock=lambda: now[0],
            options=EngineOptions(scrape_timeout_s=30.0),
        )

        async def paths() -> tuple[str, ...]:
            client.refresh_models()
            return (await client.scrape()).paths

        assert await paths() == (EMBEDDINGS,)
        assert client.lacks(EMBEDDINGS)  # one request's answer; the engine still knows the path
        assert await paths() == (EMBEDDINGS,)
        assert not client.lacks(EMBEDDINGS)  # it was found out just now: it is about the request
        now[0] += CONFIRMED_S
        assert client.lacks(EMBEDDINGS)
        server.embeds = False
        assert await paths() == ()
        server.embeds = True
        assert await paths() == ()  # not asked again
        server.models = ["other"]
        assert await paths() == (EMBEDDINGS,)
        client.close()
    assert len(server.requests) == 3


async def scraped_until(client, done, seconds: float = 60.0):
    """Scrape ten times a second by its clock, until `done` of what was scraped."""
    for _ in range(round(seconds * 10)):
        client._clock.now += 0.1
        found = await client.scrape()
        if done(found):
            return found
    raise AssertionError(f"{found} after {seconds} s")


class TurnedClock:
    """A clock that the test turns."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def is_good(found) -> bool:
    return isinstance(found, EngineScraped) and found.pages == PAGES_GOOD


@pytest.mark.parametrize("was_good", [True, False])
@pytest.mark.parametrize(
    ("page", "what"),
    [
        (plain(503, b"busy"), "HTTP 503"),
        (plain(404, b"{}"), "HTTP 404"),
        (plain(403, b"{}"), "HTTP 403"),
        (plain(200, b"vllm_requests 1\n", "text/plain"), "no series of the engine's kind"),
        (b"rubbish\r\n\r\n", "no HTTP/1.1"),
    ],
)
async def test_an_engine_whose_page_of_metrics_fails_is_up_and_blind(was_good, page, what) -> None:
    async with looking(clock=TurnedClock()) as (client, server):
        if was_good:
            assert is_good(await client.scrape())
        client.last_content_at = client._clock.now  # it has answered a request
        server.raw_pages["/metrics"] = page
        found = await scraped_until(client, lambda found: getattr(found, "pages", PAGES_GOOD)[0])
        assert found.pages == PagesSeen(f"metrics: {what}", is_blind=True)
        assert found.reading == NOTHING_KNOWN
        server.raw_pages.clear()
        found = await scraped_until(client, is_good)
        assert found.reading.waiting == 0
        await server.stop()
        assert isinstance(await scraped_until(client, lambda _: True), ScrapeFailed)


async def test_a_page_elsewhere_that_is_down_does_not_hide_the_engine() -> None:
    async with running(_no_answers) as server, running(_no_answers) as elsewhere:
        client = EngineClient(
            api_url=server.url,
            metrics_url=elsewhere.url + "/metrics",
            kind=KINDS["vllm"],
            clock=TurnedClock(),
            options=EngineOptions(scrape_timeout_s=30.0),
        )
        assert is_good(await client.scrape())
        await elsewhere.stop()
        found = await scraped_until(client, lambda found: isinstance(found, EngineScraped))
        assert found.pages == PagesSeen("metrics: no connection", is_blind=True)
        await server.stop()
        client.refresh_models()
        failed = await client.scrape()
        assert isinstance(failed, ScrapeFailed) and not failed.is_up
        client.close()


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_an_engine_whose_list_of_models_fails_is_up_while_something_shows_it(kind) -> None:
    async with looking(kind, clock=TurnedClock()) as (client, server):
        assert is_good(await client.scrape())
        server.raw_pages["/v1/models"] = plain(503, b"busy")
        for _ in range(50):
            client._clock.now += 1.0
            client.last_content_at = client._clock.now - 0.5
            found = await client.scrape()
            assert isinstance(found, EngineScraped) and found.models is None
        assert found.pages == PagesSeen("models: HTTP 503")
        server.raw_pages.clear()
        found = await scraped_until(client, is_good)


@pytest.mark.parametrize("status", [403, 503])
@pytest.mark.parametrize("page_fails_too", [False, True])
async def test_a_full_engine_stays_full_when_its_list_of_models_fails_once(
    status, page_fails_too
) -> None:
    bench = Bench()
    async with looking(clock=TurnedClock()) as (client, server):

        async def scrape() -> None:
            bench.now = client._clock.now = client._clock.now + 1.0
            client.last_content_at = bench.now - 0.5
            bench.feed(await client.scrape())

        server.metrics = "vllm:num_requests_running 4\nvllm:num_requests_waiting 9\n"
        await scrape()
        assert bench.beat.pending == 9
        server.raw_pages["/v1/models"] = plain(status, b"busy")
        if page_fails_too:
            server.raw_pages["/metrics"] = plain(status, b"busy")
        await scrape()
        assert (bench.beat.pending, bench.beat.state) == (9, ReplicaState.READY)
        server.raw_pages.clear()
        await scrape()
        assert bench.beat.pending == 9


async def test_a_good_answer_to_a_probe_shows_that_an_engine_without_pages_is_up() -> None:
    async def answers(talk) -> None:
        await talk.send(plain(200, b"{}"))

    async with running(answers) as server:
        client = EngineClient(
            api_url=server.url,
            metrics_url="",
            kind=KINDS["openai"],
            clock=TurnedClock(),
            options=EngineOptions(scrape_timeout_s=30.0),
        )
        assert is_good(await client.scrape())
        server.raw_pages["/v1/models"] = plain(503, b"busy")
        failed = await scraped_until(client, lambda found: isinstance(found, ScrapeFailed))
        assert failed.wants_proof
        assert await client.probe("/v1/completions", "org/llama", 30.0)
        assert isinstance(await client.scrape(), EngineScraped)
        client.close()
