"""Limits of tenants and keys at a process of a region: what clients are told, what others are.

What was spent before a process started is in accounts of tokens (the stream USAGE) of its region,
a second behind; other processes tell the rest as soon as they hear of it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import ceil, inf
from random import Random
from typing import NamedTuple

import orjson
from nats.aio.msg import Msg
from prometheus_client import Counter

from infra.process import LimitedLog
from mesh.adapters.bus import RouterBus, has_headers
from mesh.adapters.refused import RequestRefused
from mesh.adapters.region_records import RecordsUnavailable
from mesh.adapters.usage_reader import read_day
from mesh.core.model.request import Request
from mesh.core.offline.events import answer_tokens_said
from mesh.core.requests.limit_account import PERIOD_S, Before, Bucket, Exceeded, Origin
from mesh.core.requests.limits import Held, Least, LimitKeeper, least
from schemas import subjects
from schemas.engine_routes import TOKEN_LIMITS
from schemas.exchange import CLASSES_BEFORE, LARGE_BYTES, Priority
from schemas.http import (
    H_LIMIT_REQUESTS,
    H_LIMIT_TOKENS,
    H_REMAINING_REQUESTS,
    H_REMAINING_TOKENS,
    H_RESET_REQUESTS,
    H_RESET_TOKENS,
    H_RETRY_AFTER,
    Fault,
)
from schemas.ids import RegionId, RouterId
from schemas.limits import KEY, TENANT, Limited, LimitsTable, decode_claims, encode_claims
from schemas.usage import UsageKind, UsagePage
from schemas.wire import WireError

log = logging.getLogger(__name__)

SAYS_TOKENS = b'_tokens"'
N_PREDICT = "n_predict"  # llama.cpp's own, which it prefers
READ_AGAIN_S = 5.0
NO_ACCOUNTS = "until accounts are read, limits are as if nothing had been used today: %s"


class Member(NamedTuple):
    """The process that spends; `peers`: the other regions."""

    region: RegionId
    router: RouterId
    epoch: int
    peers: tuple[RegionId, ...]


class LimitGossip:
    """One router's, or batch runner's: tells what is spent here, and takes what others tell."""

    def __init__(self, member: Member, bus: RouterBus, clock: Callable[[], float]) -> None:
        self._member, self._bus, self._clock = member, bus, clock
        regions = (member.region, *member.peers)
        origin = Origin(member.region, member.router)
        self.keeper = LimitKeeper(origin, member.epoch, regions, Random(member.epoch), clock())
        self._known: Mapping[str, LimitsTable] = {}
        self._own: frozenset[str] = frozenset()
        self._log = LimitedLog(log, clock)

    def know(self, limits: Mapping[str, LimitsTable], own: frozenset[str] = frozenset()) -> None:
        """The limits of all names that have any; `own`: of keys that were made with them."""
        self._known, self._own = limits, own
        self.keeper.know(limits)

    async def run(self) -> None:
        """Tell others, again and again, where there are limits; at first read what was spent."""
        async with asyncio.TaskGroup() as group:
            reading: asyncio.Task[None] | None = None
            while True:
                if self.keeper.is_used:
                    reading = reading or group.create_task(self._read_before())
                    for claims in self.keeper.turn_period(self._clock()):
                        subject = subjects.limits(self._member.region)
                        self._bus.publish(subject, encode_claims(claims))
                await asyncio.sleep(PERIOD_S)

    def receive(self, msg: Msg) -> None:
        """What another process has spent."""
        if has_headers(msg):
            self._log.warning("limits", "headers", "%s dropped: it has headers", msg.subject)
            return
        try:
            claims = decode_claims(msg.data)
        except WireError as error:
            self._log.warning("limits", "unreadable", "limits dropped: %.300s", error)
            return
        if claims.region != subjects.owner(msg.subject):
            text = "%s dropped: it names another region"
            self._log.warning("limits", "another", text, msg.subject)
            return
        self.keeper.hear(claims, self._clock())

    async def _read_before(self) -> None:
        """What was spent this day, by accounts: again and again, until they are read."""
        own = self._member.router, self._member.epoch
        while True:
            day = time.strftime("%Y-%m-%d", time.gmtime(time.time()))
            try:
                pages = await read_day(self._bus.client, self._member.region, day)
                break
            except RecordsUnavailable as error:
                self._log.warning("limits", "accounts", NO_ACCOUNTS, error)
                await asyncio.sleep(READ_AGAIN_S)
        others = [page for page in pages if (page.router, page.epoch) != own]
        self.keeper.spent_before(spent_of(others, self._known, self._own), self._clock())


def spent_of(
    pages: Iterable[UsagePage], known: Mapping[str, LimitsTable], own: frozenset[str]
) -> dict[str, Before]:
    """What each name has used this day, by accounts; copies are nobody's, and a key's `own` limits
    are not known to who answers batch jobs' lines."""
    spent: dict[str, Before] = {}
    for row in (row for page in pages for row in page.rows if row.kind is not UsageKind.COPY):
        for name in (TENANT + row.tenant, KEY + row.key):
            limits = known.get(name)
            is_counted = row.kind is not UsageKind.BATCH or name not in own
            if limits is not None and is_counted:
                requests, tokens, _ = spent.get(name, Before())
                tokens += limits.cost(row.uncached, row.cached, row.output)
                spent[name] = Before(requests + row.requests, tokens)
    return spent


class RouterLimits(LimitGossip):
    """One router's."""

    def __init__(
        self, member: Member, bus: RouterBus, clock: Callable[[], float], refused: Counter
    ) -> None:
        """`refused`: by limit."""
        super().__init__(member, bus, clock)
        self._refused = refused

    def take(
        self, limited: Limited, request: Request, path: str, body: bytes
    ) -> tuple[Request, Held, dict[str, str]]:
        """Let a client's request in, with the priority that it may have; and what its answer says
        of its limits. Raises RequestRefused."""
        prompt_tokens = request.prompt.tokens
        for name, limits in limited:
            if (most := limits.prompt_tokens_max) is not None and prompt_tokens > most:
                self._refused.labels("prompt_tokens_max").inc()
                message = (
                    f"the prompt has about {prompt_tokens} tokens, more than "
                    f"prompt_tokens_max = {most} of {whose(name)}"
                )
                raise RequestRefused(Fault.KEY_FORBIDDEN, message)
            if (highest := limits.priority_max) is not None:
                request = self._lowered(name, highest, request)
        now = request.arrived_at
        answer_max = 0.0 if request.answer_tokens == 0 else _answer_max(path, body)
        found = self.keeper.take(limited, prompt_tokens, now, answer_max=answer_max)
        if isinstance(found, Held):
            return request, found, limit_headers(least(found))
        name, exceeded = found
        self._refused.labels(exceeded.limit).inc()
        if exceeded.retry_after_s == inf:
            raise RequestRefused(Fault.KEY_FORBIDDEN, told(name, exceeded))
        headers = limit_headers(self.keeper.remaining(limited, now))
        headers[H_RETRY_AFTER] = str(max(1, ceil(exceeded.retry_after_s)))
        raise RequestRefused(Fault.RATE_LIMITED, told(name, exceeded), headers=headers)

    def _lowered(self, name: str, most: Priority, request: Request) -> Request:
        """Without a word of its client's a request has the highest that it may, up to normal."""
        if CLASSES_BEFORE[request.priority] >= CLASSES_BEFORE[most]:
            return request
        if request.priority is Priority.HIGH:
            self._refused.labels("priority_max").inc()
            message = f"priority high is above priority_max = {most} of {whose(name)}"
            raise RequestRefused(Fault.KEY_FORBIDDEN, message)
        return replace(request, priority=most)


def _answer_max(path: str, body: bytes) -> float:
    """Tokens of the longest answer, as far as a request says by the field that engines read on
    that path. Of a large one that is not read: it would take milliseconds."""
    names = TOKEN_LIMITS.get(path)
    if names is None or len(body) > LARGE_BYTES or SAYS_TOKENS not in body:
        return inf
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:  # a form
        return inf
    if N_PREDICT in fields:
        return inf
    said = [answer_tokens_said(fields, (name,)) for name in names]
    return max((one for one in said if one is not None), default=inf)


def whose(name: str) -> str:
    """Who that name is, for people: a client knows its key, and operators are told it besides."""
    return "this key" if name.startswith(KEY) else f"the tenant {name.removeprefix(TENANT)}"


def told(name: str, exceeded: Exceeded) -> str:
    """Why a request is refused."""
    limit, most, asked, wait_s, is_part = exceeded
    text = f"{whose(name)} has reached {limit} = {most:g}"
    if is_part:
        text = f"this router's part of {limit} = {most:g} of {whose(name)} is used up for now"
    if wait_s == inf:
        return (
            f"the request alone would count about {asked:.0f}, more than {limit} = {most:g} "
            f"of {whose(name)}"
        )
    return f"{text}; please try again in {duration(wait_s)}"


def limit_headers(remaining: Least) -> dict[str, str]:
    """As OpenAI's, of requests and of tokens: of several limits, the one that is nearest."""
    headers = {}
    (left, bucket), (tokens_left, of_tokens) = remaining
    if bucket is not None:
        headers[H_LIMIT_REQUESTS] = bucket.text
        headers[H_REMAINING_REQUESTS], headers[H_RESET_REQUESTS] = _rest(left, bucket)
    if of_tokens is not None:
        headers[H_LIMIT_TOKENS] = of_tokens.text
        headers[H_REMAINING_TOKENS], headers[H_RESET_TOKENS] = _rest(tokens_left, of_tokens)
    return headers


def _rest(left: float, bucket: Bucket) -> tuple[str, str]:
    """What this router lets in of a limit, and when all of it is there again."""
    full = bucket.full
    if left > full:
        left = full
    return str(int(left) if left > 0.0 else 0), duration((full - left) / bucket.rate)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 7.66s, 6m0s, 1h0m3s."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1000)}ms"
    if seconds < 60.0:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
