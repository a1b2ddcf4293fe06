"""Forms with recordings, and routes of engines that only the operator lists."""

import hashlib
from collections.abc import AsyncIterator

import openai
import orjson
import pytest

from mesh.http.form_parts import PARTS_MAX
from schemas.engine_routes import TRANSCRIPTIONS, TRANSLATIONS
from schemas.exchange import LARGE_BYTES
from tests.agents.simserver.support import config, running
from tests.support.nats_pair import nats_pair
from tests.support.small_mesh import PATIENT, SmallMesh, client, small_mesh

LISTED = "/echo"
WAV = b"RIFF" + bytes(64_000)  # two seconds, by its size


@pytest.fixture
async def mesh(nats_server) -> AsyncIterator[SmallMesh]:
    """us, with one simulated engine and one more route of it."""
    async with (
        running(config(models=("tiny",))) as engine,
        small_mesh({"us": nats_server}) as made,
    ):
        await made.router("us", routes=(LISTED,))
        await made.agent("us", "us-0", engine, routes=(LISTED,))
        for path in (TRANSCRIPTIONS, LISTED):
            await made.until_ready("us", 1, f"tiny on {path}")
        yield made


def sdk(mesh: SmallMesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=mesh.urls["us"] + "/v1", api_key="unused", max_retries=0)


async def sent(
    mesh: SmallMesh, path: str, body: bytes, kind: str, region: str = "us"
) -> tuple[int, dict]:
    """The status and the JSON that came back."""
    headers = {"content-type": kind}
    async with (
        client() as session,
        session.post(mesh.urls[region] + path, data=body, headers=headers) as answer,
    ):
        return answer.status, orjson.loads(await answer.read())


async def test_the_sdk_transcribes(mesh):
    async with sdk(mesh) as ai:
        said = await ai.audio.transcriptions.create(model="tiny", file=("a.wav", WAV))
        assert said.text == f"transcribe {len(WAV)} bytes"
        plain = await ai.audio.transcriptions.create(
            model="tiny", file=("a.wav", WAV), response_format="text", language="de"
        )
        assert plain == f"transcribe {len(WAV)} bytes"
        large = bytes(LARGE_BYTES * 3)  # read in another process
        said = await ai.audio.transcriptions.create(model="tiny", file=("a.wav", large))
        assert said.text == f"transcribe {len(large)} bytes"
        with pytest.raises(openai.NotFoundError) as unknown:
            await ai.audio.transcriptions.create(model="none", file=("a.wav", WAV))
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await ai.audio.transcriptions.create(
                model="tiny", file=("a.wav", WAV), response_format="srt"
            )
        assert "response_format" in str(refused.value), "the engine's own error"
    core = mesh.routers["us"].core
    assert not core.inflight
    assert mesh.sample("us", "mesh_output_tokens_total") == 0


def form(*parts: tuple[str, str], end: str = "--b--\r\n") -> bytes:
    head = '--b\r\ncontent-disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    return ("".join(head.format(*part) for part in parts) + end).encode()


KIND = "multipart/form-data; boundary=b"
MODEL, FILE = ("model", "tiny"), ("file", "RIFF")


async def test_a_recording_is_translated(mesh):
    answer = await sent(mesh, TRANSLATIONS, form(MODEL, FILE), KIND)
    assert answer == (200, {"text": "translate 4 bytes"})


BAD = {
    "no model": (form(FILE), KIND, "model"),
    "two models": (form(MODEL, FILE, ("model", "other")), KIND, "model"),
    "an empty model": (form(("model", ""), FILE), KIND, "model"),
    "a model that is too long": (form(("model", "x" * 2000), FILE), KIND, "model"),
    "too many parts": (form(MODEL, *[("x", "y")] * PARTS_MAX), KIND, None),
    "a form that is cut": (form(MODEL, FILE, end=""), KIND, None),
    "another boundary": (form(MODEL, FILE), KIND + "c", None),
    "no boundary": (form(MODEL, FILE), "multipart/form-data", "content-type"),
    "JSON": (b'{"model": "tiny"}', "application/json", "content-type"),
    "a boundary beyond a header": (form(MODEL, FILE), KIND + ";x=" + "y" * 300, "content-type"),
}


@pytest.mark.parametrize(("body", "kind", "param"), BAD.values(), ids=BAD)
async def test_bad_forms_are_a_400_that_names_the_field(mesh, body, kind, param):
    status, answer = await sent(mesh, TRANSCRIPTIONS, body, kind)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_listed_route_gets_the_body_as_it_came_and_no_header_beside(mesh):
    for body, kind in (
        (b'{"model": "tiny",  "query": [1, 2]}', "application/json"),
        (form(MODEL, FILE, ("x", "ü")), KIND),
    ):
        status, got = await sent(mesh, LISTED, body, kind)
        assert (status, got["body_sha256"]) == (200, hashlib.sha256(body).hexdigest())
        assert got["headers"]["content-type"] == kind
        assert set(got["headers"]) <= {"host", "content-type", "content-length", "x-request-id",
                              "traceparent", "tracestate"}  # fmt: skip


async def test_what_is_not_listed_is_no_path_here_and_none_at_the_agent(nats_server):
    async with (
        running(config(models=("tiny",))) as engine,
        small_mesh({"us": nats_server}) as mesh,
    ):
        await mesh.router("us", routes=(LISTED,))
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        body = {"model": "tiny"}
        async with client() as session:
            answers = {}
            for path in (LISTED, "/sim/faults"):
                async with session.post(mesh.urls["us"] + path, json=body) as answer:
                    answers[path] = answer.status, (await answer.json())["error"]["code"]
        assert answers == {LISTED: (404, "path_not_served"), "/sim/faults": (404, "path_not_found")}


async def test_a_form_is_forwarded_with_its_content_type(tmp_path):
    async with (
        nats_pair(tmp_path, "eu", "us") as servers,
        running(config(models=("tiny",))) as engine,
        small_mesh(servers) as mesh,
    ):
        await mesh.router("eu", routes=(LISTED,), **PATIENT)
        await mesh.router("us", routes=(LISTED,), **PATIENT)
        await mesh.agent("us", "us-0", engine, routes=(LISTED,))
        await mesh.until_peer("eu", "us", f"tiny on {LISTED}")
        body = form(MODEL, FILE)
        status, got = await sent(mesh, LISTED, body, KIND, region="eu")
        assert (status, got["body_sha256"]) == (200, hashlib.sha256(body).hexdigest())
        assert got["headers"]["content-type"] == KIND
