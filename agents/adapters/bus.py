"""The agent on the bus: its subscriptions, what it publishes, and whether the server permits it to
be the replica that it claims to be.

nats-py awaits the callbacks of one subscription one after another, so a callback decodes, feeds
the core and returns; responses run in tasks of their own. Bytes that are no message of ours are
counted and dropped. nats-py's buffers are bounded too: beyond its limit a subscription drops
messages, and the frames' numbers show the router that some are missing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from agents.adapters.outbox import BusConnection, Outbox
from agents.core.events import (
    AgentEvent,
    AliveArrived,
    BodyPartArrived,
    CancelArrived,
    DrainOrder,
    WorkArrived,
)
from infra.bus import FLUSH_TIMEOUT_S, BusClient, BusUnreachable, closed_for_good
from infra.process import LimitedLog
from infra.services import Endpoint, EndpointFigures, ProcessService
from schemas import subjects
from schemas.exchange import H_BODY_INBOX, H_BODY_OFFSET, Alive, Cancel, Credit
from schemas.held import HeldAsk, HeldDelta, HeldPart, PromptBlocks
from schemas.ids import ModelId, RegionId, ReplicaId, RouterId
from schemas.state import Heartbeat, encode_state
from schemas.wire import WireError, decode, decode_as, encode

log = logging.getLogger(__name__)

WORK_MESSAGES_MAX = 4096
CONTROL_MESSAGES_MAX = 65536
BYTES_MAX = 64 * 1024 * 1024
OFFSET_DIGITS_MAX = 10
CLOSE_TIMEOUT_S = 2

EventSink = Callable[[AgentEvent], Awaitable[None]]
M = TypeVar("M")


class AgentBus:
    """One agent's subscriptions and what it publishes; frames of responses go through `outbox`,
    which the caller runs."""

    def __init__(
        self, client: BusClient, connection: BusConnection, region: RegionId, replica: ReplicaId
    ) -> None:
        """`connection`: the client's callbacks report its losses and returns to it."""
        self._client = client
        self._region = region
        self._replica = replica
        self._heartbeats = subjects.heartbeat(region, replica)
        self._held = subjects.held(region, replica)
        self._subscriptions: list[Subscription] = []
        self._metadata: dict[str, str] = {}
        self._service: ProcessService | None = None
        self._log = LimitedLog(log)
        self.unanswered = 0  # work that was dropped because of its reply subject
        self.outbox = Outbox(client.publish, connection)

    async def listen(self, feed: EventSink, credit: Callable[[Credit], None]) -> None:
        """Subscribe. Events go to `feed`, credits straight to the relay they belong to.

        On return the server has accepted or refused every subscription, unless it is away.
        """

        async def work(msg: Msg) -> None:
            await feed(WorkArrived(msg.reply, msg.headers or {}, msg.data))

        async def cancel(msg: Msg) -> None:
            if (message := self._decoded(Cancel, msg)) is not None:
                await feed(CancelArrived(message.inbox))

        async def credited(msg: Msg) -> None:
            if (message := self._decoded(Credit, msg)) is not None:
                credit(message)

        async def body(msg: Msg) -> None:
            if (part := self._body_part(msg)) is not None:
                await feed(part)

        async def alive(msg: Msg) -> None:
            if (message := self._decoded(Alive, msg)) is not None:
                await feed(self._alive(msg.subject, message))

        me = (self._region, self._replica)
        await self._subscribe(subjects.alive(subjects.ANY, subjects.ANY), alive)
        await self._subscribe(subjects.cancel(*me), cancel)
        await self._subscribe(subjects.credit(*me), credited)
        await self._subscribe(subjects.body(*me), body)
        queue, most = subjects.QUEUE_AGENT, WORK_MESSAGES_MAX
        await self._subscribe(subjects.work(*me), work, queue=queue, messages=most)
        await self.flush(FLUSH_TIMEOUT_S)

    async def listen_for_blocks(self, received: Callable[[PromptBlocks | HeldAsk], None]) -> None:
        """Receive what routers send of prompts, for an agent that follows its engine's KV."""

        async def blocks(msg: Msg) -> None:
            try:
                message = None if msg.headers else decode(msg.data)
            except WireError as problem:
                self._dropped(msg, problem)
                return
            if isinstance(message, PromptBlocks | HeldAsk):
                received(message)

        subject = subjects.prompt_blocks(self._region, self._replica)
        await self._subscribe(subject, blocks)
        await self.flush(FLUSH_TIMEOUT_S)

    async def publish_held(self, message: HeldDelta | HeldPart) -> None:
        """Publish what the engine holds; while the bus is away it is lost, as routers notice."""
        if self._client.is_connected:
            with contextlib.suppress(nats.errors.Error):
                await self._client.publish(self._held, encode(message))

    async def register(
        self,
        engine: str,
        version: str | None,
        models: tuple[ModelId, ...],
        figures: Callable[[], EndpointFigures],
    ) -> None:
        """Show this agent in `nats micro ls|info|stats`; again when what it serves changes.

        `version`: the engine's, where it shows one.
        """
        # The service answers with this very dict, so changing it is enough later on.
        self._metadata.clear()
        self._metadata |= {"region": self._region, "replica": self._replica, "engine": engine}
        if version is not None:
            self._metadata["engine_version"] = version
        self._metadata["models"] = ", ".join(models)
        if self._service is None:
            work = subjects.work(self._region, self._replica)
            self._service = ProcessService(
                self._client,
                subjects.SERVICE_AGENT,
                self._replica,
                "The process beside one inference engine",
                self._metadata,
                Endpoint("work", work, subjects.QUEUE_AGENT),
                figures,
            )
            try:
                await self._service.start()
            except nats.errors.Error as problem:  # the bus is away; its subscriptions come back
                log.warning("registering as a service: %s", type(problem).__name__)

    async def publish_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Publish a heartbeat, unless the bus is away: it would be stale when it is back.

        Raises BusUnreachable once the connection is closed for good.
        """
        if self._client.is_closed:
            raise closed_for_good(self._client)
        if not self._client.is_connected:
            return
        try:
            await self._client.publish(self._heartbeats, encode_state(heartbeat))
        except nats.errors.Error as problem:
            log.warning("a heartbeat is lost: %s", type(problem).__name__)

    def drop_work(self, inbox: str, size_bytes: int) -> None:
        """Count and log work whose reply subject is not allowed."""
        self.unanswered += 1
        text = "dropped work of %d bytes: its reply subject %.200r is not allowed"
        self._log.warning("work", "reply", text, size_bytes, inbox)

    async def close(self) -> None:
        """Take no further message; those already here are still handled before this returns."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._subscriptions:
                    await self._subscriptions.pop().drain()  # type: ignore[no-untyped-call]
        except (TimeoutError, nats.errors.Error) as problem:
            log.warning("closing the subscriptions: %s", type(problem).__name__)

    async def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until the server has what was sent to it, for `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.outbox.sent()
                await self._client.flush(timeout_s)
        except (TimeoutError, nats.errors.Error) as problem:
            log.warning("the bus did not confirm what was sent: %s", type(problem).__name__)

    async def _subscribe(
        self,
        subject: str,
        callback: Callable[[Msg], Awaitable[None]],
        *,
        queue: str = "",
        messages: int = CONTROL_MESSAGES_MAX,
    ) -> None:
        self._subscriptions.append(
            await self._client.subscribe(
                subject,
                queue=queue,
                cb=callback,
                pending_msgs_limit=messages,
                pending_bytes_limit=BYTES_MAX,
            )
        )

    def _alive(self, subject: str, message: Alive) -> AliveArrived:
        tokens, seq = subject.split("."), message.control_seq
        return AliveArrived(
            RegionId(tokens[1]),
            RouterId(tokens[3]),
            message.epoch,
            dict(zip(message.owned, message.terms, strict=False)).get(self._region),
            DrainOrder(seq, message.drains(self._replica)) if seq >= 0 else None,
            message.next_within_s,
        )

    def _decoded(self, cls: type[M], msg: Msg) -> M | None:
        try:
            if msg.headers:  # what a stream sends to a reply subject has some, ours has none
                raise WireError("it has headers, so no router published it")
            return decode_as(cls, msg.data)
        except WireError as problem:
            self._dropped(msg, problem)
            return None

    def _body_part(self, msg: Msg) -> BodyPartArrived | None:
        headers: dict[str, Any] = msg.headers or {}
        inbox, offset = headers.get(H_BODY_INBOX), headers.get(H_BODY_OFFSET, "")
        if inbox and offset.isascii() and offset.isdigit() and len(offset) <= OFFSET_DIGITS_MAX:
            return BodyPartArrived(inbox, int(offset), msg.data)
        self._dropped(msg, WireError(f"{H_BODY_INBOX} or {H_BODY_OFFSET} is missing"))
        return None

    def _dropped(self, msg: Msg, problem: WireError) -> None:
        kind = msg.subject.rpartition(".")[2]
        text = "%s: dropped a message of %d bytes: %.300s"
        self._log.warning(kind, "unreadable", text, msg.subject, len(msg.data), problem)


class BusAuthorization:
    """Whether the bus permits this agent's own subjects. Give `complained` to `infra.bus.connect`.

    A nats-server reports a forbidden subject in a message of its own, later, and drops what was
    published: an agent with another replica's credentials would publish heartbeats in vain for
    ever. So a complaint about one of its own subjects ends the agent; any other is only logged.
    """

    def __init__(self, region: RegionId, replica: ReplicaId) -> None:
        self._who = f"{region}/{replica}"
        own = (
            subjects.heartbeat,
            subjects.work,
            subjects.cancel,
            subjects.credit,
            subjects.body,
        )
        self._own = tuple(f'"{subject(region, replica)}"' for subject in own)
        self._refused = asyncio.Event()

    def complained(self, problem: Exception) -> None:
        if any(subject in str(problem) for subject in self._own):
            self._refused.set()

    def check(self) -> None:
        """Raise BusUnreachable if the server has refused one of our own subjects so far."""
        if self._refused.is_set():
            raise BusUnreachable(
                f"the bus forbids this user the subjects of {self._who}: are these its credentials?"
            )

    async def watch(self) -> None:
        """Run until the server refuses one of our own subjects, then raise BusUnreachable."""
        await self._refused.wait()
        self.check()
