"""How many bytes of bodies may be on their way to a peer region, and of answers from it, so that
nothing waits for them.

One leaf link carries everything between two regions, in order. What waits in it delays the words
of routers and agents behind it: digests, keepalives, where a request was placed. So bodies go in
small parts, and no more of them than the link carries in a round trip and QUEUE_S. Behind each part
a ping leaves; its answer says that the part has passed the link, and how long that took. Of answers
the parts are credits: the answer to the ping behind each one waits in the same queue as what agents
sent by earlier credits.

The window follows these times: what was on its way when a part left, over the time until it had
passed, is what the link carries; by how much that time is beyond the shortest one is the queue.
Of the last few times the shortest counts, and each answer adds one part to the window at most, or
takes one away, as a single part may be late for another reason.
Every router of a region does so by itself; together they meet at a queue of about QUEUE_S. The
shortest time is forgotten now and then, and measured again with nothing on its way, because links
get longer too. Sources: TCP Vegas (Brakmo et al. 1994); LEDBAT (RFC 6817).

A region may have no router that answers: one that was adopted. There a part counts as passed after
BLIND_S; that is 20 Mbit/s. Where answers came before, silence may as well be a full link: no part
then counts as passed sooner than at the rate that was measured last.
"""

from collections import deque
from typing import NamedTuple

from mesh.core.model.settings import SLOWEST_BYTES_PER_S

PART_BYTES = 16 * 1024  # 13 ms at 10 Mbit/s
WINDOW_BYTES_MIN = PART_BYTES
WINDOW_BYTES_START = 8 * PART_BYTES
WINDOW_BYTES_MAX = 4 * 1024 * 1024  # 250 Mbit/s with a round trip of 80 ms and the queue
QUEUE_S = 0.03  # that bodies may add to the wait of everything else
EMPTY_S = QUEUE_S / 3  # a queue that may as well be a process that was busy
LATELY = 5  # parts, of which the fastest shows the queue: others were late for another reason
SHORTEST_S = 30.0  # for so long a shortest time holds
IDLE_S = 5.0  # after it nothing is known of what the link carries now
# Without an answer, to any part: nobody answers there, or the link is cut. Answers wait meanwhile.
LOST_S = 0.75
BLIND_S = 0.0065  # for a part, at least
# What an answer may send before its first credit, which nothing paces: many that begin at once are
# to fit the slowest link that regions may have.
FIRST_WINDOW_BYTES, FIRST_WINDOW_BYTES_MIN = 16 * 1024, 4 * 1024
FIRST_BYTES_MAX = 128 * 1024  # of these windows at once


class _Sent(NamedTuple):
    number: int
    size: int
    at: float
    unpassed_bytes: int  # with this part


class LinkPace:
    """Of what one router sends to one peer region, bodies, or has sent from it, answers. Parts are
    numbered from 1."""

    def __init__(self) -> None:
        self.window_bytes = WINDOW_BYTES_START
        self.unpassed_bytes = 0  # sent, and not known to have passed
        self.is_blind = False
        self._part_s = BLIND_S  # that a part takes while nobody answers
        self._sent: deque[_Sent] = deque()  # those, oldest first
        self._number = 0
        self._last_at = self._answered_at = float("-inf")
        self._lately: deque[float] = deque(maxlen=LATELY)  # times that parts took, in seconds
        self._shortest_s: float | None = None
        self._shortest_until = float("-inf")

    def may_send(self, now: float) -> bool:
        """Whether another part may go now."""
        if not self._sent:
            if now >= self._shortest_until:
                self._shortest_s, self._shortest_until = None, now + SHORTEST_S
                self._lately.clear()
            return True
        if now >= self._shortest_until and not self.is_blind:
            return False  # let it run empty, to measure the link alone
        return self.unpassed_bytes < self.window_bytes

    def sent(self, size: int, now: float) -> int:
        """Count a part of that many bytes that leaves now; returns its number."""
        if now - self._last_at > IDLE_S:
            self.window_bytes = min(self.window_bytes, WINDOW_BYTES_START)
        self._last_at = now
        self._number += 1
        self.unpassed_bytes += size
        self._sent.append(_Sent(self._number, size, now, self.unpassed_bytes))
        return self._number

    def passed(self, number: int, now: float) -> None:
        """That part has passed the link, and so have all before it."""
        part = None
        while self._sent and self._sent[0].number <= number:
            part = self._sent.popleft()
            self.unpassed_bytes -= part.size
        self.is_blind, self._answered_at = False, now
        if part is None or part.number != number:
            return
        self._lately.append(max(now - part.at, 1e-4))
        took_s = min(self._lately)
        self._part_s = max(BLIND_S, took_s * PART_BYTES / max(part.unpassed_bytes, PART_BYTES))
        if self._shortest_s is None or took_s < self._shortest_s:
            self._shortest_s = took_s
        wanted = int(part.unpassed_bytes * (self._shortest_s + QUEUE_S) / took_s)
        if wanted < part.unpassed_bytes:
            window = min(self.window_bytes, max(self.window_bytes - part.size, wanted))
        else:
            if took_s < self._shortest_s + EMPTY_S and part.unpassed_bytes > self.window_bytes // 2:
                more = self.window_bytes + part.size // 2  # half more in a round trip
                wanted = max(wanted, more)
            window = max(self.window_bytes, min(self.window_bytes + part.size, wanted))
        self.window_bytes = min(max(window, WINDOW_BYTES_MIN), WINDOW_BYTES_MAX)

    def cut(self) -> None:
        """The link was lost, and what was on its way or its answers with it."""
        self._sent.clear()
        self.unpassed_bytes = 0

    def unanswered(self) -> None:
        """Nobody is there to answer."""
        self.is_blind, self.window_bytes = True, WINDOW_BYTES_MIN

    @property
    def due_at(self) -> float | None:
        """When `expire` has something to do; None while nothing is on its way."""
        if not self._sent:
            return None
        if self.is_blind:
            return self._sent[0].at + self._part_s
        return max(self._sent[0].at, self._answered_at) + LOST_S

    def expire(self, now: float) -> None:
        """Take for passed what nobody reports."""
        while (due_at := self.due_at) is not None and due_at <= now:
            self.unanswered()
            self.unpassed_bytes -= self._sent.popleft().size


class FirstWindows:
    """How much each answer from one peer region may send before its first credit."""

    def __init__(self) -> None:
        self._left_bytes = float(FIRST_BYTES_MAX)
        self._at = float("-inf")

    def next(self, now: float) -> int:
        """Of the answer to a request that leaves now."""
        gained = (now - self._at) * SLOWEST_BYTES_PER_S
        self._left_bytes = min(float(FIRST_BYTES_MAX), self._left_bytes + gained)
        self._at = now
        is_full = self._left_bytes < FIRST_WINDOW_BYTES
        first = FIRST_WINDOW_BYTES_MIN if is_full else FIRST_WINDOW_BYTES
        self._left_bytes = max(0.0, self._left_bytes - first)
        return first
