"""Is the engine there? Three failed looks in a row say no, one good look says yes.

Between two looks a network hiccup is likelier than a death; three at the reading interval still
notice a dead engine in a fifth of a second. A look that *times out* while answers still bring
bytes is a busy engine, not a dead one, and does not count: real engines serve their metrics
from the loop that streams tokens.

An engine may refuse new connections and finish its running streams (a graceful stop), so the
answers of a dead engine are given up only after it was silent on every one of them for a while.
"""

from agents.core.events import EngineFailed
from schemas.state import ReplicaState

FAILURES_MAX = 3
SILENCE_S = 3.0


class EngineHealth:
    """Fed with every look at the engine."""

    __slots__ = ("_down_since", "_failures", "_heard_at", "_was_up")

    def __init__(self) -> None:
        self._failures = 0
        self._was_up = False
        self._down_since: float | None = None
        self._heard_at = float("-inf")

    @property
    def state(self) -> ReplicaState:
        if self._down_since is not None:
            return ReplicaState.DOWN
        return ReplicaState.READY if self._was_up else ReplicaState.STARTING

    def succeeded(self) -> None:
        self._failures = 0
        self._was_up = True
        self._down_since = None

    def failed(self, event: EngineFailed, now: float) -> None:
        self._heard_at = max(self._heard_at, event.heard_at)
        if event.timed_out and event.heard_at > event.began_at:
            return
        self._failures += 1
        if self._failures >= FAILURES_MAX and self._was_up and self._down_since is None:
            self._down_since = now

    def wait_anew(self, now: float) -> None:
        """No byte could be taken in until now: its answers' silence is counted from here on."""
        self._heard_at = now

    def lost(self, now: float) -> bool:
        """Whether its running answers can be given up."""
        if self._down_since is None:
            return False
        return now - max(self._down_since, self._heard_at) >= SILENCE_S
