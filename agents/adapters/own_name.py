"""An agent's own name on the bus: asked for before it is used, and answered for from then on.

A question that nobody listens to comes back from the server at once, so whoever starts, or starts
again after a crash, waits for nothing. It waits for CLAIM_S and then takes the name where somebody
listens and nobody answers: a namesake that is stopped, or cut off without its server knowing yet.
So it does where the server's configuration is of an older version, and lets agents say nothing of
names.
"""

import asyncio
import logging
import struct
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StatusCode

from agents.core.namesake import CLAIM_S, Namesake, Verdict
from schemas import subjects
from schemas.ids import RegionId, ReplicaId

log = logging.getLogger(__name__)

EPOCH = struct.Struct(">Q")
STATUS = "Status"


class NameTaken(Exception):
    """Another agent serves under this name."""


class OwnName:
    """`take` it before listening for work, run `hold` while working, tell `back` of reconnects."""

    def __init__(
        self, region: RegionId, replica: ReplicaId, epoch: int, clock: Callable[[], float]
    ) -> None:
        self._who = f"{region}/{replica}"
        self._question = subjects.name(region, replica)
        self._answer = subjects.named(region, replica)
        self._voice = EPOCH.pack(epoch)
        self._namesake = Namesake(epoch)
        self._clock = clock
        self._client: Client | None = None
        self._heard = asyncio.Event()  # an answer, or that nobody is there to give one
        self._again = asyncio.Event()
        self._taken = asyncio.Event()

    async def take(self, client: Client) -> None:
        """Return when the name is ours. Raises NameTaken."""
        self._client = client
        await client.subscribe(self._answer, cb=self._hear_answer)
        await self._ask()
        try:
            async with asyncio.timeout(CLAIM_S):
                await self._heard.wait()
        except TimeoutError:
            log.warning(
                "%s: somebody may listen for this name, but nobody answered in %g s; it is ours",
                self._who,
                CLAIM_S,
            )
        self._check()
        self._namesake.take()
        await client.subscribe(self._question, cb=self._hear_question)
        await self._ask()  # somebody may have started at the same moment

    async def hold(self) -> None:
        """Run until a namesake turns out to have the name, then raise NameTaken."""
        asking = asyncio.create_task(self._ask_again())
        try:
            await self._taken.wait()
        finally:
            asking.cancel()
        self._check()

    def back(self) -> None:
        """The bus was away: somebody may have taken the name meanwhile."""
        self._again.set()

    async def _ask_again(self) -> None:
        while True:
            await self._again.wait()
            self._again.clear()
            await self._ask()

    async def _ask(self) -> None:
        assert self._client is not None, "taken first"
        self._namesake.ask(self._clock())
        await self._client.publish(self._question, self._voice, reply=self._answer)

    async def _hear_question(self, msg: Msg) -> None:
        if len(msg.data) != EPOCH.size:
            return
        await self._do(self._namesake.hear_question(EPOCH.unpack(msg.data)[0], self._clock()))

    async def _hear_answer(self, msg: Msg) -> None:
        if (msg.headers or {}).get(STATUS) == StatusCode.SERVICE_UNAVAILABLE:
            self._heard.set()
        elif len(msg.data) == EPOCH.size:
            await self._do(self._namesake.hear_answer(EPOCH.unpack(msg.data)[0]))

    async def _do(self, verdict: Verdict) -> None:
        if verdict is Verdict.LEAVE:
            self._taken.set()
            self._heard.set()
        elif verdict is Verdict.ANSWER and self._client is not None:
            await self._client.publish(self._answer, self._voice)

    def _check(self) -> None:
        if self._taken.is_set():
            raise NameTaken(
                f"an agent {self._who} runs already; end that one, or give this one another name "
                "in --replica"
            )
