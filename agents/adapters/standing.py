"""Whether the bus lets this agent speak and listen as its replica.

A nats-server tells of a forbidden subject in a line of its own, after the fact, and drops the
message: an agent with another replica's credentials would beat into the void for ever. Such a
line about one of our own subjects is therefore the end; about any other it is only logged.
"""

import asyncio

from infra.bus import BusUnreachable
from schemas import subjects
from schemas.ids import RegionId, ReplicaId


class Standing:
    """Give `complained` to `infra.bus.connect`, and keep `hold` running."""

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
        """Hear what the server complains of."""
        if any(subject in str(problem) for subject in self._own):
            self._refused.set()

    def check(self) -> None:
        """Raise BusUnreachable if the server refused us any subject of our own so far."""
        if self._refused.is_set():
            raise BusUnreachable(
                f"the bus does not let this user speak for {self._who}: are these its credentials?"
            )

    async def hold(self) -> None:
        """Run until the server refuses us a subject of our own, then raise BusUnreachable."""
        await self._refused.wait()
        self.check()
