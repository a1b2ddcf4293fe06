"""Runs the pure engine on the event loop's clock and wakes the handlers that wait for its tokens.

One timer is armed for the engine's next step and none while it is idle, so an idle engine
costs nothing. Its clock can run faster than the wall (`--time-scale`), slower (a fault) or not at
all (another).
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.sim.engine import EngineSim
from agents.sim.events import (
    Decoded,
    EngineStats,
    Finished,
    Preempted,
    PrefillFinished,
    SimEvent,
    SimRequest,
)
from agents.simserver.metrics import Meters

# Steps nearer than this are taken together: their tokens leave in one write.
TICK_S = 0.002


class RateClock:
    """Maps the wall clock to the engine's, at a rate that may change."""

    def __init__(self, wall: Callable[[], float], rate: float) -> None:
        self.wall = wall
        self.rate = rate
        self._wall_anchor = wall()
        self._anchor = 0.0

    def now(self) -> float:
        return self._anchor + (self.wall() - self._wall_anchor) * self.rate

    def set_rate(self, rate: float) -> None:
        """From now on, `rate` engine seconds pass in a wall second; 0 stops it."""
        self._anchor, self._wall_anchor = self.now(), self.wall()
        self.rate = rate

    def wall_at(self, at: float) -> float:
        """When the engine's clock will show `at`. Only while the rate is above 0."""
        return self._wall_anchor + (at - self._anchor) / self.rate


@dataclass(slots=True, eq=False)
class TokenStream:
    """One request's answer as it comes out. One reader waits on it."""

    id: int
    opened_at: float
    whole: bool  # the reader waits for the end alone
    generates: bool = True
    tokens: int = 0
    cached_tokens: int = 0
    finished: bool = False
    _waiter: asyncio.Future[None] | None = None

    async def wait(self, beyond: int) -> None:
        """Return when more than `beyond` tokens are out, or the answer is complete."""
        while not self.finished and (self.whole or self.tokens <= beyond):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        if not self.whole:
            self._wake()

    def finish(self) -> None:
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Driver:
    """Submits, steps, and hands out tokens. Lives on one event loop."""

    def __init__(
        self,
        engine: EngineSim,
        meters: Meters,
        time_scale: float,
        on_tokens: Callable[[int], None],
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_tokens` gets the size of every batch of tokens that came out. `after_step` is called
        whenever the engine may have changed."""
        self._after_step = after_step
        self._engine = engine
        self._meters = meters
        self._time_scale = time_scale
        self._on_tokens = on_tokens
        self._loop = asyncio.get_running_loop()
        # Not the loop's own clock: uvloop's counts whole milliseconds.
        self._clock = RateClock(time.monotonic, time_scale)
        self._streams: dict[int, TokenStream] = {}
        self._next_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._last_events_at = 0.0  # wall time of the last tick with events
        self._handlers: dict[type[SimEvent], Callable[..., None]] = {
            PrefillFinished: self._on_first_token,
            Decoded: self._on_decoded,
            Finished: self._on_finished,
            Preempted: lambda event: None,
        }

    def open(
        self, prompt_tokens: int, output_tokens: int, keys: list[int], *, whole: bool
    ) -> TokenStream:
        """Submit a request; `close` its stream in any case. Raises NeverFits or QueueFull."""
        request = SimRequest(self._next_id + 1, prompt_tokens, output_tokens, keys)
        return self._submitted(request, whole=whole)

    def open_prompt(self, prompt_tokens: int) -> TokenStream:
        """The same for a prompt without an answer."""
        request = SimRequest(self._next_id + 1, prompt_tokens, 1, generates=False)
        return self._submitted(request, whole=True)

    def _submitted(self, request: SimRequest, *, whole: bool) -> TokenStream:
        self._next_id = request.id
        self._engine.submit(request, self._clock.now())
        now = self._clock.wall()
        stream = TokenStream(request.id, now, whole=whole, generates=request.generates)
        self._streams[stream.id] = stream
        self._arm()
        return stream

    def close(self, stream: TokenStream) -> None:
        """The reader is done with it: what is not finished is aborted, its memory freed."""
        if self._streams.pop(stream.id, None) is not None:
            self._engine.abort(stream.id, self._clock.now())
            self._arm()

    def pin(self, keys: Sequence[int]) -> list[int]:
        """Keep these cached blocks until `unpin`."""
        return self._engine.pin(keys, self._clock.now())

    def unpin(self, pinned: Sequence[int]) -> None:
        self._engine.unpin(pinned, self._clock.now())
        self._after_step()
        self._arm()

    def receive(self, keys: Sequence[int]) -> None:
        """These blocks are cached from now on."""
        self._engine.receive(keys, self._clock.now())
        self._after_step()
        self._arm()

    def stats(self) -> EngineStats:
        return self._engine.stats(self._clock.now())

    def set_slowdown(self, factor: float) -> None:
        """Run that many times slower than `time_scale`; infinity stops the clock."""
        self._clock.set_rate(self._time_scale / factor)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self._engine.wake_at
        if wake_at is None or self._clock.rate == 0:
            return
        delay_s = (
            max(self._clock.wall_at(wake_at), self._last_events_at + TICK_S) - self._clock.wall()
        )
        # Timers have whole milliseconds: rounded down, one would fire just before its step.
        self._timer = self._loop.call_later(math.ceil(max(delay_s, 0) * 1000) / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        events = self._engine.step(self._clock.now()).events
        if events:
            self._last_events_at = self._clock.wall()
        for event in events:
            self._handlers[type(event)](event)
        self._after_step()
        self._arm()

    def _on_first_token(self, event: PrefillFinished) -> None:
        stream = self._streams.get(event.request_id)
        if stream is not None and stream.generates:
            self._meters.ttft_s.observe(self._clock.wall() - stream.opened_at)
            stream.cached_tokens = event.cached_tokens
            stream.add(1)
            self._on_tokens(1)

    def _on_decoded(self, event: Decoded) -> None:
        streams = self._streams
        for request_id in event.request_ids:
            if (stream := streams.get(request_id)) is not None:
                stream.add(event.tokens)
        tokens = event.tokens * len(event.request_ids)
        self._meters.itl_s.observe(event.gap_s / (self._clock.rate or 1.0), tokens)
        self._on_tokens(tokens)

    def _on_finished(self, event: Finished) -> None:
        stream = self._streams.pop(event.request_id, None)
        if stream is not None:
            self._meters.e2e_s.observe(self._clock.wall() - stream.opened_at)
            stream.finish()
