"""HTTP: check an endpoint, send one request, parse its stream, time and classify the answer.

Latencies start when the request leaves this process; the delay since it was due is `late_s`,
reported beside them. Nothing is retried: a retry would turn one recorded request into two and hide
the failure that the run is there to find.

`ChatStream` keeps what a load generator needs: when content came, how the stream ended, the token
usage. Each `data:` line is one event: the SSE standard allows several lines, but no OpenAI server
sends them. Times are per chunk with content: a chunk may carry several tokens, and chunks that
arrive in one read are 0 apart. A complete answer has a finish reason and ends with `[DONE]`.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import aiohttp
import orjson

from mesh.replay.tally import RecordedUsage, RequestOutcome, RequestResult

LINE_BYTES_MAX = 1024 * 1024
_CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")


class StreamFault(StrEnum):
    ERROR_EVENT = "error_event"
    BAD_STREAM = "bad_stream"
    TRUNCATED = "truncated"


class ChatStream:
    """Feed it the body, then read `fault`, the times and the usage."""

    def __init__(self) -> None:
        self.first_content_s: float | None = None
        self.gaps_s = array("d")  # between one chunk with content and the next
        self.usage: RecordedUsage | None = None
        self._last_content_s = 0.0
        self._rest = b""
        self._wrong: StreamFault | None = None
        self._finished = False
        self._done = False

    @property
    def fault(self) -> StreamFault | None:
        """What is wrong if the stream ends here; None for a complete answer."""
        if self._wrong:
            return self._wrong
        return None if self._finished and self._done else StreamFault.TRUNCATED

    @property
    def broken(self) -> bool:
        """Whether the stream is invalid whatever follows."""
        return self._wrong is not None

    def feed(self, data: bytes, now: float) -> None:
        """Parse the bytes that arrived at `now` (seconds)."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._wrong:
                self._line(line.rstrip(b"\r"), now)
        if len(self._rest) > LINE_BYTES_MAX:
            self._wrong, self._rest = StreamFault.BAD_STREAM, b""

    def _line(self, line: bytes, now: float) -> None:
        field, _, value = line.partition(b":")
        value = value.strip()
        if field == b"event" and value == b"error":
            self._wrong = StreamFault.ERROR_EVENT
        elif field == b"data" and value == b"[DONE]":
            self._done = True
        elif field == b"data":
            self._data(value, now)

    def _data(self, value: bytes, now: float) -> None:
        try:
            event = orjson.loads(value)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            self._wrong = StreamFault.BAD_STREAM
        elif event.get("error"):
            self._wrong = StreamFault.ERROR_EVENT
        else:
            self._chunk(event, now)

    def _chunk(self, event: dict[str, Any], now: float) -> None:
        try:
            for choice in event.get("choices") or ():
                self._choice(choice.get("delta") or {}, choice.get("finish_reason"), now)
            if event.get("usage"):
                self.usage = read_usage(event["usage"])
        except (AttributeError, TypeError, ValueError, KeyError):
            self._wrong = StreamFault.BAD_STREAM

    def _choice(self, delta: dict[str, Any], finish_reason: object, now: float) -> None:
        if finish_reason is not None:
            self._finished = True
        if not any(delta.get(key) for key in _CONTENT_KEYS):
            return
        if self.first_content_s is None:
            self.first_content_s = now
        else:
            self.gaps_s.append(now - self._last_content_s)
        self._last_content_s = now


def read_usage(usage: dict[str, Any]) -> RecordedUsage:
    """OpenAI's usage object. Raises KeyError, TypeError or ValueError if it is none."""
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return RecordedUsage(
        prompt_tokens=int(usage["prompt_tokens"]),
        output_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=None if cached is None else int(cached),
    )


SHED_STATUSES = frozenset({429, 503})
MODELS_TIMEOUT_S = 10.0
# Servers drop idle connections after as little as 5 s (uvicorn's default). Dropping ours first
# means that no request is lost on a connection which the server was just closing.
KEEPALIVE_S = 2.0


class EndpointError(Exception):
    """An endpoint can't be used; the message says which one and what to do."""


def new_session(*, timeout_s: float, api_key: str | None = None) -> aiohttp.ClientSession:
    """A session without a connection limit, so that requests leave whatever is in flight.

    The caller closes it.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers,
    )


async def choose_model(
    session: aiohttp.ClientSession, endpoints: Mapping[str, str], wanted: str | None
) -> str:
    """The model to ask for: `wanted`, or the first one named. Every endpoint must serve it.

    Raises EndpointError for an endpoint that doesn't answer or serves another model.
    """
    listings = await asyncio.gather(*(_models(session, base) for base in endpoints.values()))
    model = wanted or listings[0][0]
    for (region, base), names in zip(endpoints.items(), listings, strict=True):
        if model not in names:
            raise EndpointError(
                f"{region} ({base}) doesn't serve {model!r}; it serves {', '.join(names)}: "
                "choose one that every endpoint serves with --model"
            )
    return model


async def _models(session: aiohttp.ClientSession, base: str) -> Sequence[str]:
    url = f"{base}/v1/models"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(MODELS_TIMEOUT_S)) as response:
            status, body = response.status, await response.read()
    except TimeoutError as error:
        raise EndpointError(f"{url} gave no answer in {MODELS_TIMEOUT_S:.0f} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EndpointError(f"{url} doesn't answer ({error}): is it running?") from error
    if status != 200:
        raise EndpointError(f"{url} answered {status}: is this an OpenAI endpoint, and ready?")
    try:
        names = [str(model["id"]) for model in orjson.loads(body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise EndpointError(f"{url} didn't answer with OpenAI's list of models") from error
    if not names:
        raise EndpointError(f"{url} lists no model: wait until one is ready")
    return names


def request_body(model: str, prompt: str, output_tokens: int) -> bytes:
    """A streamed chat completion that runs to exactly `output_tokens` where engines allow it.

    `ignore_eos` is an extra of vLLM, SGLang and others; servers that don't know it ignore it.
    """
    return orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max(1, output_tokens),
            "temperature": 0,
            "ignore_eos": True,
        }
    )


class EndpointClient:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoints: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._urls = {region: f"{base}/v1/chat/completions" for region, base in endpoints.items()}
        self._clock = clock

    async def send(self, region: str, body: bytes, due_s: float) -> RequestResult:
        """Send `body` now and read the whole answer. `due_s`: when it should have left."""
        started_s = self._clock()
        late_s = started_s - due_s
        try:
            async with self._session.post(
                self._urls[region], data=body, allow_redirects=False
            ) as response:
                return await self._read(response, started_s, late_s)
        except TimeoutError:
            reason = "timeout"
        except aiohttp.ClientConnectorError:
            reason = "no_connection"
        except aiohttp.ClientPayloadError:
            reason = StreamFault.TRUNCATED.value
        except (aiohttp.ClientError, OSError):
            reason = "connection_lost"
        return RequestResult(RequestOutcome.FAILED, reason, late_s)

    async def _read(
        self, response: aiohttp.ClientResponse, started_s: float, late_s: float
    ) -> RequestResult:
        if response.status in SHED_STATUSES:
            return RequestResult(RequestOutcome.SHED, f"status_{response.status}", late_s)
        if response.status != 200:
            return RequestResult(RequestOutcome.FAILED, f"status_{response.status}", late_s)
        if response.content_type != "text/event-stream":
            return RequestResult(RequestOutcome.FAILED, StreamFault.BAD_STREAM.value, late_s)
        stream = ChatStream()
        async for data in response.content.iter_any():
            stream.feed(data, self._clock())
            if stream.broken:
                break
        if stream.fault:
            return RequestResult(
                RequestOutcome.FAILED, stream.fault.value, late_s, usage=stream.usage
            )
        first_s = stream.first_content_s
        return RequestResult(
            RequestOutcome.OK,
            late_s=late_s,
            ttft_s=None if first_s is None else first_s - started_s,
            e2e_s=self._clock() - started_s,
            gaps_s=stream.gaps_s,
            usage=stream.usage,
        )
