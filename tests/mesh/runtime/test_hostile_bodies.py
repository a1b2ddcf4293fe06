"""Bodies that are legal JSON and meant to hurt: they cost their sender, and nobody else."""

import asyncio

import pytest

from mesh.core.model.prompt import PIECES_MAX
from schemas.exchange import BODY_BYTES_MAX
from tests.support.scripted_engine import event, hang
from tests.support.small_mesh import PATIENT, chat, client, one_replica, upload

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DEEP = 900  # orjson reads 1024 levels


@pytest.fixture
async def mesh(nats_server):
    async with one_replica(nats_server, **PATIENT) as mesh:
        [engine] = mesh.engines
        mesh.engine = engine
        yield mesh


async def test_a_prompt_of_millions_of_token_ids_does_not_end_the_answers_of_others(mesh):
    gate = asyncio.Event()
    mesh.engine.behaviour = hang(event("begun"), gate)
    ids = b",".join([b"1"] * (BODY_BYTES_MAX // 2 - 50))
    async with client() as session:
        url = mesh.urls["us"]
        async with session.post(url + CHAT, json=chat(stream=True)) as answer:
            await answer.content.readany()
            body = upload(b'{"model":"tiny","prompt":[' + ids + b"]}")
            sent = asyncio.create_task(session.post(url + COMPLETIONS, data=body))
            await mesh.until(lambda: len(mesh.engine.seen) == 2, "the prompt to arrive")
            gate.set()
            assert b"[DONE]" in await answer.content.read()
            (await sent).close()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, b'"messages":[{"content":[' + b"[" * DEEP + b"]" * DEEP + b"]}]", "nested"),
        (CHAT, b'"messages":[{"role":' + b"[" * DEEP + b"]" * DEEP + b"}]", "nested"),
        (COMPLETIONS, b'"prompt":[' + b"[" * DEEP + b"]" * DEEP + b"]", "nested"),
        (CHAT, b'"messages":[' + b",".join([b"{}"] * (PIECES_MAX + 1)) + b"]", "more than"),
        (
            CHAT,
            b'"messages":[{"content":[' + b",".join([b"1"] * PIECES_MAX) + b"]}]",
            "more than",
        ),
    ],
    ids=["deep content", "deep role", "deep prompt", "many messages", "many parts"],
)
async def test_a_prompt_that_costs_more_than_its_answer_is_refused(mesh, path, body, says):
    data = b'{"model":"tiny",' + body + b"}"
    async with client() as session, session.post(mesh.urls["us"] + path, data=upload(data)) as got:
        error = (await got.json())["error"]
    assert (got.status, says in error["message"]) == (400, True), error
    assert error["param"] in ("messages", "prompt")
    assert mesh.engine.seen == []
