"""A router of the twin: the real core and the real session, with the world as bus and clients.

Messages are calls that the network delays; bodies and tokens are not sent at all. What happens by
the clock is in `pulse`, gossip in `trie_links`, leases in `lease_streams`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model import effects as fx
from mesh.core.model import events as ev
from mesh.core.model.prompt import BLOCK_BYTES
from mesh.core.model.request import Request
from mesh.core.router import RouterCore
from mesh.replay.tally import RequestOutcome
from mesh.session.answer import EVENT_STREAM, WORKING, Held, Message
from mesh.session.headers import read_forwarded
from mesh.session.record import OpenRequest
from mesh.session.session import Session
from mesh.sim.ask import Answered, Ask, Tree
from mesh.sim.event_queue import EventQueue
from mesh.sim.network import BUS_S, Network
from mesh.sim.place import STATUS_OK, Asker, End, Surroundings, Worker
from mesh.sim.workload import HASH_TOKENS, RequestNode, Segment, keys_of
from schemas import exchange, subjects
from schemas.exchange import Priority
from schemas.http import Fault
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.state import Digest, Heartbeat

ROUTER = RouterId("r1")  # every region has this one
MODEL = ModelId("twin")
SHED = (Fault.SATURATED, Fault.NO_REPLICA, Fault.DRAINING)
NO_CONNECTION, CONNECTION_LOST = "no_connection", "connection_lost"
READ_LAST_S = 2 * BUS_S  # from a router's start: a question to the stream, and its answers
SOME_EVENT = b"\n\n"  # stands for the first bytes of an event stream
ONE_TOKEN = Segment(0, 1)  # the answer that nobody reads


@dataclass(slots=True, kw_only=True)
class TwinRequest(OpenRequest):
    """A request in a router of the twin. `asker` is the router that its answer goes to."""

    ask: Ask
    asker: Asker
    began: bool = False  # its client has a first byte


class SimRouter:
    """`open` it with a core; `crash` and `open` again for a fault. `hear_…` is what comes in.

    It is its session's bus (mesh.session.record.Bus) and its store of prefixes.
    """

    is_connected = True

    def __init__(
        self,
        site: RegionId,
        queue: EventQueue,
        network: Network,
        around: Surroundings,
        name: RouterId = ROUTER,
    ) -> None:
        self.site = site
        self.name = name
        self.core: RouterCore | None = None
        self._queue = queue
        self._network = network
        self._around = around
        # They go on over restarts, so that no two attempts ever answer to one inbox.
        self._keys, self._tokens = count(1), count(1)
        self._session = self._new_session()
        self._by_ask: dict[int, TwinRequest] = {}
        self._kept: dict[int, tuple[Segment, ...]] = {}  # beginnings of prompts, by name
        # The region's last-value stream: it outlives the router.
        self._last_heartbeats: dict[ReplicaId, Heartbeat] = {}

    def _new_session(self) -> Session:
        origin = Origin(self.site, self.name)

        def publish(effect: fx.PublishDigest) -> None:
            self._around.publish(origin, effect.digest)

        session = Session(
            self.site,
            self.name,
            decide=self._decide,
            clock=lambda: self._queue.now,
            bus=self,
            prefixes=self,
            secret=lambda: f"{next(self._tokens):x}",
            keys=self._keys,
        )
        session.performers.update({fx.PublishDigest: publish, **self._around.gossip(origin)})
        return session

    def _decide(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """What the core says; requests by the meter's clock."""
        assert self.core is not None
        if type(event) is not ev.RequestArrived:
            return self.core.handle(event, now)
        meter = self._around.meter
        began = meter.clock() if meter.clock else 0.0
        effects = self.core.handle(event, now)
        meter.seconds += meter.clock() - began if meter.clock else 0.0
        meter.decisions += 1
        return effects

    @property
    def is_up(self) -> bool:
        """Whether its process runs."""
        return self.core is not None

    @property
    def open_requests(self) -> int:
        """Clients that wait for an answer."""
        return len(self._session)

    def open(self, core: RouterCore) -> None:
        """Serve with this core, which soon knows what was last heard of its replicas."""
        self.core = core
        self._queue.after(READ_LAST_S, self._read_last, core)

    def _read_last(self, core: RouterCore) -> None:
        if self.core is core:
            for beat in tuple(self._last_heartbeats.values()):
                self.feed(ev.HeartbeatSeen(beat))

    def crash(self) -> None:
        """The process is gone, and its clients' connections with it."""
        self.core = None
        for record in self._records():
            self._tell(record.ask, Answered(RequestOutcome.FAILED, CONNECTION_LOST))
        self._session = self._new_session()
        self._by_ask.clear()
        self._kept.clear()

    def _records(self) -> Iterator[TwinRequest]:
        for record in self._session:
            assert isinstance(record, TwinRequest)
            yield record

    def feed(self, event: ev.Event) -> None:
        """Something has happened. A crashed router hears nothing."""
        if self.core is not None:
            self._session.feed(event)

    def tick(self) -> None:
        """Time has passed."""
        if self.core is not None:
            self._session.tick()

    # Clients.

    def hear_client(self, ask: Ask) -> None:
        """A request comes in."""
        if self.core is None:
            self._tell(ask, Answered(RequestOutcome.FAILED, NO_CONNECTION))
        elif MODEL not in self.core.known_models():
            self._tell(
                ask, Answered(RequestOutcome.FAILED, f"http_{Fault.MODEL_UNKNOWN.value.status}")
            )
        else:
            self._admit(ask)

    def _admit(self, ask: Ask) -> None:
        now = self._queue.now
        request = Request(
            key=next(self._keys),
            request_id=ask.request_id,
            model=MODEL,
            prompt=ask.prompt,
            session=ask.session,
            arrived_at=now,
            deadline=now + self._around.request_s,
            hops=0,
            origin=self.site,
            priority=Priority(ask.node.priority),
            slo_ttft_s=ask.node.slo_ttft_s,
            wants_receipt=False,
        )
        changed = partial(self._changed, ask.number)
        record = TwinRequest(request=request, ask=ask, asker=self, changed=changed)
        self._by_ask[ask.number] = record
        self._session.admit(record)

    def hear_hang_up(self, ask: Ask) -> None:
        """A client is gone."""
        if (record := self._by_ask.get(ask.number)) is not None:
            self.feed(ev.ClientGone(record.request.key))
            self._close(record)

    def _changed(self, number: int) -> None:
        """The client is sent what there is for it."""
        record = self._by_ask.get(number)
        if record is None:
            return
        answer, failure = record.answer, record.failure
        if failure is not None:
            outcome = RequestOutcome.SHED if failure.fault in SHED else RequestOutcome.FAILED
            code = failure.fault.value.code
            self._end(record, Answered(outcome, code, failure.retry_after_s))
        elif record.pass_engine_error:
            self._end(record, Answered(RequestOutcome.FAILED, "engine_error"))
        elif answer is not None and answer.end is not None:
            self._end(record, _answered(record))
        elif not record.began and answer is not None and answer.is_startable:
            record.began = True
            self._http(record.ask, self._around.first_byte, record.ask)
            self._session.started(record)

    def _end(self, record: TwinRequest, answered: Answered) -> None:
        self._close(record)
        self._tell(record.ask, answered)

    def _close(self, record: TwinRequest) -> None:
        self._session.close(record)
        self._by_ask.pop(record.ask.number, None)

    def _http(self, ask: Ask, call: Callable[..., None], *args: Any) -> None:
        self._network.send_http(self.site, ask.region, call, *args)

    def _tell(self, ask: Ask, answered: Answered) -> None:
        self._http(ask, self._around.answered, ask, answered)

    # What the bus brings.

    def hear_ingress(self, inbox: str, headers: dict[str, str], ask: Ask, asker: Asker) -> None:
        """A peer's request, to be placed, held or refused."""
        if self.core is None:
            self._network.send(self.site, asker.site, asker.hear_nobody, inbox)
            return
        request = read_forwarded(
            headers,
            lambda model, path: ask.prompt,
            key=next(self._keys),
            home=self.site,
            label=None,
            inbox=inbox,
            now=self._queue.now,
            wants_receipt=False,
        )
        record = TwinRequest(request=request, received=headers, ask=ask, asker=asker)
        self._session.admit_forwarded(record)

    def hear_digest(self, digest: Digest) -> None:
        """A peer region's state."""
        self.feed(ev.DigestSeen(digest))

    def hear_heartbeat(self, beat: Heartbeat) -> None:
        """A replica's state; of a region that this one has adopted, too."""
        if beat.region == self.site:
            self._last_heartbeats[beat.replica] = beat
        self.feed(ev.HeartbeatSeen(beat))

    def hear_nobody(self, inbox: str) -> None:
        """Nothing was begun: whoever was asked rests until it speaks."""
        self._session.answers.no_subscriber(inbox)

    def hear_refused(self, inbox: str, refused: exchange.Refused) -> None:
        """A replica, or a peer for all of its region, does not take it."""
        self._receive(inbox, refused)

    def hear_placed(self, inbox: str, replica: Worker) -> None:
        """A peer found who will answer."""
        self._receive(inbox, exchange.Placed(replica.site, replica.name), replica)

    def hear_held(self, inbox: str) -> None:
        """A peer has it in its line."""
        self._receive(inbox, Held())

    def hear_lost(self, inbox: str, replica: ReplicaId) -> None:
        """A peer lost who was answering."""
        self._receive(inbox, exchange.Lost(self.site, replica))

    def hear_first(self, inbox: str, replica: Worker, status: int) -> None:
        """The answer begins. What is no stream is complete before its client sees of it."""
        kind = EVENT_STREAM if status == STATUS_OK else ""
        head = exchange.Head(status, kind, replica.site, replica.name)
        if self._receive(inbox, head, replica) and kind:
            self._receive(inbox, SOME_EVENT)

    def hear_progress(self, inboxes: Sequence[str]) -> None:
        """Frames of these answers keep coming."""
        for inbox in inboxes:
            self._receive(inbox, WORKING)

    def hear_end(self, inbox: str, end: End) -> None:
        """The answer is over, well or badly."""
        used = end.usage
        counts = used.prompt_tokens, used.cached_tokens, used.completion_tokens
        self._receive(inbox, exchange.End(end.outcome, end.detail, *counts, -1.0))

    def _receive(self, inbox: str, message: Message, sender: Worker | None = None) -> bool:
        """Whether somebody waits for it; the sender of a stray is told to stop."""
        if self.core is None:
            return False
        is_awaited = self._session.answers.receive(inbox, message)
        if not is_awaited and sender is not None:
            self._send(sender.site, sender.hear_cancel, inbox)
        return is_awaited

    # The session's bus.

    def send_work(
        self,
        record: OpenRequest,
        region: RegionId,
        replica: ReplicaId,
        inbox: str,
        headers: dict[str, str],
    ) -> bool:
        """The request to a replica, which answers to the router that asked."""
        assert isinstance(record, TwinRequest)
        worker = self._around.replicas[replica]
        self._send(worker.site, worker.hear_work, inbox, headers, record.ask, record.asker)
        return True

    def send_ingress(
        self, record: OpenRequest, peer: RegionId, inbox: str, headers: dict[str, str]
    ) -> bool:
        """The request to one of the peer's routers, as its queue group would choose."""
        assert isinstance(record, TwinRequest)
        crew = self._around.routers[peer]
        living = [router for router in crew if router.is_up] or crew
        asked = living[self._around.pick(len(living))]
        self._send(asked.site, asked.hear_ingress, inbox, headers, record.ask, self)
        return True

    def send_body(
        self, record: OpenRequest, region: RegionId, replica: ReplicaId, inbox: str
    ) -> None:
        """Bodies of the twin are never too large."""

    def send_cancel(self, region: RegionId, replica: ReplicaId, inbox: str) -> None:
        """Nobody waits for this answer any more."""
        worker = self._around.replicas[replica]
        self._send(worker.site, worker.hear_cancel, inbox)

    def send_credit(self, region: RegionId, replica: ReplicaId, credit: exchange.Credit) -> None:
        """Clients of the twin are never slow."""

    def answer_peer(
        self, inbox: str, message: exchange.Placed | exchange.Lost | exchange.Refused | Held
    ) -> None:
        """What has become of a peer's request."""
        asker = self._asker(inbox)
        if isinstance(message, exchange.Placed):
            replica = self._around.replicas[ReplicaId(message.replica)]
            self._send(asker.site, asker.hear_placed, inbox, replica)
        elif isinstance(message, exchange.Refused):
            self._send(asker.site, asker.hear_refused, inbox, message)
        elif isinstance(message, exchange.Lost):
            self._send(asker.site, asker.hear_lost, inbox, ReplicaId(message.replica))
        else:
            self._send(asker.site, asker.hear_held, inbox)

    def _asker(self, inbox: str) -> Asker:
        address = subjects.parse_inbox(inbox)
        assert address is not None, "our own routers' inboxes"
        crew = self._around.routers[address.region]
        [asker] = [router for router in crew if router.name == address.router]
        return asker

    def _send(self, to: RegionId, call: Callable[..., None], *args: Any) -> None:
        self._network.send(self.site, to, call, *args)

    # The session's store of prefixes: lists of segments, with the same keys as the whole.

    def keep(self, prefix: int, record: OpenRequest, blocks: int) -> int | None:
        """Keep the first blocks of its prompt."""
        assert isinstance(record, TwinRequest)
        self._kept[prefix] = cut(record.ask.node.prompt, blocks * HASH_TOKENS)
        return blocks * BLOCK_BYTES

    def drop(self, prefix: int) -> None:
        """Keep it no more."""
        self._kept.pop(prefix, None)

    def open_warm_up(self, request: Request, prefix: int) -> OpenRequest:
        """Ended from the first: no client hears of it."""
        node = RequestNode(prompt=self._kept[prefix], answer=ONE_TOKEN, priority=request.priority)
        now, tree = self._queue.now, Tree(None)
        keys = keys_of(node)
        ask = Ask(request.key, self.site, node, tree, keys, request.prompt, now, ended=True)
        return TwinRequest(request=request, ask=ask, asker=self)


def _answered(record: TwinRequest) -> Answered:
    """What the client hears of a complete answer."""
    answer = record.answer
    assert answer is not None and answer.head is not None and answer.end is not None
    status = answer.head.status
    return Answered(
        RequestOutcome.OK if status == STATUS_OK else RequestOutcome.FAILED,
        "" if status == STATUS_OK else f"http_{status}",
        replica=answer.replica,
        cached_tokens=max(0, answer.end.cached_tokens),
        hops=int(answer.asked is not None),
        attempts=answer.attempt,
    )


def cut(prompt: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """The first `tokens` of a prompt that has at least so many."""
    found = []
    for part in prompt:
        if tokens <= 0:
            break
        found.append(part._replace(tokens=min(part.tokens, tokens)))
        tokens -= part.tokens
    return tuple(found)
