"""Who is next to use what only one can use at a time: mostly the smallest that waits.

First come, first served would let whoever sends the largest keep all others waiting. The smallest
alone would let those who send small ones keep out the large for good; so one turn in OLDEST_EVERY
goes to the one that has waited longest.
"""

import asyncio

OLDEST_EVERY = 4


class Turns:
    """A lock whose order depends on the size of the work. No task of it, no clock."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], int] = {}  # sizes, the oldest first
        self._is_taken = False
        self._given = 0

    async def take(self, size: int) -> None:
        """Wait for one's turn, and `release` it. `size`: of the work, in any unit."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = size
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():  # it was given in the same moment
                self.release()
            raise

    def release(self) -> None:
        """The work is done: the next may begin."""
        waiting = {turn: size for turn, size in self._waiting.items() if not turn.done()}
        if not waiting:
            self._is_taken = False
            return
        self._given += 1
        is_oldest = self._given % OLDEST_EVERY == 0
        turn = next(iter(waiting)) if is_oldest else min(waiting, key=waiting.__getitem__)
        del self._waiting[turn]
        turn.set_result(None)
