"""Routers that serve holders of API keys alone, asked by the clients that users have."""

from dataclasses import replace

import anthropic
import openai
import orjson
import pytest

from infra.auth_table import AuthTable
from infra.tenant_table import Caller, key_hash
from mesh.adapters.access_log import AccessLogFormat
from mesh.http.wrong_keys import TRIES
from schemas.keys import Scope
from tests.support.access_lines import Lines
from tests.support.scripted_engine import say, scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, one_replica, post, small_mesh, upload

KEYS = {
    key_hash("sk-acme"): Caller("k1", "acme"),
    key_hash("sk-one-model"): Caller("k2", "acme", models=frozenset({"other"})),
    key_hash("sk-tiny"): Caller("k5", "acme", models=frozenset({"tiny"})),
    key_hash("sk-batch"): Caller("k3", "acme", scopes=frozenset({Scope.BATCH})),
    key_hash("sk-admin"): Caller("k4", "ops", scopes=frozenset({Scope.ADMIN})),
}
HELLO = [{"role": "user", "content": "hello"}]
REQUIRED = AuthTable(required=True)


@pytest.fixture
async def mesh(nats_server):
    async with one_replica(nats_server, keys=KEYS, auth=REQUIRED, **PATIENT) as made:
        await until_keys_are_read(made)
        yield made


async def until_keys_are_read(mesh):
    keys = mesh.routers["us"].requests.keys
    await mesh.until(lambda: keys.is_read, "the keys of the bus")


def openai_client(mesh, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=mesh.urls["us"] + "/v1", api_key=key, max_retries=0)


async def test_openais_client_is_told_what_is_wrong_with_its_key(mesh):
    async with openai_client(mesh, "sk-acme") as api:
        answer = await api.chat.completions.create(model="tiny", messages=HELLO)
        assert answer.choices and [one.id async for one in api.models.list()] == ["tiny"]
    async with openai_client(mesh, "sk-wrong") as api:
        with pytest.raises(openai.AuthenticationError, match="not known here") as wrong:
            await api.chat.completions.create(model="tiny", messages=HELLO)
        assert wrong.value.code == "invalid_api_key" and "sk-wrong" not in str(wrong.value)
        assert wrong.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await api.models.list()
    async with openai_client(mesh, "sk-one-model") as api:
        with pytest.raises(openai.PermissionDeniedError, match="may use other") as model:
            await api.chat.completions.create(model="tiny", messages=HELLO)
        assert (model.value.code, model.value.param) == ("key_not_allowed", "model")
        assert [one.id async for one in api.models.list()] == []
        with pytest.raises(openai.NotFoundError) as gone:
            await api.chat.completions.create(model="other", messages=HELLO)
        assert gone.value.body["message"] == "the model 'other' is not served here"
        with pytest.raises(openai.NotFoundError) as gone:
            await api.models.retrieve("tin")
        assert gone.value.body["message"] == "the model 'tin' is not served here"
    async with openai_client(mesh, "sk-batch") as api:
        with pytest.raises(openai.PermissionDeniedError, match="the scope inference"):
            await api.chat.completions.create(model="tiny", messages=HELLO, stream=True)


async def test_anthropics_client_is_told_in_anthropics_form(nats_server):
    async with small_mesh({"us": nats_server}) as mesh, scripted_engine() as engine:
        engine.behaviour = say("hi")
        await mesh.router("us", keys=KEYS, auth=REQUIRED, **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        await until_keys_are_read(mesh)
        wrong = anthropic.AsyncAnthropic(
            base_url=mesh.urls["us"], api_key="sk-wrong", max_retries=0
        )
        async with wrong as api:
            with pytest.raises(anthropic.AuthenticationError, match="not known here") as told:
                await api.messages.create(model="tiny", max_tokens=5, messages=HELLO)
            assert told.value.body["error"]["type"] == "authentication_error"
        batch = anthropic.AsyncAnthropic(
            base_url=mesh.urls["us"], auth_token="sk-batch", max_retries=0
        )
        async with batch as api:
            with pytest.raises(anthropic.PermissionDeniedError, match="the scope inference"):
                await api.messages.create(model="tiny", max_tokens=5, messages=HELLO)


@pytest.mark.parametrize("adapter", ["others", ["others"], {"a": "tiny"}])
async def test_a_key_for_one_model_names_no_adapter_beside_it(mesh, adapter):
    """SGLang takes an adapter from the body, whatever model that names."""
    body = {**chat(), "lora_path": adapter}
    status, answer, _ = await post(mesh, body, authorization="Bearer sk-tiny")
    assert (status, orjson.loads(answer)["error"]["code"]) == (403, "key_not_allowed")
    for open_to in ({**body, "lora_path": None}, {**body, "lora_path": "tiny"}):
        assert (await post(mesh, open_to, authorization="Bearer sk-tiny"))[0] == 200
    assert (await post(mesh, body, authorization="Bearer sk-acme"))[0] == 200


async def asked(mesh, method: str, path: str, **headers: str) -> tuple[int, str]:
    async with (
        client() as session,
        session.request(method, mesh.urls["us"] + path, headers=headers) as answer,
    ):
        body = await answer.read()
        is_error = answer.status >= 400 and method != "HEAD"
        return answer.status, orjson.loads(body)["error"]["code"] if is_error else ""


async def test_each_route_asks_for_its_scope_and_probes_for_none(mesh):
    acme, batch, admin = ({"x-api-key": f"sk-{name}"} for name in ("acme", "batch", "admin"))
    for path in ("/health", "/ready", "/v1/regions"):
        assert await asked(mesh, "GET", path) == (200, "")
    for path in ("/v1/models", "/metrics", "/v1/files", "/v1/batches", "/v1/responses/resp_1"):
        assert await asked(mesh, "GET", path) == (401, "api_key_missing"), path
    assert await asked(mesh, "GET", "/v1/models", **acme) == (200, "")
    assert await asked(mesh, "GET", "/v1/models", **batch) == (403, "key_not_allowed")
    assert await asked(mesh, "GET", "/metrics", **acme) == (403, "key_not_allowed")
    assert await asked(mesh, "GET", "/metrics", **admin) == (200, "")
    assert await asked(mesh, "GET", "/v1/files", **admin) == (403, "key_not_allowed")
    assert await asked(mesh, "GET", "/v1/files", **batch) == (404, "batch_not_configured")
    assert await asked(mesh, "OPTIONS", "/v1/models") == (405, "method_not_allowed")


async def test_the_access_log_says_why_a_key_is_refused_and_whose_it_is(nats_server, capfd):
    logged = {"access_log": AccessLogFormat.LOGFMT}
    async with one_replica(nats_server, keys=KEYS, auth=REQUIRED, **logged, **PATIENT) as mesh:
        await until_keys_are_read(mesh)
        lines = Lines(capfd)
        for key, name, tenant, why in (
            ("sk-wrong", "unknown", None, "unknown key"),
            ("sk-batch", "scope", "acme", "key k3: this needs a key with the scope inference; "),
            ("sk-one-model", "model", "acme", "key k2: this API key may not use the model 'tiny'"),
        ):
            await post(mesh, chat(), **{"x-api-key": key, "x-request-id": name})
            line = await lines.of(id=name)
            assert line["detail"].startswith(why) and line.get("tenant") == tenant
        assert not any(key in lines.text for key in ("sk-wrong", "sk-batch", "sk-one"))


@pytest.mark.parametrize("size", [10, 200_000])
async def test_a_body_without_a_key_is_not_taken(mesh, size):
    status, body, _ = await post(mesh, chat("x" * size))
    assert (status, orjson.loads(body)["error"]["code"]) == (401, "api_key_missing")
    assert mesh.routers["us"].requests.bodies.taken_bytes == 0
    status, _, _ = await post(mesh, chat("x" * size), authorization="Bearer sk-acme")
    assert status == 200


async def test_too_many_wrong_keys_lock_out_nobody_else(mesh):
    async def ask(session, key: str) -> tuple[int, str | None]:
        headers = {"authorization": f"Bearer {key}"}
        url = mesh.urls["us"] + "/v1/chat/completions"
        async with session.post(url, data=upload(chat()), headers=headers) as answer:
            await answer.read()
            return answer.status, answer.headers.get("retry-after")

    async with client() as session:
        found = [await ask(session, f"sk-{number}") for number in range(int(TRIES) + 1)]
        while found[-1] == (401, None):  # some were regained meanwhile
            found.append(await ask(session, "sk-more"))
        assert len(found) > TRIES and found[0] == (401, None) and found[-1] == (429, "1")
        assert (await ask(session, "sk-acme"))[0] == 200, "from the same address"


async def test_what_mesh_toml_says_holds_from_the_next_request_on(mesh):
    """A reload adds a key, takes one away, and opens the door."""
    router = mesh.routers["us"]
    assert (await post(mesh, chat(), authorization="Bearer sk-new"))[0] == 401
    router.reconfigure(replace(router._config, keys={key_hash("sk-new"): Caller("k", "acme")}))
    assert (await post(mesh, chat(), authorization="Bearer sk-new"))[0] == 200
    assert (await post(mesh, chat(), authorization="Bearer sk-acme"))[0] == 401
    router.reconfigure(replace(router._config, auth=AuthTable()))
    assert (await post(mesh, chat()))[0] == 200
