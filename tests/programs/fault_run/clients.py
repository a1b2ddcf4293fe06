"""Clients in a closed loop: so many requests are under way at any time, streamed and plain ones.

Each asks the next router of all regions; where none listens (the router is being started again) it
goes on to the next, as a client of several regions does. A request counts from the moment that
a router takes its connection.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import orjson

from agents.sim.text import chat_tokens
from agents.simserver.responses import prompt_mark
from schemas.http import H_REGION, Fault
from tests.programs.fault_run.reading import End, Stamps, Stream, read_plain, read_refusal

DEADLINE_S = 30  # sent to the router, which must have ended the request by then
# Beyond that a router may be suspended itself, and then needs a moment.
PATIENCE_S = DEADLINE_S + 15.0
TOKENS = (4, 64)
PLAIN_SHARE = 0.25
WORDS_MAX = 200
NOBODY_WAIT_S = 0.05
DRAINING = f"503 {Fault.DRAINING.value.code}"  # as `read_refusal` returns it
KILL_SEEN_S = 1.0  # a socket may take a connection just while its process dies


@dataclass(slots=True)
class Router:
    """Where one is, and when it was killed."""

    name: str
    url: str
    kills: list[float] = field(default_factory=list)

    def killed_within(self, since: float, until: float) -> bool:
        """Whether a kill may be why a connection of that time broke."""
        return any(since - KILL_SEEN_S <= at <= until for at in self.kills)


@dataclass(slots=True)
class Request:
    """One request and how it ended."""

    number: int
    router: str
    began: float
    ended: float = 0.0
    end: End = End.WRONG
    detail: str = ""  # of an HTTP error, its status and code
    served_in: str = ""  # the region whose replica answered
    pause_s: float = 0.0  # of a stream, the longest between two pieces
    violations: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def blame(router: Router, request: Request, now: float, problem_text: str) -> End:
    """What a broken connection amounts to. A plain answer starts only when all of it is there."""
    if router.killed_within(request.began, now):
        return End.ROUTER_LOST
    request.violations.append(f"its connection broke though its router lived: {problem_text}")
    return End.WRONG


class Clients:
    """`requests` has every one that has ended, in that order; `asked` is how many were made."""

    def __init__(
        self,
        routers: Sequence[Router],
        model: str,
        seed: int,
        tokens: tuple[int, int] = TOKENS,
        leave_draining: bool = False,
    ) -> None:
        """`leave_draining`: go on to the next router where one says that it is being stopped."""
        self.requests: list[Request] = []
        self.asked = 0
        self.patience_s = PATIENCE_S
        self._routers = routers
        self._model = model
        self._seed = seed
        self._tokens = tokens  # the fewest and the most of an answer
        self._leave_draining = leave_draining
        self.turned_away = 0  # times that a request went on for that

    async def ask_until(self, stop: asyncio.Event, streams: int) -> None:
        """Keep so many requests under way until stopped; returns when the last has ended."""
        async with _http() as http, asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._one_after_another(http, stop))

    async def ask_each(self) -> None:
        """One request to each router, at once; returns when all have ended."""
        async with _http() as http, asyncio.TaskGroup() as group:
            for _ in self._routers:
                group.create_task(self._ask(http))

    async def _one_after_another(self, http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._ask(http)

    async def _ask(self, http: aiohttp.ClientSession) -> None:
        self.asked += 1
        number = self.asked
        rng = random.Random(f"{self._seed}/{number}")
        tokens = rng.randint(*self._tokens)
        is_streamed = rng.random() >= PLAIN_SHARE
        text = f"request {number}: " + "word " * rng.randint(1, WORDS_MAX)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stamp": True,
            "stream": is_streamed,
        }
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        stamps = Stamps(prompt_mark(chat_tokens([("user", text)])), tokens)
        at = number
        while not await self._answered(http, number, self._routers[at % len(self._routers)], body,
                                       stamps):  # fmt: skip
            at += 1
            await asyncio.sleep(NOBODY_WAIT_S)

    async def _answered(
        self,
        http: aiohttp.ClientSession,
        number: int,
        router: Router,
        body: dict[str, object],
        stamps: Stamps,
    ) -> bool:
        """Ask this router; False if none listens there."""
        clock = asyncio.get_running_loop().time
        request = Request(number, router.name, clock(), violations=stamps.violations)
        patience_s = self.patience_s
        try:
            async with asyncio.timeout(patience_s):
                await self._exchange(http, router, body, stamps, request)
        except aiohttp.ClientConnectorError:
            return False
        except TimeoutError:
            request.violations.append(f"no end within {patience_s:g} s")
        if self._leave_draining and request.detail == DRAINING:
            self.turned_away += 1
            return False
        request.ended = clock()
        if request.violations:
            request.end = End.WRONG
        self.requests.append(request)
        return True

    async def _exchange(
        self,
        http: aiohttp.ClientSession,
        router: Router,
        body: dict[str, object],
        stamps: Stamps,
        request: Request,
    ) -> None:
        clock = asyncio.get_running_loop().time
        stream = Stream(stamps) if body["stream"] else None
        headers = {"content-type": "application/json", "x-mesh-timeout-s": str(DEADLINE_S)}
        url = f"{router.url}/v1/chat/completions"
        try:
            async with http.post(url, data=orjson.dumps(body), headers=headers) as answer:
                request.served_in = answer.headers.get(H_REGION, "")
                if answer.status != 200:
                    detail, wrong = read_refusal(answer.status, await answer.read())
                    request.end, request.detail = End.REFUSED, detail
                    request.violations += [wrong] if wrong else []
                    return
                if stream is None:
                    request.end = read_plain(stamps, await answer.read())
                    return
                came_at: float | None = None
                async for chunk in answer.content.iter_any():
                    now = clock()
                    request.pause_s = max(request.pause_s, now - (came_at or now))
                    came_at = now
                    stream.feed(chunk)
                request.end = stream.end()
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, ConnectionError) as problem:
            if stream is not None and stream.has_ended:
                request.end = stream.last
            else:
                problem_text = str(problem) or type(problem).__name__
                request.end = blame(router, request, clock(), problem_text)


def _http() -> aiohttp.ClientSession:
    # A connection for each request: a kept one may have died with its router long ago.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
