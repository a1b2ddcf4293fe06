"""All clients of a world: arrivals at their times, and users who continue after each answer.

One driver plays both as trees of nodes. When a node's answer is complete, its children are sent,
each after its pause. A node that is shed or fails ends its subtree. A user of a closed loop then
begins the next tree after the refusal's Retry-After, or a second where it had none: otherwise
users of a full mesh would send three thousand requests a second.

A prompt's keys are made when it is sent and dropped when it ends, so a run of a million requests
holds only the open ones. A client that waits longer than its timeout hangs up.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from mesh.core.model.request import Request
from mesh.replay.tally import RequestOutcome
from mesh.sim.ask import Answered, Ask, Tree, number_of
from mesh.sim.event_queue import EventQueue
from mesh.sim.network import Network
from mesh.sim.request_log import RequestLog
from mesh.sim.router import SimRouter
from mesh.sim.workload import Arrival, ClosedLoopClient, RequestNode, Workload, estimate, keys_of
from schemas.ids import RegionId

RETRY_S = 1.0  # of a user whose request failed without a Retry-After
TIMEOUT, UNFINISHED = "timeout", "unfinished"
SPREAD = 2_654_435_761  # the golden ratio of 2**32: successive requests go to different routers


class SimClients:
    """Call `begin` once; `is_quiet` is called when no request is open and none will be sent."""

    def __init__(
        self,
        workload: Workload,
        queue: EventQueue,
        network: Network,
        routers: Mapping[RegionId, Sequence[SimRouter]],  # of every clients' region
        log: RequestLog,
        dice: Random,
        *,
        timeout_s: float,
        token_error: float,
        is_quiet: Callable[[], None],
    ) -> None:
        self._workload = workload
        self._queue = queue
        self._network = network
        self._routers = routers
        self._log = log
        self._dice = dice
        self._timeout_s = timeout_s
        self._token_error = token_error
        self._is_quiet = is_quiet
        self._began_at = 0.0
        self._unfinished = 0  # trees, users, and the list of arrivals
        self._open: dict[int, Ask] = {}
        self._timeouts: deque[tuple[float, int]] = deque()  # when, and the request's number
        self._timeout_set = False

    @property
    def quiet(self) -> bool:
        """Whether every request has ended and none will be sent."""
        return self._unfinished == 0

    def ask_of(self, request: Request) -> Ask:
        """The client's side of a request that a router decides on, for policies of the twin."""
        return self._open[number_of(request.request_id)]

    def begin(self) -> None:
        """Start the workload: its time 0 is now."""
        self._began_at = self._queue.now
        clients = self._workload.clients
        self._unfinished = 1 + len(clients)
        for client in clients:
            self._queue.at(self._began_at + client.starts_at_s, self._next_tree, client)
        self._await(iter(self._workload.arrivals))

    def give_up(self) -> None:
        """The world ends: open requests have failed."""
        for ask in list(self._open.values()):
            self._close(ask, Answered(RequestOutcome.FAILED, UNFINISHED))

    def _await(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            self._finish_one()
        else:
            self._queue.at(self._began_at + arrival.at_s, self._arrive, arrival, arrivals)

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self._unfinished += 1
        self._ask(arrival.region, arrival.node, Tree(None))
        self._await(arrivals)

    def _next_tree(self, client: ClosedLoopClient) -> None:
        until_s = self._workload.until_s
        over = until_s is not None and self._queue.now >= self._began_at + until_s
        root = None if over else next(client.trees, None)
        if root is None:
            self._finish_one()
        else:
            self._unfinished += 1
            self._ask(client.region, root, Tree(client))

    def _ask(self, region: RegionId, node: RequestNode, tree: Tree) -> None:
        number = self._log.asked + 1
        keys = keys_of(node)
        prompt = estimate(keys.hashes, node.prompt_tokens, self._token_error, self._dice)
        ask = Ask(number, region, node, tree, keys, prompt, self._queue.now)
        self._log.began(ask)
        self._open[number] = ask
        self._add_timeout(number)
        router = self._router_of(ask)
        self._network.send_http(region, router.site, router.hear_client, ask)

    def _router_of(self, ask: Ask) -> SimRouter:
        """The router that the request is sent to: one of its region's, always the same."""
        routers = self._routers[ask.region]
        return routers[(ask.number * SPREAD % 2**32 >> 16) % len(routers)]

    def first_byte(self, ask: Ask) -> None:
        """The client has the first token."""
        ask.first_at = self._queue.now

    def answered(self, ask: Ask, answered: Answered) -> None:
        """The client has the whole answer, or a refusal or error."""
        if not ask.ended:
            self._close(ask, answered)

    def _close(self, ask: Ask, answered: Answered) -> None:
        ask.ended = True
        del self._open[ask.number]
        self._log.add(ask, answered, self._queue.now)
        tree = ask.tree
        tree.left -= 1
        wait_s = 0.0
        if answered.outcome is RequestOutcome.OK:
            tree.left += len(ask.node.children)
            for child in ask.node.children:
                self._queue.after(child.pause_s, self._ask, ask.region, child, tree)
        else:
            wait_s = answered.retry_after_s or RETRY_S
        if tree.left == 0:
            if tree.client is not None:
                self._queue.after(wait_s, self._next_tree, tree.client)
            self._finish_one()

    def _finish_one(self) -> None:
        self._unfinished -= 1
        if self._unfinished == 0:
            self._is_quiet()

    def _add_timeout(self, number: int) -> None:
        timeouts = self._timeouts
        while timeouts and timeouts[0][1] not in self._open:
            timeouts.popleft()
        timeouts.append((self._queue.now + self._timeout_s, number))
        self._set_timeout()

    def _set_timeout(self) -> None:
        if self._timeouts and not self._timeout_set:
            self._timeout_set = True
            self._queue.at(self._timeouts[0][0], self._time_out)

    def _time_out(self) -> None:
        self._timeout_set = False
        while self._timeouts and self._timeouts[0][0] <= self._queue.now:
            ask = self._open.get(self._timeouts.popleft()[1])
            if ask is not None:
                self._hang_up(ask)
        self._set_timeout()

    def _hang_up(self, ask: Ask) -> None:
        router = self._router_of(ask)
        self._network.send_http(ask.region, router.site, router.hear_hang_up, ask)
        self._close(ask, Answered(RequestOutcome.FAILED, TIMEOUT))
