"""All clients of a world: what they send, when, and the log of what became of it.

Arrivals are sent at their times; the users of a closed loop continue after each answer. One driver
plays both as trees of nodes. When a node's answer is complete, its children are sent, each after
its pause. A node that is shed or fails ends its subtree. A user of a closed loop then begins the
next tree after the refusal's Retry-After, or a second where it had none: otherwise users of a full
mesh would send three thousand requests a second.

A prompt's keys are made when it is sent and dropped when it ends, so a run of a million requests
holds only the open ones. A client hangs up when its answer takes longer than its timeout, or the
first token longer than its patience.
"""

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from random import Random
from typing import TYPE_CHECKING

from mesh.core.model.request import Request
from mesh.replay.report import RunReport, build_report
from mesh.replay.tally import RecordedUsage, RequestOutcome, RequestResult, RunTally
from mesh.sim.router import SimRouter
from mesh.sim.workload import (
    Arrival,
    ClosedLoopClient,
    OpenTree,
    RequestEnd,
    RequestNode,
    SentRequest,
    Workload,
    estimate,
    keys_of,
    number_of,
)
from schemas.ids import RegionId

if TYPE_CHECKING:
    from mesh.sim.world import World

RETRY_S = 1.0  # of a user whose request failed without a Retry-After
TIMEOUT, PATIENCE, UNFINISHED = "timeout", "patience", "unfinished"
SPREAD = 2_654_435_761  # the golden ratio of 2**32: successive requests go to different routers
NO_TTFT = -1.0
_LINE = struct.Struct("<qqqqBB")
_OUTCOMES = tuple(RequestOutcome)

OnRequestEnd = Callable[[SentRequest, RequestEnd, float], None]


class SimClients:
    """Call `begin` once; the world's `all_answered` is called when all is done."""

    def __init__(self, world: "World", workload: Workload) -> None:
        self._world = world
        self._workload = workload
        self.queue = world.queue
        self._network = world.network
        self._log = world.requests
        self._dice = world.dice("clients")
        self._began_at = 0.0
        self._unfinished = 0  # trees, users, and the list of arrivals
        self._open: dict[int, SentRequest] = {}
        self._limits = (
            WaitLimit(self, TIMEOUT, world.config.timeout_s),
            WaitLimit(self, PATIENCE, world.config.patience_s),
        )

    @property
    def is_done(self) -> bool:
        """Whether every request has ended and none will be sent."""
        return self._unfinished == 0

    def sent(self, request: Request) -> SentRequest:
        """The client's side of a request that a router decides on, for policies of the twin."""
        return self._open[number_of(request.request_id)]

    def begin(self) -> None:
        """Start the workload: its time 0 is now."""
        self._began_at = self.queue.now
        clients = self._workload.clients
        self._unfinished = 1 + len(clients)
        for client in clients:
            self.queue.at(self._began_at + client.starts_at_s, self._next_tree, client)
        self._schedule_next(iter(self._workload.arrivals))

    def give_up(self) -> None:
        """The world ends: open requests have failed."""
        for sent in list(self._open.values()):
            self._close(sent, RequestEnd(RequestOutcome.FAILED, UNFINISHED))

    def _schedule_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            self._finish_one()
        else:
            self.queue.at(self._began_at + arrival.at_s, self._arrive, arrival, arrivals)

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self._unfinished += 1
        self._send(arrival.region, arrival.node, OpenTree(None))
        self._schedule_next(arrivals)

    def _next_tree(self, client: ClosedLoopClient) -> None:
        until_s = self._workload.until_s
        over = until_s is not None and self.queue.now >= self._began_at + until_s
        root = None if over else next(client.trees, None)
        if root is None:
            self._finish_one()
        else:
            self._unfinished += 1
            self._send(client.region, root, OpenTree(client))

    def _send(self, region: RegionId, node: RequestNode, tree: OpenTree) -> None:
        keys = keys_of(node)
        token_error = self._world.config.token_error
        prompt = estimate(keys.hashes, node.prompt_tokens, token_error, self._dice)
        number = self._log.sent + 1
        sent = SentRequest(number, region, node, tree, keys, prompt, self.queue.now)
        self._log.began(sent)
        self._open[number] = sent
        for limit in self._limits:
            limit.begin(number)
        router = self._router_of(sent)
        self._network.send_http(region, router.site, router.receive_request, sent)

    def _router_of(self, sent: SentRequest) -> SimRouter:
        """The router that the request is sent to: one of its region's, always the same."""
        world = self._world
        routers = world.region_routers[world.config.shape.router_of(sent.region)]
        return routers[(sent.number * SPREAD % 2**32 >> 16) % len(routers)]

    def first_byte(self, sent: SentRequest) -> None:
        """The client has the first token."""
        sent.first_at = self.queue.now

    def answered(self, sent: SentRequest, end: RequestEnd) -> None:
        """The client has the whole answer, or a refusal or error."""
        if not sent.ended:
            self._close(sent, end)

    def _close(self, sent: SentRequest, end: RequestEnd) -> None:
        sent.ended = True
        del self._open[sent.number]
        self._log.add(sent, end, self.queue.now)
        tree = sent.tree
        tree.left -= 1
        wait_s = 0.0
        if end.outcome is RequestOutcome.OK:
            tree.left += len(sent.node.children)
            for child in sent.node.children:
                self.queue.after(child.pause_s, self._send, sent.region, child, tree)
        else:
            wait_s = end.retry_after_s or RETRY_S
        if tree.left == 0:
            if tree.client is not None:
                self.queue.after(wait_s, self._next_tree, tree.client)
            self._finish_one()

    def _finish_one(self) -> None:
        self._unfinished -= 1
        if self._unfinished == 0:
            self._world.all_answered()

    def waits(self, number: int, reason: str) -> SentRequest | None:
        """The request with this number, if it is open and a limit for that reason holds for it."""
        sent = self._open.get(number)
        return sent if sent is None or reason == TIMEOUT or sent.first_at is None else None

    def hang_up(self, sent: SentRequest, reason: str) -> None:
        """The client closes its connection."""
        router = self._router_of(sent)
        self._network.send_http(sent.region, router.site, router.receive_hang_up, sent)
        self._close(sent, RequestEnd(RequestOutcome.FAILED, reason))


class WaitLimit:
    """Clients that wait longer than a limit hang up; one event of the queue serves them all."""

    def __init__(self, clients: SimClients, reason: str, limit_s: float) -> None:
        self._clients = clients
        self._reason = reason
        self._limit_s = limit_s
        self._due: deque[tuple[float, int]] = deque()  # when, and the request's number
        self._is_set = False

    def begin(self, number: int) -> None:
        """That request was sent now."""
        if self._limit_s == inf:
            return
        due, clients = self._due, self._clients
        while due and clients.waits(due[0][1], self._reason) is None:
            due.popleft()
        due.append((clients.queue.now + self._limit_s, number))
        self._set()

    def _set(self) -> None:
        if self._due and not self._is_set:
            self._is_set = True
            self._clients.queue.at(self._due[0][0], self._expire)

    def _expire(self) -> None:
        self._is_set = False
        clients, due = self._clients, self._due
        while due and due[0][0] <= clients.queue.now:
            sent = clients.waits(due.popleft()[1], self._reason)
            if sent is not None:
                clients.hang_up(sent, self._reason)
        self._set()


class RequestLog:
    """Every request's end, counted once and hashed, so that one number compares two runs.

    Counts and times are `mesh replay`'s own (`mesh.replay.tally`), so both report the same fields.
    One inter-token time is taken per answer, its mean: tokens are no events here. The digest covers
    every request, those of the warm-up too, in the order in which they ended.
    """

    def __init__(self, regions: list[RegionId], dice: Random, reported_from: float) -> None:
        """`reported_from`: requests that begin earlier are only counted and hashed."""
        self.sent = 0
        self.ended = 0
        self.forwarded = 0
        self.last_at = 0.0
        self.watch: OnRequestEnd | None = None  # called with every reported end
        self._first_at: float | None = None
        self._reported_from = reported_from
        self._tally = RunTally(regions, dice)
        self._hash = hashlib.blake2b(digest_size=16)

    def began(self, sent: SentRequest) -> None:
        self.sent += 1
        if self._first_at is None:
            self._first_at = sent.sent_at

    def add(self, sent: SentRequest, end: RequestEnd, now: float) -> None:
        self.ended += 1
        self.last_at = now
        ok = end.outcome is RequestOutcome.OK
        ttft_s = NO_TTFT if sent.first_at is None else sent.first_at - sent.sent_at
        e2e_s = now - sent.sent_at
        self._add_to_digest(sent, end, ttft_s, e2e_s)
        if sent.sent_at < self._reported_from:
            return
        self.forwarded += ok and end.hops > 0
        tokens = sent.node.answer.tokens
        prompt_tokens = sent.node.prompt_tokens
        result = RequestResult(
            end.outcome,
            end.reason,
            ttft_s=ttft_s if ok else None,
            e2e_s=e2e_s,
            gaps_s=((e2e_s - ttft_s) / (tokens - 1),) if ok and tokens > 1 else (),
            usage=RecordedUsage(prompt_tokens, tokens, end.cached_tokens) if ok else None,
        )
        self._tally.add(sent.region, result, prompt_tokens)
        if self.watch is not None:
            self.watch(sent, end, now)

    def report(self, facts: dict[str, object]) -> RunReport:
        """The fields of a replay's report, and `facts`."""
        first_at = max(self._first_at or 0.0, self._reported_from)
        return build_report(self._tally, max(0.0, self.last_at - first_at), facts)

    def digest(self) -> str:
        """The hash of all ends."""
        return self._hash.hexdigest()

    def _add_to_digest(
        self, sent: SentRequest, end: RequestEnd, ttft_s: float, e2e_s: float
    ) -> None:
        outcome = _OUTCOMES.index(end.outcome)
        us = round(ttft_s * 1e6), round(e2e_s * 1e6)
        self._hash.update(_LINE.pack(sent.number, *us, end.cached_tokens, outcome, end.hops))
        self._hash.update(f"{sent.region} {end.replica} {end.reason}\n".encode())
