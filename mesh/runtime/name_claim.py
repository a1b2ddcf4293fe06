"""One name, one process: a router or batch runner that starts looks for another of its name.

Two of one name would share an inbox and look restarted to every agent. So the second publishes a
nonce to that inbox before it listens to anything else, and the first echoes it; if only later, as
it was suspended, the second leaves then. Any agent or peer may publish there, but only the region's
routers and runners receive the nonce.
"""

import asyncio
import secrets
import struct
from collections.abc import Collection
from typing import Self

from mesh.adapters.bus import RouterBus
from schemas import subjects
from schemas.ids import RegionId, RouterId
from schemas.replies import HERE, WHO

EPOCH = struct.Struct(">Q")
NONCE_BYTES = 16
SAME_NAME_S = 0.15  # for a process of the same name on the same server to answer


class NameTaken(RuntimeError):
    """Another process of this name runs in the region. The message says what to do."""

    @classmethod
    def router(cls, region: RegionId, router: RouterId) -> Self:
        """A router."""
        return cls(
            f"router {router} of region {region} runs already; end that one, or give this one "
            f"another name in routers of [regions.{region}] and in --router"
        )

    @classmethod
    def runner(cls, region: RegionId, name: RouterId) -> Self:
        """A batch runner."""
        return cls(
            f"batch runner {name} of region {region} runs already; end that one, or give this one "
            f"another name in batch_runners of [regions.{region}] and in --name"
        )


class NameClaim:
    """One process's. `receive` what comes to the inboxes of its name, from before `settle` on."""

    tokens: Collection[str] = (WHO, HERE)

    def __init__(
        self, region: RegionId, name: RouterId, epoch: int, bus: RouterBus, taken: NameTaken
    ) -> None:
        """`taken`: what to raise where another process has the name."""
        self._taken = taken
        self._region, self._name, self._bus = region, name, bus
        self._answered = asyncio.Event()
        self._nonce = EPOCH.pack(epoch) + secrets.token_bytes(NONCE_BYTES)
        self._has_name = False

    async def settle(self) -> None:
        """Raises NameTaken if another process answers to the name."""
        self._ask()
        try:
            async with asyncio.timeout(SAME_NAME_S):
                await self._answered.wait()
        except TimeoutError:
            return
        raise self._taken

    async def keep(self) -> None:
        """Raises NameTaken if the other process, which was suspended, answers only now. Never
        returns."""
        self._has_name = True
        await self._answered.wait()
        raise self._taken

    def receive(self, token: str, data: bytes) -> bool:
        """A message to an inbox of this name; False if it is about something else."""
        if token == HERE and data == self._nonce:
            self._answered.set()
        elif token == WHO and data != self._nonce and len(data) == len(self._nonce):
            if self._has_name or self._nonce < data:
                self._bus.publish(self._inbox(HERE), data)
            else:  # the earlier one may not have listened yet when it was asked
                self._ask()
        return token in (WHO, HERE)

    def _ask(self) -> None:
        self._bus.publish(self._inbox(WHO), self._nonce)

    def _inbox(self, token: str) -> str:
        return subjects.inbox(self._region, self._name, token)
