"""One client's request at the edge: its body on the way in, its answer on the way out.

The HTTP handler waits on the ticket; the runtime changes it and wakes the handler. A ticket is
settled once: with bytes to stream, with an engine's own error, or with a failure of ours.
"""

import asyncio
from dataclasses import dataclass, field, replace

from mesh.adapters.answer import Answer, EngineError
from mesh.adapters.outlet import Outlet
from mesh.adapters.spans import RequestSpans
from mesh.adapters.wishes import NO_WISHES, Wishes
from mesh.core.prefixes.prompt import NO_PROMPT, PromptText, TextSize
from schemas.decision import Decision
from schemas.http import Fault
from schemas.ids import ModelId, RequestId
from schemas.residency import Labels


@dataclass(slots=True)
class Ask:
    """What a client asks for, read and checked. It changes only until it is admitted,
    and by `forget`."""

    request_id: RequestId
    model: ModelId
    path: str
    body: bytes
    text: PromptText
    timeout_s: float | None
    wishes: Wishes = NO_WISHES
    warm: bool = False  # nobody asks
    residency: Labels = ()  # where one of these is carried; empty: anywhere
    tenant: str | None = None  # whose it is; empty: nobody's; None: tenants are not told apart

    def forget(self) -> None:
        """Nobody needs its body and prompt any more."""
        self.body, self.text = b"", NO_PROMPT


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer, or no more of it."""

    fault: Fault
    message: str
    retry_after_s: float | None = None


@dataclass(slots=True)
class Ticket:
    """See the module. Times are seconds on the event loop's clock."""

    key: int
    ask: Ask
    deadline: float
    arrived_at: float
    spans: RequestSpans
    size: TextSize  # of the prompt, also when the prompt itself is no longer kept
    answer: Answer | None = None  # of the attempt under way
    decision: Decision | None = None  # the last one
    failure: Failure | None = None
    engine_error: EngineError | None = None  # of the last attempt that had one
    pass_engine_error: bool = False
    first_byte_at: float | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    outlet: Outlet | None = None  # while the handler waits for more of the answer

    @property
    def is_startable(self) -> bool:
        """Whether the client may be told something: an answer, an error, anything."""
        if self.failure is not None or self.pass_engine_error:
            return True
        return self.answer is not None and self.answer.is_startable

    @property
    def receipt(self) -> Decision | None:
        """The last decision; a peer says only afterwards which of its replicas answers."""
        if self.decision is None or self.decision.peer is None or self.answer is None:
            return self.decision
        return replace(self.decision, replica=self.answer.replica)

    def wake(self) -> None:
        """Something changed; the handler looks again, unless its outlet did all there is to do."""
        if self.outlet is None or self.failure is not None or not self.outlet.pour():
            self.outlet = None  # what comes from here on goes out behind what the handler has
            self._wake.set()

    async def until_startable(self) -> None:
        """Wait until the client may be told something."""
        while not self.is_startable:
            self._wake.clear()
            await self._wake.wait()

    async def next_bytes(self, outlet: Outlet | None = None) -> bytes:
        """The next bytes of the answer; empty at its end or when `failure` is set.

        While this waits, what comes is tried on `outlet` first.
        """
        assert self.answer is not None, "asked for bytes before an answer was there"
        while True:
            if chunk := self.answer.take():
                return chunk
            if self.answer.is_complete or self.failure is not None:
                return b""
            self._wake.clear()
            self.outlet = outlet
            try:
                await self._wake.wait()
            finally:
                self.outlet = None
