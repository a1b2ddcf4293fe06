"""`mesh-agent probe`: simulated engines in their flavours, and engines' recorded pages."""

import asyncio
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from agents.adapters.engine_probe import LOADED_ASKED_MAX
from agents.cli import main
from agents.simserver.metrics import PageKind
from schemas.engine_routes import TRANSCRIPTIONS
from schemas.http import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, POOLING, RERANK
from tests.agents.simserver.support import config, running
from tests.support.ports import free_ports
from tests.support.small_mesh import small_mesh
from tests.support.until import PATIENCE_S

PAGES = Path(__file__).parents[2] / "data" / "server_metrics"


async def probe(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["probe", *words])


async def found(url: str, *words: str, rc: int = 0) -> dict:
    result = await probe(url, "--json", *words)
    assert result.exit_code == rc, result.output
    return orjson.loads(result.output)


@pytest.mark.parametrize(
    ("page", "kind"),
    [(PageKind.VLLM, "vllm"), (PageKind.SGLANG, "sglang"), (PageKind.NONE, "openai")],
)
async def test_each_flavour_of_the_simulated_engine(page, kind):
    async with running(config(models=("tiny",), metrics=page)) as engine:
        facts = await found(engine.url)
        result = await probe(engine.url)
    assert (facts["kind"], facts["models"]) == (kind, ["tiny"])
    assert {EMBEDDINGS, MESSAGES, TRANSCRIPTIONS} <= set(facts["paths"])
    assert POOLING not in facts["paths"]
    assert facts["unsettled"] == []
    assert facts["signals"]["running"] is (kind != "openai")
    assert facts["environment"] == [f"ENGINE_KIND={kind}", f"ENGINE_URL={engine.url}"]
    if kind == "vllm":
        assert facts["version"] == "simulated"
    assert f"ENGINE_KIND={kind} ENGINE_URL={engine.url} > /etc/mesh/agents/" in result.output
    assert "add MESH_BATCH_MAX=N" in result.output


class Recorded:
    """A server with the pages of an engine, which answers chats."""

    def __init__(self, pages: dict[str, bytes], key: str = "") -> None:
        self._pages, self._key = pages, key
        self.chats: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return web.Response(status=401)
        if (request.method, request.path) == ("POST", CHAT):
            self.chats.append(orjson.loads(await request.read())["model"])
            return web.json_response({})
        page = self._pages.get(request.path) if request.method == "GET" else None
        return web.Response(status=404) if page is None else web.Response(body=page)

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


MODELS = {"/v1/models": b'{"data": [{"id": "m", "max_model_len": 4096}]}'}
RECORDED = {
    "llamacpp_metrics_real.txt": ("llamacpp", {"/props": "llamacpp_props_real.json"}),
    "sglang_0.5.10_datadog_condensed.txt": (
        "sglang",
        {"/get_server_info": "sglang_server_info_condensed.json"},
    ),
    "sglang_0.5.23_cpu_condensed.txt": (
        "sglang",
        {"/server_info": "sglang_0.5.23_server_info_condensed.json"},
    ),
    "sglang_docs_production_metrics.txt": ("sglang", {}),
    "vllm_datadog_opt125m_excerpt.txt": ("vllm", {}),
    "vllm_v1_openshift_idle_excerpt.txt": ("vllm", {}),
    "vllm_v1_prefix_counters_4090_excerpt.txt": ("vllm", {}),
}


@pytest.mark.parametrize(("name", "kind", "settings"), [(n, *r) for n, r in RECORDED.items()])
async def test_a_recorded_page_tells_its_kind(name, kind, settings):
    pages = {path: (PAGES / file).read_bytes() for path, file in settings.items()}
    async with Recorded({"/metrics": (PAGES / name).read_bytes(), **pages, **MODELS}) as url:
        facts = await found(url)
        result = await probe(url)
    assert (facts["kind"], facts["seen_kind"]) == (kind, kind)
    assert any(facts["signals"].values())
    assert facts["cards"]["m"]["max_model_len"] == 4096
    assert "m, 4096 tokens of context" in result.output
    if settings:
        assert facts["signals"]["batch_max"], "the settings show it"


@pytest.mark.parametrize(
    ("path", "file", "kind", "option"),
    [
        ("/props", "llamacpp_props_real.json", "llamacpp", "--metrics"),
        ("/server_info", "sglang_server_info_condensed.json", "sglang", "--enable-metrics"),
        ("/get_server_info", "sglang_server_info_condensed.json", "sglang", "--enable-metrics"),
    ],
)
async def test_without_its_metrics_page_it_is_named_and_served_as_any_other(
    path, file, kind, option
):
    async with Recorded({path: (PAGES / file).read_bytes(), **MODELS}) as url:
        facts = await found(url)
    assert (facts["kind"], facts["seen_kind"]) == ("openai", kind)
    assert any(f"start it with {option}" in line for line in facts["advice"])


async def test_a_page_elsewhere_is_in_the_lines_for_the_agent():
    page = {"/stats": (PAGES / "vllm_v1_openshift_idle_excerpt.txt").read_bytes()}
    async with Recorded(page) as metrics, Recorded(MODELS) as url:
        facts = await found(url, "--metrics-url", metrics + "/stats")
    assert facts["kind"] == "vllm"
    assert f"METRICS_URL={metrics}/stats" in facts["environment"]


async def test_a_key_is_asked_for_and_taken(tmp_path):
    file = tmp_path / "key"
    file.write_text("secret")
    file.chmod(0o600)
    async with Recorded(MODELS, key="secret") as url:
        refused = await probe(url)
        facts = await found(url, "--engine-key-file", str(file))
    assert (refused.exit_code, "requires an API key" in refused.output) == (1, True)
    assert facts["models"] == ["m"]


async def test_a_router_is_no_engine(nats_server):
    """An agent for it would send the mesh's requests back to the mesh."""
    async with small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us")
        result = await probe(mesh.urls["us"])
    assert (result.exit_code, "is a router of a mesh" in result.output) == (1, True)


class Answering(Recorded):
    """An engine whose pages answer, and whose requests as told by path; others with 404."""

    def __init__(self, answers: dict[str, int], other: int = 404) -> None:
        super().__init__(MODELS)
        self.answers, self.other = answers, other

    async def answer(self, request: web.Request) -> web.Response:
        if request.method != "POST":
            return await super().answer(request)
        status = self.answers.get(request.path, self.other)
        return web.json_response({"error": {"message": "no\n \x1b[2Jsuch"}}, status=status)


async def test_an_engine_that_fails_a_chat_is_not_to_be_installed():
    async with Answering({}, other=500) as url:
        facts = await found(url, rc=1)
        result = await probe(url)
    assert facts["trial"]["problem"] == "HTTP 500: no [2Jsuch"
    assert (facts["trial"]["answered"], facts["environment"]) == (None, [])
    assert result.exit_code == 1
    assert (
        "\nm fails a chat: HTTP 500: no [2Jsuch; it serves nobody: read its log\n" in result.output
    )
    assert "install" not in result.output and "/v1/audio" not in result.output


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({CHAT: 200}, "m answers a chat"),
        (
            {CHAT: 400, COMPLETIONS: 200},
            "m answers a completion, but not a chat: HTTP 400: no [2Jsuch",
        ),
        ({EMBEDDINGS: 200}, "m answers an embedding, but not a chat: HTTP 404: no [2Jsuch"),
        ({RERANK: 200}, f"m answers {RERANK}, but not a chat: HTTP 404: no [2Jsuch"),
        ({CHAT: 429}, "m takes no more at present, a chat: HTTP 429: no [2Jsuch"),
    ],
)
async def test_what_it_answers_of_a_chat_and_what_comes_instead_is_told(answers, says):
    async with Answering(answers) as url:
        result = await probe(url)
    assert result.exit_code == 0
    assert f"\n{says}\n" in result.output and "to install its agent" in result.output


async def test_it_fails_by_the_request_that_it_knows_and_fails():
    async with Answering({COMPLETIONS: 503}) as url:
        result = await probe(url)
    assert (result.exit_code, "m fails a completion: HTTP 503" in result.output) == (1, True)


async def test_a_route_that_is_not_found_out_is_one_calm_line():
    """transformers serve without python-multipart fails a transcription, which nobody sends."""
    async with Answering({CHAT: 200, TRANSCRIPTIONS: 500}) as url:
        text, facts = (await probe(url)).output, await found(url)
    assert facts["failed"] == {TRANSCRIPTIONS: 500}
    [line] = [each for each in text.splitlines() if TRANSCRIPTIONS in each]
    assert line == f"  not found out, which clients' requests will show: {TRANSCRIPTIONS}"
    assert "it fails requests" not in text


async def test_a_key_that_requests_alone_need_is_asked_for():
    """llama.cpp lists its models to everybody."""
    async with Answering({}, other=401) as url:
        result = await probe(url)
    assert (result.exit_code, "requires an API key" in result.output) == (1, True)


@pytest.mark.parametrize("states", [{"a": "unloaded"}, {"a": "loaded", "b": "loading"}])
async def test_no_model_is_sent_a_chat_that_might_have_to_be_loaded_unless_asked(states):
    server = Recorded(listed(**states))
    async with server as url:
        text = (await probe(url)).output
        assert (
            "\nnot sent a chat, as it might load a model for it: --model NAME tries one\n" in text
        )
        assert server.chats == []
        text = (await probe(url, "--model", "a")).output
    assert "\na answers a chat\n" in text
    assert server.chats == ["a"]


async def test_a_model_that_the_engine_can_not_list_is_tried_and_given_to_its_agent():
    async with Recorded({"/v1/models": b'{"data": []}'}) as url:
        facts = await found(url, "--model", "m")
    assert (facts["models"], facts["trial"]["answered"]) == (["m"], CHAT)
    assert "MESH_ENGINE_MODELS=m" in facts["environment"]


async def test_several_models_of_which_it_does_not_say_which_is_loaded_are_sent_no_chat():
    server = Recorded({"/v1/models": b'{"data": [{"id": "a"}, {"id": "b"}]}'})
    async with server as url:
        assert (await found(url))["trial"] is None
    assert server.chats == []


@pytest.mark.parametrize(
    "page", [b'{"error": "no [2Jsuch path"}', b"<html>", b'{"data": []}', b"[1]"]
)
async def test_an_engine_that_answers_any_path_is_no_router(page):
    async with Recorded({"/v1/regions": page, **MODELS}) as url:
        assert (await found(url))["models"] == ["m"]


async def test_where_no_engine_is_the_error_says_what_there_is():
    [port] = free_ports(1)
    nothing = await probe(f"http://127.0.0.1:{port}")
    assert (nothing.exit_code, "is the engine running there?" in nothing.output) == (1, True)
    async with Recorded({}) as url:
        other = await probe(url)
    assert "answers HTTP 404" in other.output
    for page in (b'{"data": []}', b'{"data": null}', b"", b"\n"):
        async with Recorded({"/v1/models": page}) as url:
            empty = await probe(url)
        says = "lists no model: pull one, or give --model NAME"
        assert (empty.exit_code, says in empty.output) == (1, True)
    for given in ("engine:8000", "http://127.0.0.1:1/v1"):
        wrong = await probe(given)
        assert (wrong.exit_code, "URL" in wrong.output) == (2, True)


async def test_an_engine_that_loads_on_demand_shows_what_is_loaded_and_what_is_not_known():
    models = (
        b'{"data":[{"id":"a","status":{"value":"loaded"}},{"id":"b:latest","status":"unloaded"}]}'
    )
    async with Recorded({"/v1/models": models}) as url:
        text, facts = (await probe(url)).output, await found(url)
    assert facts["models"] == ["a", "b:latest", "b"]
    assert facts["loaded"] == {"a": True, "b:latest": False, "b": False}
    assert "  a, loaded\n" in text and "  b:latest, not loaded\n" in text
    assert facts["untold"] == facts["paths"] == [], "each is 404 without a body"


HAS = {MESSAGES: "chat", EMBEDDINGS: "emb"}


def listed(**states: str) -> dict[str, bytes]:
    rows = [{"id": name, "status": state} for name, state in states.items()]
    return {"/v1/models": orjson.dumps({"data": rows})}


class OfModels(Recorded):
    """Answers each path for one of its models. `asked`: for which, and on which path."""

    def __init__(self, pages: dict[str, bytes], *, without_body: int = 400) -> None:
        super().__init__(pages)
        self.without_body = without_body
        self.asked: list[tuple[str, str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        if request.method != "POST" or request.path not in HAS:
            return await super().answer(request)
        if not (body := await request.read()):
            return web.Response(status=self.without_body)
        model = orjson.loads(body)["model"]
        self.asked.append((model, request.path))
        return web.json_response({}, status=await self.status(request, model))

    async def status(self, request: web.Request, model: str) -> int:
        return 200 if model == HAS[request.path] else 404


async def test_loaded_models_with_different_routes_show_each_its_own():
    loaded = {"chat": "loaded", "emb": "loaded"}
    server = OfModels(listed(**loaded))
    async with server as url:
        text, facts = (await probe(url)).output, await found(url)
        assert (facts["paths"], facts["untold"]) == ([EMBEDDINGS, MESSAGES], [])
        assert facts["lacking"] == {"chat": [EMBEDDINGS], "emb": [MESSAGES]}
        assert f"  {EMBEDDINGS}, {MESSAGES}\n" in text
        assert f"  not of chat: {EMBEDDINGS}\n  not of emb: {MESSAGES}\n" in text
        server._pages |= listed(**loaded, cold="unloaded")
        facts = await found(url)
    assert facts["untold"] == [EMBEDDINGS, MESSAGES], "of the one that is not loaded"
    assert facts["lacking"] == {"chat": [EMBEDDINGS], "emb": [MESSAGES]}
    assert "cold" not in dict(server.asked), "it would be loaded for that"


async def test_no_more_than_some_of_the_loaded_models_are_asked():
    names = [f"m{number}" for number in range(LOADED_ASKED_MAX + 1)]
    async with OfModels(listed(**dict.fromkeys(names, "loaded"))) as url:
        facts = await found(url)
    assert list(facts["lacking"]) == names[:-1]
    assert facts["untold"] == [EMBEDDINGS, MESSAGES], "nothing is known of the last one"


LATE = "note: not found out which routes these models have, as they answered late or may be"


class Changing(OfModels):
    """Whose list of models is another one once a model was asked."""

    def __init__(self, before: dict[str, bytes], after: dict[str, bytes]) -> None:
        super().__init__(before)
        self.after = after

    async def status(self, request: web.Request, model: str) -> int:
        self._pages |= self.after
        return await super().status(request, model)


@pytest.mark.parametrize("emb, other", [("unloaded", "loaded"), ("loaded", "loading")])
async def test_no_model_is_asked_that_would_be_loaded_by_then(emb, other):
    before = listed(chat="loaded", emb="loaded", other="unloaded")
    server = Changing(before, listed(chat="loaded", emb=emb, other=other))
    async with server as url:
        text = (await probe(url)).output
    assert dict(server.asked).keys() == {"chat"}
    assert f"{LATE} loaded no more: emb\n" in text


class Cutting(OfModels):
    async def status(self, request: web.Request, model: str) -> int:
        if model == "cut":
            request.transport.close()
        return await super().status(request, model)


async def test_a_model_that_does_not_answer_is_asked_no_more_and_others_are():
    server = Cutting(listed(cut="loaded", chat="loaded"))
    async with server as url:
        facts = await found(url)
    assert len({path for model, path in server.asked if model == "cut"}) == 1
    assert (facts["paths"], facts["unfinished"]) == ([MESSAGES], ["cut"])


class Silent(OfModels):
    async def status(self, request: web.Request, model: str) -> int:
        return await asyncio.Future()


async def test_asking_models_has_an_end_which_is_told(monkeypatch):
    monkeypatch.setattr("agents.adapters.optional_paths.PATIENCE_S", 10 * PATIENCE_S)
    monkeypatch.setattr("agents.adapters.engine_probe.LOADED_ASKED_S", 0.5)
    async with Silent(listed(chat="loaded", emb="loaded")) as url:
        text = (await probe(url)).output
    assert f"{LATE} loaded no more: chat, emb\n" in text


async def test_what_models_tell_is_found_out():
    """Though the server's answers to no body did not tell."""
    async with OfModels(listed(chat="loaded", emb="loaded"), without_body=503) as url:
        text, facts = (await probe(url)).output, await found(url)
    assert (facts["paths"], facts["unsettled"]) == ([EMBEDDINGS, MESSAGES], [])
    assert (facts["failed"], facts["unfinished"]) == ({}, [])
    assert "not found out" not in text


class Ill(OfModels):
    """One of its models fails all requests."""

    async def status(self, request: web.Request, model: str) -> int:
        return 500 if model == "ill" else await super().status(request, model)


@pytest.mark.parametrize("names", [("chat", "ill"), ("ill", "chat")])
async def test_a_path_fails_that_some_model_fails_and_none_answers(names):
    async with Ill(listed(**dict.fromkeys(names, "loaded"))) as url:
        facts = await found(url)
    assert (facts["paths"], facts["failed"]) == ([MESSAGES], {EMBEDDINGS: 500})
