"""What a runner publishes of its region every second, and measures for it: room and load.

Reads: draining, epoch, forecast, jobs, lacked_room, pace, peer_tokens, published, region, replicas,
runner, settings, window.
Writes: forecast, lacked_room, pace, peer_tokens, published.
"""

from collections.abc import Iterator

from mesh.core.offline.effects import PublishOffline
from mesh.core.offline.forecast import idle_share
from mesh.core.offline.room import largest_room, with_room
from mesh.core.offline.state import RunnerState
from schemas.ids import ModelId
from schemas.state import OfflineCapacity, OfflineState, rounded

MODELS_MAX = 64  # that are published; STATE_BYTES_MAX holds them all


def publish(state: RunnerState, now: float) -> PublishOffline:
    """Observe the load of the second that has passed, and publish what there is room for."""
    state.pace.saturated = frozenset(_saturated(state, now))
    backlog = state.pace.saturated.union(state.lacked_room)
    state.forecast.observe(_idle(state), backlog, now)
    for model, tokens in state.peer_tokens.items():
        state.forecast.computed(model, tokens)
    state.peer_tokens.clear()
    state.lacked_room.clear()
    state.published += 1
    left = sum(record.left for record in state.jobs)
    return PublishOffline(
        OfflineState(
            region=state.region,
            router=state.runner,
            epoch=state.epoch,
            seq=state.published,
            accepting=not state.draining and state.settings.takes_peers,
            models={model: _capacity(state, model, now) for model in _models(state)},
            price=state.settings.price,
            residency=tuple(sorted(state.settings.ground.carried_by(state.region))),
            jobs=len(state.jobs),
            lines_waiting=max(0, left - state.window.attempted),
            lines_running=state.window.attempted,
        )
    )


def _models(state: RunnerState) -> list[ModelId]:
    return sorted(state.replicas.models())[:MODELS_MAX]


def _capacity(state: RunnerState, model: ModelId, now: float) -> OfflineCapacity:
    return OfflineCapacity(
        room_tokens=sum(room for _, room in with_room(state, model, None, now)),
        tokens_per_s=rounded(state.pace.speeds(model).home.per_s()),
        waiting_tokens=_waiting_tokens(state, model),
        slack_tokens=tuple(state.forecast.slack_tokens(model, now)),
    )


def _waiting_tokens(state: RunnerState, model: ModelId) -> int:
    """Of lines that no replica has, in the window and in the store."""
    left = state.pace.left_tokens.get(model, 0.0)
    in_store_too = round(left) - state.window.attempted_tokens.get(model, 0)
    return max(state.window.waiting_tokens.get(model, 0), in_store_too)


def _saturated(state: RunnerState, now: float) -> Iterator[ModelId]:
    """Models of which lines wait while no replica has room for one of mean size."""
    for model, lines in state.window.waiting_lines.items():
        mean_tokens = state.window.waiting_tokens[model] / lines
        if largest_room(state, model, None, now) < mean_tokens:
            yield model


def _idle(state: RunnerState) -> dict[ModelId, float]:
    """Idle replicas by model; one that is lost is none."""
    idle: dict[ModelId, float] = {}
    for replica in state.replicas:
        beat = replica.heartbeat
        for model in beat.models:
            idle[model] = idle.get(model, 0.0) + idle_share(beat)
    return idle
