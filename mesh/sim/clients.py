"""Everyone who asks: arrivals at their times, and users who go on when they have their answer.

One driver plays both as trees of nodes. A node that has its whole answer lets its children be
asked, each after its pause. A node that is shed or fails takes its subtree with it: nobody asks
the next question of a conversation that broke. A user of a closed loop then begins the next
tree, after the time that a refusal told them to wait (a second where it told none): without
that, users of a full mesh would ask three thousand times a second.

Keys of a prompt are made when it is asked and dropped when it ends, so a run of a million
requests holds only what is open. A client that waits too long hangs up.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from mesh.core.requests.request import Request
from mesh.replay.tally import Outcome
from mesh.sim.ask import Answered, Ask, Tree, number_of
from mesh.sim.event_queue import EventQueue
from mesh.sim.ledger import Ledger
from mesh.sim.network import Network
from mesh.sim.prompts import estimate, keys_of
from mesh.sim.router import SimRouter
from mesh.sim.workload import Arrival, Client, Node, Workload
from schemas.ids import RegionId

PAUSE_S = 1.0  # of a user whose request failed
TIMEOUT, UNFINISHED = "timeout", "unfinished"
SPREAD = 2_654_435_761  # the golden ratio of 2**32: neighbours go to different doors


class Clients:
    """`begin` once; `is_quiet` is called when nobody will ask and nobody waits any more."""

    def __init__(
        self,
        workload: Workload,
        queue: EventQueue,
        network: Network,
        routers: Mapping[RegionId, Sequence[SimRouter]],  # of every clients' region
        ledger: Ledger,
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
        self._ledger = ledger
        self._dice = dice
        self._timeout_s = timeout_s
        self._token_error = token_error
        self._is_quiet = is_quiet
        self._began_at = 0.0
        self._unfinished = 0  # trees in play, users, and the list of arrivals
        self._open: dict[int, Ask] = {}
        self._patience: deque[tuple[float, int]] = deque()  # ends of it, by number
        self._patience_watched = False

    @property
    def quiet(self) -> bool:
        """Whether everything has been asked and answered."""
        return self._unfinished == 0

    def ask_of(self, request: Request) -> Ask:
        """What stands behind a request that a router decides on: for policies that know all."""
        return self._open[number_of(request.request_id)]

    def begin(self) -> None:
        """The workload's time 0 is now."""
        self._began_at = self._queue.now
        clients = self._workload.clients
        self._unfinished = 1 + len(clients)
        for client in clients:
            self._queue.at(self._began_at + client.starts_at_s, self._next_tree, client)
        self._await(iter(self._workload.arrivals))

    def give_up(self) -> None:
        """The world ends: what is open has failed."""
        for ask in list(self._open.values()):
            self._close(ask, Answered(Outcome.FAILED, UNFINISHED))

    # What is asked.

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

    def _next_tree(self, client: Client) -> None:
        until_s = self._workload.until_s
        over = until_s is not None and self._queue.now >= self._began_at + until_s
        root = None if over else next(client.trees, None)
        if root is None:
            self._finish_one()
        else:
            self._unfinished += 1
            self._ask(client.region, root, Tree(client))

    def _ask(self, region: RegionId, node: Node, tree: Tree) -> None:
        number = self._ledger.asked + 1
        keys = keys_of(node)
        prompt = estimate(keys.hashes, node.prompt_tokens, self._token_error, self._dice)
        ask = Ask(number, region, node, tree, keys, prompt, self._queue.now)
        self._ledger.began(ask)
        self._open[number] = ask
        self._be_patient(number)
        router = self._door(ask)
        self._network.send_http(region, router.site, router.hear_client, ask)

    def _door(self, ask: Ask) -> SimRouter:
        """The router of its region that it came to: any, and the same each time it is asked for."""
        crew = self._routers[ask.region]
        return crew[(ask.number * SPREAD % 2**32 >> 16) % len(crew)]

    # What is answered.

    def first_byte(self, ask: Ask) -> None:
        """The first token is here."""
        ask.first_at = self._queue.now

    def answered(self, ask: Ask, answered: Answered) -> None:
        """The answer is complete, or there is none."""
        if not ask.ended:
            self._close(ask, answered)

    def _close(self, ask: Ask, answered: Answered) -> None:
        ask.ended = True
        del self._open[ask.number]
        self._ledger.add(ask, answered, self._queue.now)
        tree = ask.tree
        tree.left -= 1
        wait_s = 0.0
        if answered.outcome is Outcome.OK:
            tree.left += len(ask.node.children)
            for child in ask.node.children:
                self._queue.after(child.pause_s, self._ask, ask.region, child, tree)
        else:
            wait_s = answered.retry_after_s or PAUSE_S
        if tree.left == 0:
            if tree.client is not None:
                self._queue.after(wait_s, self._next_tree, tree.client)
            self._finish_one()

    def _finish_one(self) -> None:
        self._unfinished -= 1
        if self._unfinished == 0:
            self._is_quiet()

    # Patience.

    def _be_patient(self, number: int) -> None:
        patience = self._patience
        while patience and patience[0][1] not in self._open:
            patience.popleft()
        patience.append((self._queue.now + self._timeout_s, number))
        self._watch_patience()

    def _watch_patience(self) -> None:
        if self._patience and not self._patience_watched:
            self._patience_watched = True
            self._queue.at(self._patience[0][0], self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience_watched = False
        patience = self._patience
        while patience and patience[0][0] <= self._queue.now:
            ask = self._open.get(patience.popleft()[1])
            if ask is not None:
                self._hang_up(ask)
        self._watch_patience()

    def _hang_up(self, ask: Ask) -> None:
        router = self._door(ask)
        self._network.send_http(ask.region, router.site, router.hear_hang_up, ask)
        self._close(ask, Answered(Outcome.FAILED, TIMEOUT))
