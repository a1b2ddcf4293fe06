"""From a client's HTTP request to an `Ask`, or to a problem that says what to change."""

import asyncio
import os
from typing import Any

import orjson
from aiohttp import web

from mesh.adapters.problem import Problem
from mesh.adapters.ticket import Ask
from mesh.adapters.wishes import read_wishes
from mesh.core.prefixes.prompt import PromptInvalid, prompt_text
from schemas.exchange import BODY_BYTES_MAX
from schemas.http import CHAT, H_REQUEST_ID, H_TIMEOUT_S, Fault
from schemas.ids import MODEL_CHARS_MAX, ModelId, RequestId, is_request_id

UPLOAD_S_MAX = 120.0  # for a client to send its body
TIMEOUT_S_MAX = 3600.0
REQUEST_ID_BYTES = 16  # of one that we make
H_CONTENT_ENCODING = "content-encoding"
ENCODINGS = ("identity", "gzip", "deflate")  # what aiohttp decodes without further packages


def request_id(request: web.BaseRequest) -> RequestId:
    """The client's own id if it is fit to be kept, else a new one."""
    given = request.headers.get(H_REQUEST_ID)
    if given is not None and is_request_id(given):
        return RequestId(given)
    return RequestId(os.urandom(REQUEST_ID_BYTES).hex())


async def read_ask(request: web.BaseRequest, known_id: RequestId) -> Ask:
    """Read and check the body. Raises Problem for anything an engine should not see."""
    body = await _read_body(request)
    fields = _json_object(body)
    wishes = read_wishes(request.headers, fields)
    model = fields.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MODEL_CHARS_MAX:
        raise Problem(Fault.INVALID, "model must be the name of a model, as a string", "model")
    if not isinstance(fields.get("stream"), bool | None):
        raise Problem(Fault.INVALID, "stream must be true or false", "stream")
    try:
        text = prompt_text(fields, chat=request.path == CHAT)
    except PromptInvalid as error:
        raise Problem(Fault.INVALID, str(error), error.param) from error
    return Ask(known_id, ModelId(model), request.path, body, text, _timeout_s(request), wishes)


async def _read_body(request: web.BaseRequest) -> bytes:
    if (request.content_length or 0) > BODY_BYTES_MAX:
        raise _too_large()
    encoding = request.headers.get(H_CONTENT_ENCODING)
    if encoding is not None and encoding.lower() not in ENCODINGS:
        raise encoding_not_taken()
    try:
        if request.content.is_eof():  # all of it came with the headers, as it mostly does
            return await request.read()
        async with asyncio.timeout(UPLOAD_S_MAX):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large() from error
    except web.RequestPayloadError as error:
        what = f"not {encoding}, as its {H_CONTENT_ENCODING} says" if encoding else "cut or broken"
        raise Problem(Fault.INVALID, f"the body is {what}") from error
    except TimeoutError as error:
        message = f"the body did not arrive within {UPLOAD_S_MAX:g} s"
        raise Problem(Fault.INVALID, message) from error


def encoding_not_taken() -> Problem:
    """Of a body that we can't decode."""
    message = f"a body's {H_CONTENT_ENCODING} may be gzip or deflate; send it so, or without any"
    return Problem(Fault.INVALID, message, H_CONTENT_ENCODING)


def _too_large() -> Problem:
    return Problem(
        Fault.BODY_TOO_LARGE, f"the body has more than {BODY_BYTES_MAX} bytes; send less at once"
    )


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(Fault.INVALID, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Problem(Fault.INVALID, "the body must be a JSON object")
    return fields


def _timeout_s(request: web.BaseRequest) -> float | None:
    given = request.headers.get(H_TIMEOUT_S)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = float("nan")
    if not 0.0 < seconds <= TIMEOUT_S_MAX:
        message = f"{H_TIMEOUT_S} must be seconds, more than 0 and at most {TIMEOUT_S_MAX:g}"
        raise Problem(Fault.INVALID, message, H_TIMEOUT_S)
    return seconds
