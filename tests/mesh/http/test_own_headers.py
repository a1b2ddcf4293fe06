"""What must stand alone is read from real HTTP, line by line."""

from contextlib import asynccontextmanager

import aiohttp
import pytest

from mesh.adapters.refused import RequestRefused
from mesh.http.http_request import Answer
from mesh.http.read_request import check_given_once, check_header_names
from mesh.http.server import HttpServer
from schemas.http import H_DECISION, H_REGION, H_REQUEST_ID, ONCE_ONLY, Fault


@asynccontextmanager
async def door():
    """Answers with the header that it complains of."""

    async def handle(request):
        try:
            check_header_names(request.headers)
            check_given_once(request.lines)
        except RequestRefused as problem:
            assert problem.fault is Fault.INVALID
            return Answer(400, {}, f"{problem.param}: {problem.message}".encode())
        return Answer(200, {}, b"fine")

    server = HttpServer(handle)
    await server.listen("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        yield session
    await server.close(0.1)


@pytest.mark.parametrize("name", ONCE_ONLY)
@pytest.mark.parametrize("second", ["eu", "us"])
async def test_a_second_line_is_refused_by_name_whatever_it_says(name, second):
    async with door() as session:
        lines = [(name, "eu"), (name, second)]
        async with session.get("/", headers=lines) as answer:
            assert answer.status == 400
            assert await answer.text() == f"{name}: {name} is given 2 times; give it once"
        async with session.get("/", headers=lines[:1]) as answer:
            assert answer.status == 200


async def test_a_list_in_one_line_and_headers_that_decide_nothing_may_pass():
    async with door() as session:
        lines = [(ONCE_ONLY[0], "eu,us"), (H_REQUEST_ID, "a"), (H_REQUEST_ID, "b"), ("via", "x")]
        async with session.get("/", headers=lines) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("X-Mesh-Residancy", 'did you mean "x-mesh-residency"?'),
        ("x-mesh-sesion", 'did you mean "x-mesh-session"?'),
    ],
)
async def test_a_header_of_ours_that_nobody_knows_is_refused_with_the_nearest_name(name, hint):
    async with door() as session, session.get("/", headers={name: "eu"}) as answer:
        assert answer.status == 400
        text = await answer.text()
        assert text == f"{name.lower()}: unknown header {name.lower()}; {hint}"


@pytest.mark.parametrize(
    "name",
    [
        "x-mesh_residency",
        "x_mesh_residency",
        "X_Mesh-Residency",
        "x-meshresidency",
        "x--mesh-residency",
        "x.mesh.residency",
        "xmesh-residency",
        "mesh-residency",
        "Mesh_Residency",
    ],
)
async def test_a_header_of_ours_with_other_separators_is_misspelt_too(name):
    """Proxies and CGI write underscores for hyphens; the label in it must not be lost."""
    async with door() as session, session.get("/", headers={name: "eu"}) as answer:
        assert answer.status == 400
        lower = name.lower()
        hint = 'did you mean "x-mesh-residency"?'
        assert await answer.text() == f"{lower}: unknown header {lower}; {hint}"


async def test_headers_of_others_pass():
    names = ("x-meshuggah", "mesh-id", "x-request-mesh", "mesh", "x-messages")
    async with door() as session, session.get("/", headers=dict.fromkeys(names, "1")) as answer:
        assert answer.status == 200, await answer.text()


async def test_a_header_far_from_any_other_is_told_all_there_are():
    async with door() as session, session.get("/", headers={"x-mesh-foo": "1"}) as answer:
        text = await answer.text()
    assert text.startswith("x-mesh-foo: unknown header x-mesh-foo; there are x-mesh-residency, ")


@pytest.mark.parametrize("name", [H_REGION, H_DECISION])
async def test_a_header_of_answers_is_told_to_be_one(name):
    async with door() as session, session.get("/", headers={name: "eu"}) as answer:
        assert answer.status == 400
        assert await answer.text() == f"{name}: {name} is a header of answers; leave it out"
