"""Whether this agent may be the replica that it says it is: by the server's permissions, and alone
under its name."""

import asyncio
import logging
import struct
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StatusCode

from agents.core.name_claim import CLAIM_S, NameClaim, NameDecision
from infra.bus import BusUnreachable
from schemas import subjects
from schemas.ids import RegionId, ReplicaId

log = logging.getLogger(__name__)

EPOCH = struct.Struct(">Q")
STATUS = "Status"


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
        """The server complained."""
        if any(subject in str(problem) for subject in self._own):
            self._refused.set()

    def check(self) -> None:
        """Raise BusUnreachable if the server has refused one of our own subjects so far."""
        if self._refused.is_set():
            raise BusUnreachable(
                f"the bus does not let this user speak for {self._who}: are these its credentials?"
            )

    async def watch(self) -> None:
        """Run until the server refuses one of our own subjects, then raise BusUnreachable."""
        await self._refused.wait()
        self.check()


class ReplicaNameTaken(Exception):
    """Another agent serves under this name."""


class NameGuard:
    """Takes the agent's name on the bus and defends it (`agents.core.name_claim`).

    `take` it before listening for work, run `watch` while working, call `reconnected` after each
    reconnect. The server reports at once that nobody listens to a question, so a restart waits for
    nothing. If somebody listens and does not answer within CLAIM_S (an agent that is stopped or cut
    off, or a server whose older configuration forbids these subjects), the name is taken.
    """

    def __init__(
        self, region: RegionId, replica: ReplicaId, epoch: int, clock: Callable[[], float]
    ) -> None:
        self._who = f"{region}/{replica}"
        self._question = subjects.name(region, replica)
        self._answer = subjects.named(region, replica)
        self._epoch = EPOCH.pack(epoch)
        self._claim = NameClaim(epoch)
        self._clock = clock
        self._client: Client | None = None
        self._answered = asyncio.Event()  # or nobody listens
        self._reconnected = asyncio.Event()
        self._must_leave = asyncio.Event()

    async def take(self, client: Client) -> None:
        """Return when the name is ours. Raises ReplicaNameTaken."""
        self._client = client
        await client.subscribe(self._answer, cb=self._on_answer)
        await self._ask()
        try:
            async with asyncio.timeout(CLAIM_S):
                await self._answered.wait()
        except TimeoutError:
            log.warning(
                "%s: another agent may hold this name, but none answered in %g s; taking it",
                self._who,
                CLAIM_S,
            )
        self._check()
        self._claim.take()
        await client.subscribe(self._question, cb=self._on_question)
        await self._ask()  # another agent may have started at the same moment

    async def watch(self) -> None:
        """Run until another agent turns out to hold the name, then raise ReplicaNameTaken."""
        asking = asyncio.create_task(self._ask_again())
        try:
            await self._must_leave.wait()
        finally:
            asking.cancel()
        self._check()

    def reconnected(self) -> None:
        """The bus was away: another agent may have taken the name meanwhile."""
        self._reconnected.set()

    async def _ask_again(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            await self._ask()

    async def _ask(self) -> None:
        assert self._client is not None, "taken first"
        self._claim.ask(self._clock())
        await self._client.publish(self._question, self._epoch, reply=self._answer)

    async def _on_question(self, msg: Msg) -> None:
        if len(msg.data) == EPOCH.size:
            epoch = EPOCH.unpack(msg.data)[0]
            await self._perform(self._claim.question_arrived(epoch, self._clock()))

    async def _on_answer(self, msg: Msg) -> None:
        if (msg.headers or {}).get(STATUS) == StatusCode.SERVICE_UNAVAILABLE:
            self._answered.set()
        elif len(msg.data) == EPOCH.size:
            await self._perform(self._claim.answer_arrived(EPOCH.unpack(msg.data)[0]))

    async def _perform(self, decision: NameDecision) -> None:
        if decision is NameDecision.LEAVE:
            self._must_leave.set()
            self._answered.set()
        elif decision is NameDecision.ANSWER and self._client is not None:
            await self._client.publish(self._answer, self._epoch)

    def _check(self) -> None:
        if self._must_leave.is_set():
            raise ReplicaNameTaken(
                f"an agent {self._who} runs already; end that one, or give this one another name "
                "in --replica"
            )
