"""What a router and a batch runner of the twin have in common: a session, and the world as its bus.

Messages are calls that the network delays; bodies and tokens are not sent at all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from mesh.core.gossip.remote_prefixes import Origin
from mesh.core.model.request import Request
from mesh.session.answer import EVENT_STREAM, WORKING, Held, Message
from mesh.session.headers import read_forwarded
from mesh.session.record import Home, Identifiers, OpenRequest
from mesh.session.session import Session
from mesh.sim.workload import SentRequest
from schemas import exchange, subjects
from schemas.held import PromptBlocks
from schemas.ids import RegionId, ReplicaId, RouterId
from schemas.state import Heartbeat

if TYPE_CHECKING:
    from mesh.sim.replica import SimReplica
    from mesh.sim.world import World

SOME_EVENT = b"\n\n"  # in place of the first bytes of an event stream


@dataclass(slots=True, kw_only=True)
class TwinRequest(OpenRequest):
    """A request that is open at a host. `receiver`: the host that its answer goes to."""

    sent: SentRequest
    receiver: "SessionHost"
    began: bool = False  # its client has a first byte


class SessionHost(ABC):
    """A process with a session; it is its session's bus (mesh.session.record.Bus).

    A crashed one (`is_up` is false) receives nothing.
    """

    is_connected = True

    def __init__(self, world: "World", site: RegionId, name: RouterId) -> None:
        self.site = site
        self.name = name
        self._world = world
        self._queue = world.queue
        self._network = world.network
        # Restarts continue these numbers, so that no two attempts share an inbox.
        self._keys, self._tokens = count(1), count(1)
        self._session = self._new_session()

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Whether the process runs."""

    @abstractmethod
    def _decide(self, event: Any, now: float) -> list[Any]:
        """The core's effects."""

    @abstractmethod
    def _peer(self, region: RegionId, request: Request) -> "SessionHost":
        """One of the peer region's hosts that take such requests, as a queue group would choose."""

    @abstractmethod
    def receive_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Of a replica whose heartbeats this host receives."""

    @property
    def origin(self) -> Origin:
        return Origin(self.site, self.name)

    def _new_session(self) -> Session:
        return Session(
            Home(self.site, self.name),
            decide=self._decide,
            clock=lambda: self._queue.now,
            bus=self,
            ids=Identifiers(lambda: f"{next(self._tokens):x}", self._keys),
        )

    def feed(self, event: Any) -> None:
        """An event for the core; a crashed host receives none."""
        if self.is_up:
            self._session.feed(event)

    def tick(self) -> None:
        if self.is_up:
            self._session.tick()

    # Messages of the bus.

    def receive_ingress(
        self, inbox: str, headers: dict[str, str], sent: SentRequest, receiver: "SessionHost"
    ) -> None:
        """A peer's request, to be placed, held or refused."""
        if not self.is_up:
            self._network.send(self.site, receiver.site, receiver.no_responders, inbox)
            return
        request = read_forwarded(
            headers,
            lambda model, path: sent.prompt,
            key=next(self._keys),
            home=self.site,
            label=None,
            inbox=inbox,
            now=self._queue.now,
            wants_receipt=False,
        )
        request = self._received(request, sent)
        record = TwinRequest(request=request, received=headers, sent=sent, receiver=receiver)
        self._session.admit_forwarded(record)

    def _received(self, request: Request, sent: SentRequest) -> Request:
        """A peer's request as this host reads it."""
        return request

    def no_responders(self, inbox: str) -> None:
        """The bus itself: nothing subscribes to the subject to which a request was published."""
        self._session.answers.no_subscriber(inbox)

    def receive(self, inbox: str, message: Message, sender: "SimReplica | None" = None) -> bool:
        """Whether an attempt under way has this inbox; if none has, the sender gets a cancel."""
        if not self.is_up:
            return False
        is_open = self._session.answers.receive(inbox, message)
        if not is_open and sender is not None:
            self._send(sender.site, sender.receive_cancel, inbox)
        return is_open

    def receive_head(self, inbox: str, head: exchange.Head, replica: "SimReplica") -> None:
        """The answer begins. One that is no stream is complete before its client receives it."""
        if self.receive(inbox, head, replica) and head.content_type == EVENT_STREAM:
            self.receive(inbox, SOME_EVENT)

    def receive_progress(self, inboxes: Sequence[str]) -> None:
        """Frames of these answers keep coming."""
        for inbox in inboxes:
            self.receive(inbox, WORKING)

    # The session's bus.

    def send_work(
        self,
        record: OpenRequest,
        region: RegionId,
        replica: ReplicaId,
        inbox: str,
        headers: dict[str, str],
    ) -> bool:
        """The request to a replica, which answers to the record's receiver."""
        assert isinstance(record, TwinRequest)
        to = self._world.replicas[replica]
        self._send(to.site, to.receive_work, inbox, headers, record.sent, record.receiver)
        return True

    def send_ingress(
        self, record: OpenRequest, peer: RegionId, inbox: str, headers: dict[str, str]
    ) -> bool:
        """The request to one of the peer's hosts."""
        assert isinstance(record, TwinRequest)
        to = self._peer(peer, record.request)
        self._send(to.site, to.receive_ingress, inbox, headers, record.sent, self)
        return True

    def send_body(
        self,
        record: OpenRequest,
        region: RegionId,
        replica: ReplicaId,
        inbox: str,
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Bodies of the twin are never too large."""
        return True

    def send_blocks(self, region: RegionId, replica: ReplicaId, blocks: PromptBlocks) -> None:
        """Engines of the twin report no KV events."""
        return

    def link_returned(self, region: RegionId) -> None:
        """Nothing is paced."""
        return

    def send_cancel(self, region: RegionId, replica: ReplicaId, inbox: str) -> None:
        to = self._world.replicas[replica]
        self._send(to.site, to.receive_cancel, inbox)

    def send_credit(self, region: RegionId, replica: ReplicaId, credit: exchange.Credit) -> None:
        """Clients of the twin are never slow."""
        return

    def answer_peer(
        self, inbox: str, message: exchange.Placed | exchange.Lost | exchange.Refused | Held
    ) -> None:
        """The state of a peer's request, to the router that forwarded it."""
        address = subjects.parse_inbox(inbox)
        assert address is not None, "our own routers' inboxes"
        to = self._world.host(Origin(address.region, address.router))
        sender = None
        if isinstance(message, exchange.Placed):
            sender = self._world.replicas[ReplicaId(message.replica)]
        self._send(to.site, to.receive, inbox, message, sender)

    def _send(self, to: RegionId, call: Callable[..., object], *args: Any) -> None:
        self._network.send(self.site, to, call, *args)
