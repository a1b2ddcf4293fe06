"""What a region's replicas will leave for offline work, by its own load of the last day and week.

Measured is how many replicas of a model are idle, a half idle one as 0.5: each hour's mean is kept
for eight days. An hour to come is expected to be like the same hour yesterday and a week ago, the
mean of the two where both are known; an hour between two clock hours is the mix of them. Until a
whole day is known nothing is predicted.

What an idle replica computes of offline work, in tokens a second, is learned while there is more of
it than fits: what was computed in a minute divided by what was idle. So the forecast is about load
only, and follows a region that gets more replicas within a day.

Sources: HyGen (Sun et al., 2025, figure 1) shows that online load has a day's and a week's period.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

import orjson
from pydantic import Field

from schemas.ids import ModelId, ValidModelId
from schemas.json_messages import decoder
from schemas.numbers import Count
from schemas.state import Heartbeat, ReplicaState
from schemas.wire import WireError

HOUR_S = 3600
DAY, WEEK = 24, 168  # hours
KEPT_HOURS = WEEK + DAY
HOURS_AHEAD = 24
KNOWN_HOURS_MIN = 22  # of the last day, before anything is predicted
MODELS_MAX = 256
RATE_WEIGHT = 0.2  # of a new minute in the learned speed
IDLE_MIN = 0.1  # of a replica: less teaches nothing about speed
SAMPLE_S = 60.0
IDLE_MAX = 1e6  # replicas
TOKENS_PER_S_MAX = 1e9

_Idle = Annotated[float, Field(ge=0.0, le=IDLE_MAX, allow_inf_nan=False)]
_Rate = Annotated[float, Field(ge=0.0, le=TOKENS_PER_S_MAX, allow_inf_nan=False)]


class ForecastInvalid(ValueError):
    """These bytes are no forecast that this version can read; the message names the reason."""


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """One model's idle replicas, on average over hours since 1970."""

    hours: Annotated[tuple[tuple[Count, _Idle], ...], Field(max_length=KEPT_HOURS)]
    tokens_per_s: _Rate | None = None
    """Offline, of one idle replica; None: none was measured."""


@dataclass(frozen=True, slots=True)
class ForecastState:
    """All that the forecast knows."""

    models: Annotated[dict[ValidModelId, ModelHistory], Field(max_length=MODELS_MAX)] = field(
        default_factory=dict
    )
    v: int = 1


_decode = decoder(ForecastState)


def write_forecast(state: ForecastState) -> bytes:
    return orjson.dumps(state)


def read_forecast(data: bytes) -> ForecastState:
    """What `write_forecast` wrote. Raises ForecastInvalid for anything else."""
    try:
        state = _decode(data)
    except WireError as error:
        raise ForecastInvalid(f"no forecast: {error}") from error
    if state.v != 1:
        raise ForecastInvalid(f"a forecast of version {state.v}, this version reads 1")
    return state


def idle_share(beat: Heartbeat) -> float:
    """Which part of a replica online work leaves: by its batch or its memory, whichever is less.

    Of a replica that reports neither nothing is expected.
    """
    used = [one for one in (beat.batch_occupancy, beat.kv_used_ratio) if one is not None]
    is_free = beat.state is ReplicaState.READY and not (beat.full or beat.pending)
    return 1.0 - max(used) if used and is_free else 0.0


class _ModelForecast:
    """One model's."""

    def __init__(self) -> None:
        self.hours: dict[int, float] = {}
        self.tokens_per_s: float | None = None
        self.hour = -1  # the one under way
        self.idle_s = self.observed_s = 0.0  # of it
        self.sample_s = self.sample_idle_s = 0.0
        self.sample_tokens = 0

    def observe(self, idle: float, passed_s: float, unix_s: float, *, has_backlog: bool) -> None:
        """`idle` replicas for the last `passed_s` seconds."""
        hour = int(unix_s // HOUR_S)
        if hour != self.hour:
            if self.observed_s > 0:
                self.hours[self.hour] = self.idle_s / self.observed_s
                for old in [one for one in self.hours if one <= hour - KEPT_HOURS]:
                    del self.hours[old]
            self.hour, self.idle_s, self.observed_s = hour, 0.0, 0.0
        self.idle_s += idle * passed_s
        self.observed_s += passed_s
        if not has_backlog:  # more could have been computed than was
            self.sample_s = self.sample_idle_s = 0.0
            self.sample_tokens = 0
            return
        self.sample_s += passed_s
        self.sample_idle_s += idle * passed_s
        if self.sample_s >= SAMPLE_S:
            self._learn()

    def _learn(self) -> None:
        if self.sample_idle_s / self.sample_s >= IDLE_MIN:
            rate = min(TOKENS_PER_S_MAX, self.sample_tokens / self.sample_idle_s)
            known = self.tokens_per_s
            self.tokens_per_s = rate if known is None else known + RATE_WEIGHT * (rate - known)
        self.sample_s = self.sample_idle_s = 0.0
        self.sample_tokens = 0

    def knows_a_day(self, hour: int) -> bool:
        known = sum(hour - back in self.hours for back in range(1, DAY + 1))
        return known >= KNOWN_HOURS_MIN

    def idle_in(self, hour: int, now_hour: int) -> float | None:
        """Idle replicas expected in that hour; None if nothing is known of it."""
        known = []
        for period in (DAY, WEEK):
            past = hour - period
            while past >= now_hour:  # that hour is still to come as well
                past -= period
            if past in self.hours:
                known.append(self.hours[past])
        return sum(known) / len(known) if known else None


class Forecast:
    """Of all models of the region. `unix_at_zero`: of the runner's clock."""

    def __init__(self, unix_at_zero: float) -> None:
        self._unix_at_zero = unix_at_zero
        self._models: dict[ModelId, _ModelForecast] = {}
        self._observed_at = inf

    def observe(
        self, idle: Mapping[ModelId, float], backlog: Iterable[ModelId], now: float
    ) -> None:
        """Idle replicas by model. `backlog`: models with more offline work than fits. Call it about
        once a second; a longer gap counts as its last second only."""
        passed_s = min(1.0, max(0.0, now - self._observed_at))
        self._observed_at = now
        unix_s, waiting = now + self._unix_at_zero, set(backlog)
        for model, replicas in idle.items():
            one = self._of(model)
            if one is not None:
                one.observe(replicas, passed_s, unix_s, has_backlog=model in waiting)

    def computed(self, model: ModelId, tokens: int) -> None:
        """Offline tokens were computed at the region's replicas."""
        if (one := self._models.get(model)) is not None:
            one.sample_tokens += tokens

    def slack_tokens(self, model: ModelId, now: float, hours: int = HOURS_AHEAD) -> list[int]:
        """Offline tokens for which there will be room in each of the next hours; empty while too
        little is known."""
        one, unix_s = self._models.get(model), now + self._unix_at_zero
        hour, into = int(unix_s // HOUR_S), unix_s % HOUR_S / HOUR_S
        if one is None or one.tokens_per_s is None or not one.knows_a_day(hour):
            return []
        idle = [one.idle_in(hour + ahead, hour) for ahead in range(hours + 1)]
        known = [value for value in idle if value is not None]
        mean = sum(known) / len(known) if known else 0.0
        filled = [mean if value is None else value for value in idle]
        per_replica = one.tokens_per_s * HOUR_S
        mixed = ((1 - into) * filled[ahead] + into * filled[ahead + 1] for ahead in range(hours))
        return [round(value * per_replica) for value in mixed]

    def state(self) -> ForecastState:
        """All that is known, for the next start; the hour under way is lost."""
        return ForecastState(
            {
                model: ModelHistory(tuple(sorted(one.hours.items())), one.tokens_per_s)
                for model, one in self._models.items()
            }
        )

    def restore(self, state: ForecastState, now: float) -> None:
        """Take in what an earlier runner knew. Hours to come, and hours too old, are left out."""
        hour = int((now + self._unix_at_zero) // HOUR_S)
        for model, history in state.models.items():
            one = self._of(model)
            if one is None:
                return
            one.tokens_per_s = history.tokens_per_s
            kept = {past: idle for past, idle in history.hours if hour - KEPT_HOURS < past < hour}
            one.hours = {**kept, **one.hours}

    def _of(self, model: ModelId) -> _ModelForecast | None:
        one = self._models.get(model)
        if one is None and len(self._models) < MODELS_MAX:
            one = self._models[model] = _ModelForecast()
        return one
