"""Tokens at a real router, whose issuer's keys come over HTTP: changed, and away."""

import json
import time
from contextlib import asynccontextmanager

import jwt
import openai
import orjson
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec

from infra.auth_table import AuthTable, JwtTable
from mesh.runtime import token_signers
from tests.mesh.runtime.test_keys_required import HELLO, openai_client, until_keys_are_read
from tests.support.small_mesh import PATIENT, chat, one_replica, post

FIRST, SECOND, THIRD = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))


class Issuer:
    """Lists the keys that it is given. `asked`: how often it was."""

    def __init__(self) -> None:
        self.keys, self.asked, self.url = {"first": FIRST}, 0, ""
        self.status, self.padding = 200, ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response(listed(self.keys) | {"x": self.padding}, status=self.status)


def listed(keys) -> dict:
    """A JWK Set of these keys by their ids."""
    to_jwk = jwt.algorithms.ECAlgorithm.to_jwk
    return {
        "keys": [json.loads(to_jwk(key.public_key())) | {"kid": kid} for kid, key in keys.items()]
    }


@asynccontextmanager
async def issuing():
    issuer, app = Issuer(), web.Application()
    app.router.add_get("/jwks", issuer.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}/jwks"
    try:
        yield issuer
    finally:
        await runner.cleanup()


def token(key, kid: str, **claims) -> str:
    now = time.time()
    kept = {"iss": "https://id", "aud": "mesh", "exp": now + 600, "sub": "someone"}
    said = kept | {"tenant": "acme", "scope": "inference"} | claims
    return jwt.encode(said, key, "ES256", headers={"kid": kid})


@pytest.fixture
async def issuer():
    async with issuing() as made:
        yield made


@asynccontextmanager
async def taking_tokens(nats_server, jwks: str):
    """us, which reads the issuer's keys there."""
    table = JwtTable(issuer="https://id", audience="mesh", jwks=jwks, algorithms=("ES256",))
    auth = AuthTable(required=True, jwt=table)
    async with one_replica(nats_server, auth=auth, **PATIENT) as made:
        await until_keys_are_read(made)
        signers = made.routers["us"].requests.signers
        await made.until(lambda: signers._tried_at > float("-inf"), "the issuer's keys")
        yield made


@pytest.fixture
async def mesh(nats_server, issuer):
    async with taking_tokens(nats_server, issuer.url) as made:
        yield made


async def asked(mesh, key: str) -> str:
    status, body, _ = await post(mesh, chat(), authorization=f"Bearer {key}")
    return "ok" if status == 200 else orjson.loads(body)["error"]["code"]


async def test_openais_client_may_send_a_token(mesh):
    async with openai_client(mesh, token(FIRST, "first")) as api:
        assert (await api.chat.completions.create(model="tiny", messages=HELLO)).choices
        assert mesh.sample("us", "mesh_requests_total", outcome="ok", tenant="acme") == 1
    async with openai_client(mesh, token(SECOND, "first")) as api:
        with pytest.raises(openai.AuthenticationError, match="this token is not valid"):
            await api.chat.completions.create(model="tiny", messages=HELLO)


async def test_a_new_key_of_the_issuer_is_found_and_made_up_ones_do_not_have_it_asked(
    mesh, issuer, monkeypatch
):
    signers = mesh.routers["us"].requests.signers
    issuer.keys = {"second": SECOND}
    before = issuer.asked
    for number in range(5):
        assert await asked(mesh, token(THIRD, f"made-up-{number}")) == "invalid_api_key"
    assert issuer.asked == before, "it was asked a moment ago"
    monkeypatch.setattr(signers, "_tried_at", float("-inf"))
    assert await asked(mesh, token(SECOND, "second")) == "ok"
    assert await asked(mesh, token(FIRST, "first")) == "invalid_api_key", "it is listed no more"
    assert issuer.asked == before + 1


@pytest.mark.parametrize(
    "away", [{"status": 503}, {"padding": "x" * token_signers.SET_BYTES_MAX}, {"keys": {}}]
)
async def test_an_issuer_that_is_away_is_told_and_its_last_keys_hold_for_a_day(
    mesh, issuer, monkeypatch, away
):
    requests = mesh.routers["us"].requests
    signers = requests.signers
    for name, value in away.items():
        setattr(issuer, name, value)
    monkeypatch.setattr(signers, "_tried_at", float("-inf"))
    await signers.read_again()
    assert "jwks of [auth.jwt] can't be read" in requests.readiness().problem
    assert await asked(mesh, token(FIRST, "first")) == "ok"
    monkeypatch.setattr(signers, "_read_at", signers._clock() - token_signers.KEPT_S - 1.0)
    monkeypatch.setattr(signers, "_tried_at", float("-inf"))
    await signers.read_again()
    assert await asked(mesh, token(FIRST, "first")) == "api_keys_unread"
    issuer.status, issuer.padding, issuer.keys = 200, "", {"first": FIRST}
    monkeypatch.setattr(signers, "_tried_at", float("-inf"))
    assert await asked(mesh, token(FIRST, "first")) == "ok"
    assert requests.readiness().problem is None


async def test_the_issuers_keys_may_come_from_a_file(nats_server, tmp_path, monkeypatch):
    """One that is changed, removed, or too large."""
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps(listed({"first": FIRST})))
    async with taking_tokens(nats_server, str(file)) as mesh:
        requests = mesh.routers["us"].requests
        assert await asked(mesh, token(FIRST, "first")) == "ok"
        assert await asked(mesh, token(SECOND, "second")) == "invalid_api_key"
        file.write_text(json.dumps(listed({"second": SECOND})))
        monkeypatch.setattr(requests.signers, "_tried_at", float("-inf"))
        assert await asked(mesh, token(SECOND, "second")) == "ok"
        assert await asked(mesh, token(FIRST, "first")) == "invalid_api_key"
        for unreadable in (lambda: file.unlink(), lambda: file.write_bytes(b" " * 2**20)):
            unreadable()
            monkeypatch.setattr(requests.signers, "_tried_at", float("-inf"))
            await requests.signers.read_again()
            assert "jwks of [auth.jwt] can't be read" in requests.readiness().problem
            assert await asked(mesh, token(SECOND, "second")) == "ok"
