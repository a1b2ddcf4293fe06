"""What the router serves over real HTTP is what the OpenAPI document tells."""

import time

import aiohttp
import jsonschema
import pytest
from prometheus_client import CollectorRegistry

from docs.openapi import document
from mesh.adapters.ended_requests import EndedRequests
from mesh.adapters.refused import RequestRefused
from mesh.http.read_request import BodyBudget
from mesh.http.routes import HttpApi
from mesh.http.server import HttpServer
from schemas.http import H_ALLOW, H_RETRY_AFTER, Fault, Location, Readiness, Region, Routing
from schemas.ids import ModelId, RegionId, RouterId
from schemas.routes import ROUTES
from schemas.state import Health, ModelCard

DOCUMENT = document()
OPERATIONS = [
    (method.upper(), path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]


REGION = Region(
    name=RegionId("us"),
    home=True,
    health=Health.GREEN,
    heard_s=None,
    rtt_s=0.0,
    jitter_s=None,
    loss_ratio=None,
    accepting=True,
    replicas_ready=1,
    replicas_free=0,
    queue=2,
    models=(ModelId("org/model-1.5"),),
    endpoint=None,
    location=Location(38.9, -77.5),
    routing=Routing(policy="mesh", ordered=("pushing",), refused=None),
    distance_km=None,
    rtt_estimate_s=None,
)


class StubDoor:
    """A front door with one model behind it and nobody to answer for it."""

    bodies = BodyBudget()
    ended = EndedRequests(RegionId("us"), RouterId("r1"), time.monotonic)

    def has_listened(self):
        return True

    def models(self):
        return (ModelId("org/model-1.5"),)

    def model_card(self, model):
        return ModelCard(root="/models/x", max_model_len=4096)

    def regions(self, near):
        assert near is None
        return (REGION,)

    def admit(self, parsed, headers, caller, changed):
        self.bodies.give_back(parsed.kept_bytes)
        raise RequestRefused(Fault.MODEL_UNKNOWN, "the model is not served here", "model")

    def not_ready_because(self):
        return Fault.NO_REPLICA, "no replica is ready"

    def readiness(self):
        return Readiness(warm=False)


@pytest.fixture
async def face():
    api = HttpApi(RegionId("us"), StubDoor(), CollectorRegistry())
    server = HttpServer(api.handle, completions=api.completions)
    await server.listen("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        yield session
    await server.close(0.1)


def schema(name):
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


@pytest.mark.parametrize(
    ("method", "path", "operation"), OPERATIONS, ids=[f"{m} {p}" for m, p, _ in OPERATIONS]
)
async def test_every_documented_operation_is_served_as_documented(face, method, path, operation):
    asked = path.replace("{model}", "org/model-1.5")
    async with face.request(method, asked, data=b"[]" if method == "POST" else None) as answer:
        told = operation["responses"].get(str(answer.status))
        assert told is not None, f"{answer.status} is not documented"
        assert {name for name in told["headers"] if name in answer.headers} >= {
            "x-request-id",
            "x-mesh-region",
        }
        assert answer.content_type in told["content"]
        if answer.content_type == "application/json":
            name = told["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
            jsonschema.Draft202012Validator(schema(name)).validate(await answer.json())
        if answer.status in (429, 503):
            assert int(answer.headers[H_RETRY_AFTER]) >= 1


async def test_no_other_path_is_served(face):
    async with face.get("/v1/unheard-of") as answer:
        assert answer.status == Fault.PATH_UNKNOWN.value.status
        error = (await answer.json())["error"]
    assert error["code"] == Fault.PATH_UNKNOWN.value.code
    assert all(route.path in error["message"] for route in ROUTES)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/responses/compact", "/v1/responses/input_tokens", "/v1/responses/compact/cancel"),
        "/v1/messages/batches",
    ],
)
async def test_another_path_of_the_api_is_not_taken_for_an_id(face, method, path):
    async with face.request(method, path, data=b"{}" if method == "POST" else None) as answer:
        assert answer.status == Fault.PATH_UNKNOWN.value.status
        error = (await answer.json())["error"]
    if "code" in error:  # Anthropic's form has none
        assert error["code"] == Fault.PATH_UNKNOWN.value.code


@pytest.mark.parametrize("name", ["abc", "deadbeef", "compacted", "resp_compact", "input_tokens_"])
@pytest.mark.parametrize("before", ["/v1/responses/", "/v1/files/", "/v1/batches/"])
async def test_an_id_may_be_letters_only(face, before, name):
    async with face.request("PUT", before + name) as answer:
        assert answer.status == Fault.METHOD_WRONG.value.status
        assert "GET" in answer.headers[H_ALLOW]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_no_other_method_is_served(face, route):
    async with face.request("PUT", route.path.replace("{model}", "x")) as answer:
        assert answer.status == Fault.METHOD_WRONG.value.status


@pytest.mark.parametrize("path", ["/v1/regions?near=91,0", "/v1/regions?near=", "/v1/regions"])
async def test_a_location_that_is_none_is_the_clients_mistake(face, path):
    headers = {} if "?" in path else {"x-mesh-client-location": "somewhere"}
    async with face.get(path, headers=headers) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, answer.headers["x-mesh-region"]) == (400, "us")
    assert error["param"] == ("near" if "?" in path else "x-mesh-client-location")
    assert "degrees" in error["message"]


async def test_a_header_that_is_said_twice_is_the_clients_mistake_before_anything_is_read(face):
    lines = [("x-mesh-residency", "eu"), ("x-mesh-residency", "us")]
    async with face.post("/v1/completions", headers=lines, data=b"no JSON") as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (400, Fault.INVALID.value.code)
    assert error["param"] == "x-mesh-residency" and "once" in error["message"]
