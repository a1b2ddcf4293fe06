"""A real agent beside an engine that loads models on demand and holds one of them."""

import asyncio
import time

import orjson
import pytest

from agents.core import engine_health, engine_watch, scrape_pace
from agents.runtime import agent
from schemas.engine_routes import OPTIONAL_PATHS
from schemas.exchange import H_MODEL, Outcome
from schemas.http import CHAT, MESSAGES
from schemas.state import DownReason, Heartbeat, ReplicaState
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


BEATS = 20  # two seconds, ten times the patience of a test
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


def states(server: OneFits, state: str) -> None:
    """llama-swap's page, with "b" in that state."""
    row = {"model": "b", "state": state}
    server.engine.pages["/running"] = orjson.dumps({"running": [row]})


def listed(server: OneFits, state: str) -> None:
    """As llama.cpp's router mode and transformers serve tell it."""
    rows = [{"id": "a", "status": "unloaded"}, {"id": "b", "status": {"value": state}}]
    server.engine.raw_pages["/v1/models"] = plain(200, orjson.dumps({"data": rows}))


def running_models(server: OneFits, state: str) -> None:
    """Ollama lists what is loaded alone."""
    rows = [{"model": "b"}] if state == "ready" else []
    server.engine.pages["/api/ps"] = orjson.dumps({"models": rows})


@pytest.mark.parametrize("tell", [states, listed, running_models])
@pytest.mark.parametrize("state", ["loading", "ready"])
async def test_a_load_longer_than_the_patience_is_no_hang(
    nats_server, monkeypatch, tell, state
) -> None:
    """Where the model is loaded, an engine that is silent for as long hangs."""
    for module in (engine_health, engine_watch):
        monkeypatch.setattr(module, "BLIND_S", 0.2)
    monkeypatch.setattr(agent, "PROBE_TIMEOUT_S", 0.2)
    answers, gate = iter([True]), asyncio.Event()

    async def script(talk: Conversation) -> None:
        if talk.request.body and not next(answers, False):
            await gate.wait()
        await talk.send(plain(200, b"{}"))

    server = OneFits()
    async with running(script) as engine, fake_router(nats_server.url) as router:
        server.engine, engine.models = engine, ["a", "b"]
        tell(server, "ready")
        async with running_agent(
            router, nats_server.url, engine_url=engine.url, engine_kind="openai"
        ):
            await ask(router, 1, "b", CHAT)  # so it is known that "b" answers
            tell(server, state)
            await router.until(
                lambda: (
                    ("b" in router.beats[-1].loadable | router.beats[-1].loading)
                    == (state == "loading")
                )
            )
            body, headers = orjson.dumps({"model": "b"}), {H_MODEL: encode_model("b")}
            inbox = await router.send_work(2, body, **headers)
            if state == "ready":
                await router.state(state=ReplicaState.DOWN, down_reason=DownReason.HUNG)
                gate.set()
                return
            await router.state(outstanding=1)
            since = len(router.beats)
            await router.until(lambda: len(router.beats) > since + BEATS)
            assert {beat.state for beat in router.beats[since:]} == {ReplicaState.READY}
            assert all("b" in beat.loading for beat in router.beats[since:])
            assert sum(bool(one.body) for one in engine.requests) == 2, "it is not probed"
            gate.set()
            assert (await router.answer(inbox)).outcome == Outcome.DONE
