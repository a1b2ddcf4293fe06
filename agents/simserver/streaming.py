"""One answer as server-sent events, whole or broken on purpose.

Each wake-up writes all the tokens that came out since the last one. A client that reads slowly
holds up only its own handler: tokens not yet written are a number, not a queue.
"""

from aiohttp import web

from agents.simserver.driver import TokenStream
from agents.simserver.faults import Break, FaultSwitchboard
from agents.simserver.rendering import SseRenderer

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_GARBAGE = b"<html><body>502 Bad Gateway</body></html>\n\xff\xfe\x00 not: an event\n\n"
_HALF_EVENT = b'data: {"id":"chatcm'


async def send_stream(
    request: web.Request, stream: TokenStream, events: SseRenderer, faults: FaultSwitchboard
) -> web.StreamResponse:
    """Send the answer as it comes out; the returned response is complete."""
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    breaks = faults.stream_break()
    if breaks is not Break.NONE:
        after_tokens = faults.now.stream_after_tokens
        await _send_broken(request, response, stream, events, breaks, after_tokens)
        return response
    sent = 0
    finished = False
    while not finished:
        await stream.wait(sent)
        finished = stream.finished
        payload = events.opening() if sent == 0 else b""
        payload += events.tokens(sent, stream.tokens)
        sent = stream.tokens
        if finished:
            payload += events.closing(stream.cached_tokens)
        await response.write(payload)
    await response.write_eof()
    return response


async def _send_broken(
    request: web.Request,
    response: web.StreamResponse,
    stream: TokenStream,
    events: SseRenderer,
    breaks: Break,
    after_tokens: int,
) -> None:
    await stream.wait(after_tokens - 1)
    payload = b""
    if after_tokens:
        payload = events.opening() + events.tokens(0, min(after_tokens, stream.tokens))
    if breaks is Break.CUT:
        await response.write(payload + _HALF_EVENT)
        if request.transport is not None:
            request.transport.close()
        return
    if breaks is Break.GARBAGE:
        payload += _GARBAGE
    if payload:
        await response.write(payload)
    await response.write_eof()
