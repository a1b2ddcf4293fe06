"""An agent's name on the bus: it asks whether another agent has it, and answers such questions.

Which of two agents leaves is decided in `agents.core.name_claim`.
"""

import asyncio
import logging
import struct
from collections.abc import Callable

from nats.aio.msg import Msg
from nats.js.api import StatusCode

from agents.core.name_claim import CLAIM_S, NameClaim, NameDecision
from infra.bus import BusClient
from schemas import subjects
from schemas.ids import RegionId, ReplicaId

log = logging.getLogger(__name__)

EPOCH = struct.Struct(">Q")
STATUS = "Status"


class ReplicaNameTaken(Exception):
    """Another agent serves under this name."""


class NameGuard:
    """Takes the agent's name on the bus and defends it.

    `take` it before listening for work, run `watch` while working, call `reconnected` after each
    reconnect. The server reports at once that a question has no subscriber, so a restart waits for
    nothing. If there is one and no answer comes within CLAIM_S (an agent that is stopped or cut
    off), the name is taken; also if the server forbids the question (an older configuration, or
    credentials of another replica, which `BusAuthorization` finds out).
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
        self._client: BusClient | None = None
        self._answered = asyncio.Event()  # or there is no subscriber, or it is forbidden to ask
        self._is_forbidden = False
        self._reconnected = asyncio.Event()
        self._must_leave = asyncio.Event()

    async def take(self, client: BusClient) -> None:
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
        if self._is_forbidden:
            log.warning(
                "%s: the bus forbids this user to ask whether another agent has this name",
                self._who,
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

    def complained(self, problem: Exception) -> None:
        """The server reported an error: of the question, perhaps."""
        if any(f'"{subject}"' in str(problem) for subject in (self._question, self._answer)):
            self._is_forbidden = True
            self._answered.set()

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
