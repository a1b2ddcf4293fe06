"""The HTTP edge: look at an endpoint, send one request, time and classify its answer.

Latencies start when the request leaves this process, not when the trace wanted it to: what the
generator itself lost is `late_s`, reported beside them. Nothing is retried: a retry would turn
one recorded request into two, and hide the failure the run is there to find.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import orjson

from mesh.replay.stream import ChatStream, Fault
from mesh.replay.tally import Answer, Outcome

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


class Client:
    """Sends requests to the regions' endpoints; each `ask` ends with one Answer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoints: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._urls = {region: f"{base}/v1/chat/completions" for region, base in endpoints.items()}
        self._clock = clock

    async def ask(self, region: str, body: bytes, due_s: float) -> Answer:
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
            reason = Fault.TRUNCATED.value
        except (aiohttp.ClientError, OSError):
            reason = "connection_lost"
        return Answer(Outcome.FAILED, reason, late_s)

    async def _read(
        self, response: aiohttp.ClientResponse, started_s: float, late_s: float
    ) -> Answer:
        if response.status in SHED_STATUSES:
            return Answer(Outcome.SHED, f"status_{response.status}", late_s)
        if response.status != 200:
            return Answer(Outcome.FAILED, f"status_{response.status}", late_s)
        if response.content_type != "text/event-stream":
            return Answer(Outcome.FAILED, Fault.BAD_STREAM.value, late_s)
        stream = ChatStream()
        async for data in response.content.iter_any():
            stream.feed(data, self._clock())
            if stream.broken:
                break
        return self._answer(stream, started_s, late_s)

    def _answer(self, stream: ChatStream, started_s: float, late_s: float) -> Answer:
        if stream.fault:
            return Answer(Outcome.FAILED, stream.fault.value, late_s, usage=stream.usage)
        first_s = stream.first_content_s
        return Answer(
            Outcome.OK,
            late_s=late_s,
            ttft_s=None if first_s is None else first_s - started_s,
            e2e_s=self._clock() - started_s,
            gaps_s=stream.gaps_s,
            usage=stream.usage,
        )
