"""Errors that engines answer with: as HTTP errors, and inside streams that began with 200."""

import orjson

from tests.support.scripted_engine import event, fail, raw_stream, say, scripted_engine
from tests.support.small_mesh import chat, post, set_all


async def test_an_error_of_the_request_itself_is_not_tried_everywhere(one):
    async with scripted_engine() as third:
        await one.agent("us", "us-2", third)
        await one.until_ready("us", 3)
        engines = (*one.engines, third)
        for status, asked in ((501, 1), (500, 2)):
            for engine in engines:
                engine.behaviour, engine.seen = fail(status, "no images"), []
            got, body, _ = await post(one, chat())
            assert (got, orjson.loads(body)["error"]["message"]) == (status, "no images")
            assert sum(len(engine.seen) for engine in engines) == asked


def error_event(status: int, message: str = "EngineCore died") -> bytes:
    error = {"message": message, "type": "InternalServerError", "param": None, "code": status}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"


async def test_a_stream_that_begins_with_an_error_is_placed_again(one):
    first, second = one.engines
    first.behaviour = raw_stream(error_event(500), b"data: [DONE]\n\n")
    second.behaviour = say("fine")
    for _ in range(2):
        status, body, _ = await post(one, chat(stream=True))
        assert (status, b"fine" in body, b"error" in body) == (200, True, False)
    assert first.seen
    assert one.sample("us", "mesh_requests_total", outcome="ok") == 2


async def test_a_stream_that_begins_with_a_clients_error_is_that_error(one):
    set_all(one, raw_stream(error_event(400, "too long"), b"data: [DONE]\n\n"))
    status, body, headers = await post(one, chat(stream=True))
    assert (status, headers["content-type"]) == (400, "application/json")
    assert orjson.loads(body)["error"]["message"] == "too long"
    assert sum(len(engine.seen) for engine in one.engines) == 1


async def test_an_engines_error_inside_a_stream_is_no_success(one, caplog):
    parts = (event("begun"), error_event(500), b"data: [DONE]\n\n")
    set_all(one, raw_stream(*parts))
    status, body, _ = await post(one, chat(stream=True))
    # Whether a byte was given out before the error came is up to the machine.
    assert (status == 500) != body.startswith(event("begun")) and b"EngineCore died" in body
    assert one.sample("us", "mesh_requests_total", outcome="failed") == 1
    assert one.sample("us", "mesh_requests_total", outcome="ok") == 0
    assert "EngineCore died" in caplog.text or status == 500
