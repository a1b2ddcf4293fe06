"""`/v1/audio/transcriptions` and `/v1/audio/translations` of a simulated engine: a form with a
recording, computed for as long as Whisper's positions of its size take. The text is made up.
"""

import orjson
from aiohttp import BodyPartReader, web

from agents.sim import text as tokens
from agents.simserver.prompt_work import PromptWork
from agents.simserver.requests import RequestParser, invalid
from schemas.engine_routes import TRANSLATIONS

POSITION_BYTES = 640  # 20 ms of 16 kHz and 16 bits: arXiv:2212.04356, 2.2
FIELD_BYTES_MAX = 4096
FORMATS = ("json", "text", "verbose_json")


async def transcribe(parser: RequestParser, request: web.Request) -> PromptWork:
    """One request with its form. Raises ApiError."""
    fields, recording = await _form(request)
    parser.model(fields.get("model"))
    if recording is None:
        raise invalid("the form has no file", "file")
    form = fields.get("response_format", "json")
    if form not in FORMATS:
        raise invalid(f"response_format must be one of {', '.join(FORMATS)}", "response_format")
    positions = max(1, len(recording) // POSITION_BYTES)
    task = "translate" if request.path == TRANSLATIONS else "transcribe"
    said = f"{task} {len(recording)} bytes"
    inputs = (bytes(positions * tokens.TOKEN_BYTES),)
    if form == "text":
        return PromptWork(inputs, said.encode(), "text/plain")
    answer: dict[str, object] = {"text": said}
    if form == "verbose_json":
        seconds = positions / 50
        answer |= {"task": task, "duration": seconds, "language": "english", "segments": []}
    return PromptWork(inputs, orjson.dumps(answer))


async def _form(request: web.Request) -> tuple[dict[str, str], bytes | None]:
    if request.content_type != "multipart/form-data":
        raise invalid("send the recording as multipart/form-data", "file")
    fields: dict[str, str] = {}
    recording: bytes | None = None
    try:
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                raise invalid("a part of the form is itself multipart", None)
            value = bytes(await part.read())
            if part.name == "file":
                recording = value
            elif part.name is not None and len(value) <= FIELD_BYTES_MAX:
                fields[part.name] = value.decode("utf-8", "replace")
    except ValueError as error:
        raise invalid("the form can't be read", "file") from error
    return fields, recording
