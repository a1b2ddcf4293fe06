"""A page in a browser may call where its origin is listed, and reads errors and streams as well."""

import pytest

from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, small_mesh

CHAT, APP = "/v1/chat/completions", "https://app.example.com"
ALLOW = "access-control-allow-origin"


@pytest.fixture
async def mesh(nats_server):
    async with scripted_engine() as engine, small_mesh({"us": nats_server}) as mesh:
        await mesh.router("us", **PATIENT, cors_origins=(APP,))
        await mesh.router("us", "r2", **PATIENT)
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        await mesh.until_ready("us/r2", 1)
        yield mesh


async def asked(mesh, origin: str, router: str = "us") -> list[tuple[int, str | None]]:
    """Of a plain answer, a stream, an error, a path that is none, and an own page."""
    headers = {"origin": origin}
    url, got = mesh.urls[router], []
    async with client() as session:
        for body in (chat(), chat(stream=True), {"model": 7}):
            async with session.post(url + CHAT, json=body, headers=headers) as answer:
                got.append((answer.status, answer.headers.get(ALLOW)))
        for path in ("/nothing", "/v1/models"):
            async with session.get(url + path, headers=headers) as answer:
                got.append((answer.status, answer.headers.get(ALLOW)))
    return got


async def test_a_listed_origin_reads_all_answers_and_others_none(mesh):
    statuses = (200, 200, 400, 404, 200)
    assert await asked(mesh, APP) == [(status, APP) for status in statuses]
    assert await asked(mesh, "https://x.org") == [(status, None) for status in statuses]


async def test_it_is_off_by_default(mesh):
    assert {allowed for _, allowed in await asked(mesh, APP, "us/r2")} == {None}
    url = mesh.urls["us/r2"] + CHAT
    async with client() as session, session.options(url, headers={"origin": APP}) as answer:
        assert answer.status == 405


@pytest.mark.parametrize(
    ("path", "methods"), [(CHAT, "POST"), ("/v1/models/tiny", "GET"), (CHAT + "/", "POST")]
)
async def test_a_preflight_is_answered_for_the_path(mesh, path, methods):
    headers = {
        "origin": APP,
        "access-control-request-method": methods,
        "access-control-request-headers": "authorization",
    }
    async with client() as session:
        async with session.options(mesh.urls["us"] + path, headers=headers) as answer:
            assert (answer.status, await answer.read()) == (204, b"")
            assert answer.headers[ALLOW] == APP
            assert answer.headers["access-control-allow-methods"] == methods
            assert answer.headers["access-control-allow-headers"] == "authorization"
        headers["origin"] = "https://x.org"
        async with session.options(mesh.urls["us"] + path, headers=headers) as answer:
            assert (answer.status, answer.headers.get(ALLOW)) == (405, None)
