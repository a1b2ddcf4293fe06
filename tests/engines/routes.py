"""Every route of the mesh, asked over one kind of engine: what becomes of each.

A row is a request that an engine with the route answers whatever its model is, and what its answer
must have in it. Texts are short: engines of tests have small contexts.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from agents.adapters.engine_probe import examined
from schemas.engine_routes import ENGINE_ROUTES, TRANSCRIPTIONS, TRANSLATIONS
from schemas.http import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    MODELS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
)
from schemas.response_calls import ID, RESPONSE, RESPONSE_CANCEL, RESPONSE_INPUT
from schemas.state import Heartbeat
from tests.engines.engine import MODEL
from tests.engines.mesh_over_engines import MeshOverEngines

WORKS, NOT_SERVED = "yes", "–"
STREAMS = "streams"  # though it was not asked to
WITHOUT_DONE = "no `[DONE]`"
FINISHED = re.compile(rb'"finish_reason": ?"')
EVENT = (b"event: ", b"data: ")
LISTED, MODELS_ROW, CONTINUED = (
    "an operator's `routes`",
    f"`GET {MODELS}`",
    "`previous_response_id`",
)
NOT_SERVED_CODES = ("path_not_served", "previous_response_not_found", "response_not_found")
OF_ANTHROPIC = "no replica that serves the model"  # these errors have no code
TOKENS = 4
CHATS = {"messages": [{"role": "user", "content": "Where are you?"}]}
# What an engine's further route takes of it: a chat, or a text to embed.
OF_LISTED = {**CHATS, "max_tokens": TOKENS, "input": "a river"}
WITHIN_S = 60.0
# The last event of a stream; a response that reached its limit of tokens is incomplete.
ENDS = {CHAT: (b"data: [DONE]",), COMPLETIONS: (b"data: [DONE]",), MESSAGES: (b"message_stop",)}
ENDS[RESPONSES] = (b"response.completed", b"response.incomplete")


@dataclass(frozen=True)
class Asking:
    """One row: a POST with these fields; `has`: whether its answer is one."""

    path: str
    fields: Mapping[str, object] = field(default_factory=dict)
    has: Callable[[dict[str, Any]], object] = bool
    stream: bool = False

    @property
    def row(self) -> str:
        return f"`{self.path}`{', streamed' if self.stream else ''}"


@dataclass(frozen=True)
class Calling:
    """One row: a call about a response that the engine keeps; `has`: whether its answer is one."""

    method: str
    path: str
    has: Callable[[dict[str, Any]], object]

    @property
    def row(self) -> str:
        return f"`{self.method} {self.path}`"


CALLS = (
    Calling("GET", RESPONSE, lambda a: a["status"]),
    Calling("GET", RESPONSE_INPUT, lambda a: a["data"]),
    Calling("POST", RESPONSE_CANCEL, lambda a: a["status"]),
    Calling("DELETE", RESPONSE, lambda a: a["deleted"]),
)


def _generating(path: str, fields: dict[str, object], has: Callable[..., object]) -> list[Asking]:
    return [Asking(path, fields, has), Asking(path, fields | {"stream": True}, stream=True)]


# A random model may end at once, with an answer that is empty.
GIVEN = {"input": "Where are you?", "max_output_tokens": TOKENS}
ASKED = (
    *_generating(CHAT, {**CHATS, "max_tokens": TOKENS}, lambda a: a["choices"][0]["message"]),
    *_generating(
        COMPLETIONS,
        {"prompt": "Where", "max_tokens": TOKENS},
        lambda a: a["choices"][0]["finish_reason"],
    ),
    *_generating(RESPONSES, GIVEN, lambda a: a["status"]),
    *_generating(MESSAGES, {**CHATS, "max_tokens": TOKENS}, lambda a: a["stop_reason"]),
    Asking(COUNT_TOKENS, CHATS, lambda a: a["input_tokens"]),
    Asking(EMBEDDINGS, {"input": "a river"}, lambda a: a["data"][0]["embedding"]),
    Asking(RERANK, {"query": "a river", "documents": ["a", "b"]}, lambda a: a["results"][1]),
    Asking(SCORE, {"text_1": "a river", "text_2": ["a", "b"]}, lambda a: a["data"][1]),
    Asking(CLASSIFY, {"input": "a river"}, lambda a: a["data"][0]["probs"]),
    Asking(POOLING, {"input": "a river"}, lambda a: a["data"][0]["data"]),
    Asking(TOKENIZE, {"prompt": "a river", "content": "a river"}, lambda a: a["tokens"]),
    Asking(DETOKENIZE, {"tokens": [70, 71]}, lambda a: a.keys() & {"prompt", "content", "text"}),
)


async def found(mesh: MeshOverEngines) -> dict[str, str]:
    """What becomes of every route: the table's rows and cells."""
    await _until_known(mesh)
    cells: dict[str, str] = {}
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    async with aiohttp.ClientSession(mesh.url, timeout=timeout) as http:
        for asking in ASKED:
            cells[asking.row] = await _asked(http, asking)
            if asking.path == RESPONSES and not asking.stream:
                earlier = await _kept(http)
                cells[CONTINUED] = await _continued(http, earlier)
                for call in CALLS:
                    cells[call.row] = await _called(http, call, earlier)
        for path in (TRANSCRIPTIONS, TRANSLATIONS):
            cells[f"`{path}`"] = await _recording(http, path)
        listed = next(iter(mesh.engines.values())).listed_route
        if listed:
            cells[LISTED] = await _asked(http, Asking(listed, OF_LISTED))
        async with http.get(MODELS) as answer:
            names = {one["id"] for one in (await answer.json())["data"]}
            further = next(iter(mesh.engines.values())).further_names
            cells[MODELS_ROW] = WORKS if names == {MODEL, *further} else "fails"
    return cells


async def _until_known(mesh: MeshOverEngines) -> None:
    """Wait until the router knows every path that the engines have, or lets requests for it
    through: of an engine that loads on demand their answers show it."""
    for replica, engine in mesh.engines.items():
        facts = await examined(engine.url, engine.metrics_url, engine.api_key or None)
        assert not facts.serves_nobody, facts.trial
        paths = set(facts.paths)
        await mesh.until(
            lambda replica=replica, paths=paths: paths <= _open(mesh.beats[replica]),
            f"{replica} to have {sorted(paths)}",
        )
    await mesh.until_ready()


def _open(beat: Heartbeat) -> set[str]:
    return {*beat.paths, *(beat.routes.unknown if beat.routes else ())}


async def _asked(http: aiohttp.ClientSession, asking: Asking) -> str:
    body = {"model": MODEL, **asking.fields}
    async with http.post(asking.path, json=body) as answer:
        data = await answer.read()
    if answer.status != 200:
        return _refused(answer.status, data)
    if asking.stream:
        if any(end in data for end in ENDS[asking.path]):
            return WORKS
        return WITHOUT_DONE if FINISHED.search(data) else f"fails: {data[-80:]!r}"
    if data.startswith(EVENT):
        return STREAMS
    try:
        return WORKS if asking.has(orjson.loads(data)) else f"fails: {data[:80]!r}"
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return f"fails: {data[:80]!r}"


async def _kept(http: aiohttp.ClientSession) -> str:
    """The id of a response that the engine keeps if it can; or why there is none, for the table."""
    async with http.post(RESPONSES, json={"model": MODEL, **GIVEN, "store": True}) as answer:
        data = await answer.read()
    if answer.status != 200:
        return _refused(answer.status, data)
    return NOT_SERVED if data.startswith(EVENT) else orjson.loads(data)["id"]


async def _continued(http: aiohttp.ClientSession, earlier: str) -> str:
    """A response that goes on from one that the engine keeps."""
    if not earlier.startswith("resp"):
        return earlier
    more = Asking(RESPONSES, {**GIVEN, "previous_response_id": earlier}, lambda a: a["status"])
    return await _asked(http, more)


async def _called(http: aiohttp.ClientSession, call: Calling, earlier: str) -> str:
    """A call about that response; the engine's refusal to cancel one that is complete is its
    answer, too."""
    if not earlier.startswith("resp"):
        return earlier
    async with http.request(call.method, call.path.replace(ID, earlier)) as answer:
        data = await answer.read()
    if answer.status == 200:
        return WORKS if call.has(orjson.loads(data)) else f"fails: {data[:80]!r}"
    return _refused(answer.status, data)


async def _recording(http: aiohttp.ClientSession, path: str) -> str:
    form = aiohttp.FormData({"model": MODEL})
    recording = ENGINE_ROUTES[path].smallest["file"]
    assert isinstance(recording, bytes)
    form.add_field("file", recording, filename="a.wav", content_type="audio/wav")
    async with http.post(path, data=form) as answer:
        data = await answer.read()
    if answer.status != 200:
        return _refused(answer.status, data)
    return WORKS if "text" in orjson.loads(data) else f"fails: {data[:80]!r}"


def _refused(status: int, body: bytes) -> str:
    """That the mesh says no replica has it; or the status of the engine's own error."""
    try:
        error = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return str(status)
    known = error.get("code") in NOT_SERVED_CODES or OF_ANTHROPIC in error.get("message", "")
    return NOT_SERVED if known else str(status)
