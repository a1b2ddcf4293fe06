"""A real agent beside an engine that loads models on demand and holds one of them."""

import time

import orjson
import pytest

from agents.core import scrape_pace
from schemas.engine_routes import OPTIONAL_PATHS
from schemas.http import CHAT, MESSAGES
from schemas.state import Heartbeat
from schemas.subjects import encode_model
from tests.agents.fake_router import FakeRouter, fake_router
from tests.agents.scene import running_agent
from tests.agents.scripted_engine import Conversation, plain, running
from tests.support.until import until


class OneFits:
    """Holds one of `models`, says which in `/api/ps`, and counts its loads."""

    def __init__(self) -> None:
        self.engine = None
        self.loads: list[str] = []
        self.tells = True

    async def script(self, talk: Conversation) -> None:
        if not talk.request.body:
            await talk.send(plain(400, b'{"error":{"message":"EOF"}}'))
            return
        model = orjson.loads(talk.request.body)["model"]
        if self.loads[-1:] != [model]:
            self.loads.append(model)
            if self.tells:
                self.engine.pages["/api/ps"] = orjson.dumps({"models": [{"model": model}]})
        is_there = talk.request.path == CHAT or model == "chat"
        await talk.send(plain(200, b"{}") if is_there else plain(404, b'{"detail":"Not Found"}'))


async def ask(router: FakeRouter, number: int, model: str, path: str) -> None:
    """A client's request, to the end of its answer."""
    body = orjson.dumps({"model": model})
    known = {"Mesh-Model": encode_model(model), "Mesh-Path": path}
    inbox = await router.send_work(number, body, **known)
    await router.answer(inbox)


async def test_an_agent_loads_nothing_and_learns_routes_by_model_from_clients(nats_server) -> None:
    server = OneFits()
    async with running(server.script) as engine, fake_router(nats_server.url) as router:
        server.engine, engine.models = engine, ["emb", "chat"]
        engine.also_serves, engine.pages["/api/ps"] = (MESSAGES,), b'{"models":[]}'
        async with running_agent(
            router, nats_server.url, time.monotonic, engine_url=engine.url, engine_kind="openai"
        ):
            beat = await router.state(loadable={"emb": None, "chat": None})
            assert beat.routes is not None and beat.routes.unknown == (MESSAGES,)
            assert server.loads == []
            await ask(router, 1, "chat", CHAT)
            first: Heartbeat = await router.state(served_total=1)
            await router.until(lambda: "chat" not in router.beats[-1].loadable)
            assert first.models == ("emb", "chat") and server.loads == ["chat"]
            await ask(router, 2, "chat", MESSAGES)
            await router.state(paths=(MESSAGES,))
            await ask(router, 3, "emb", MESSAGES)
            await router.until(lambda: router.beats[-1].routes is not None)
            await router.until(lambda: router.beats[-1].routes.lacking == {"emb": (MESSAGES,)})
            await ask(router, 4, "chat", MESSAGES)
    assert server.loads == ["chat", "emb", "chat"], "what clients asked for, and nothing else"


STEP_S, STEPS = 60.0, 30  # half an hour, in which Ollama unloads an idle model six times


@pytest.mark.parametrize(
    ("models", "page", "used"),
    [
        (["a"], b'{"models":[]}', None),
        (["a", "b"], b'{"models":[]}', None),
        (["a", "b"], None, None),
        (["a", "b"], b'{"models":[]}', "a"),  # it stays loaded
        (["a", "b"], None, "a"),
    ],
)
async def test_an_idle_engine_gets_no_request_that_generates_and_may_rest(
    nats_server, monkeypatch, models, page, used
) -> None:
    monkeypatch.setattr(scrape_pace, "IDLE_S", 0.01)
    monkeypatch.setattr(scrape_pace, "REST_S", 0.01)
    server, passed_s = OneFits(), 0.0
    async with running(server.script) as engine, fake_router(nats_server.url) as router:
        server.engine, engine.models, engine.also_serves = engine, models, tuple(OPTIONAL_PATHS)
        if page is not None:
            engine.pages["/api/ps"] = page
        else:
            server.tells = False
        async with running_agent(
            router,
            nats_server.url,
            lambda: time.monotonic() + passed_s,
            engine_url=engine.url,
            engine_kind="openai",
            speed_probe=True,
        ):
            if used is not None:
                await ask(router, 1, used, CHAT)
            for _ in range(STEPS):
                passed_s += STEP_S
                seen = len(engine.scrapes)
                await until(lambda seen=seen: len(engine.scrapes) > seen)
            await router.state()  # a moment in which the last one would arrive
            generating = [one.path for one in engine.requests if one.body]
    assert generating == ([] if used is None else [CHAT]), "what a client asked for alone"
