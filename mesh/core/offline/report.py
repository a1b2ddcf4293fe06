"""What a runner publishes of its region every second, and measures for it: room and load."""

from collections.abc import Iterator

from mesh.core.offline.effects import PublishOffline
from mesh.core.offline.forecast import Forecast, idle_share
from mesh.core.offline.jobs import Jobs
from mesh.core.offline.lines import Window
from mesh.core.offline.pace import Pace
from mesh.core.offline.peer_lines import PeerLines
from mesh.core.offline.room import OfflineRoom
from mesh.core.offline.settings import OfflineSettings
from mesh.core.view.replica_table import ReplicaTable
from schemas.ids import ModelId, RegionId, RouterId
from schemas.state import OfflineCapacity, OfflineState, rounded

MODELS_MAX = 64  # that are published; STATE_BYTES_MAX holds them all


class OfflineReport:
    """Of one region's runner."""

    def __init__(
        self,
        *,
        region: RegionId,
        runner: RouterId,
        epoch: int,
        settings: OfflineSettings,
        replicas: ReplicaTable,
        room: OfflineRoom,
        window: Window,
        jobs: Jobs,
        pace: Pace,
        forecast: Forecast,
        peer_lines: PeerLines,
    ) -> None:
        self._region, self._runner, self._epoch = region, runner, epoch
        self._settings = settings
        self._replicas = replicas
        self._room = room
        self._window = window
        self._jobs = jobs
        self._pace = pace
        self._forecast = forecast
        self._peer_lines = peer_lines
        self._labels = tuple(sorted(settings.ground.carried_by(region)))
        self._seq = 0

    def publish(self, now: float, *, accepting: bool) -> PublishOffline:
        """Observe the load of the second that has passed, and publish what there is room for."""
        peer_lines = self._peer_lines
        self._pace.saturated = frozenset(self._saturated(now))
        backlog = self._pace.saturated.union(peer_lines.lacked_room)
        self._forecast.observe(self._idle(), backlog, now)
        for model, tokens in peer_lines.placed_tokens.items():
            self._forecast.computed(model, tokens)
        peer_lines.placed_tokens.clear()
        peer_lines.lacked_room.clear()
        self._seq += 1
        left = sum(record.left for record in self._jobs)
        state = OfflineState(
            region=self._region,
            router=self._runner,
            epoch=self._epoch,
            seq=self._seq,
            accepting=accepting and self._settings.takes_peers,
            models={model: self._capacity(model, now) for model in self._models()},
            price=self._settings.price,
            residency=self._labels,
            jobs=len(self._jobs),
            lines_waiting=max(0, left - self._window.attempted),
            lines_running=self._window.attempted,
        )
        return PublishOffline(state)

    def _models(self) -> list[ModelId]:
        return sorted(self._replicas.models())[:MODELS_MAX]

    def _capacity(self, model: ModelId, now: float) -> OfflineCapacity:
        return OfflineCapacity(
            room_tokens=self._room.total(model, now),
            tokens_per_s=rounded(self._pace.speeds(model).home.per_s()),
            waiting_tokens=self._waiting_tokens(model),
            slack_tokens=tuple(self._forecast.slack_tokens(model, now)),
        )

    def _waiting_tokens(self, model: ModelId) -> int:
        """Of lines that no replica has, in the window and in the store."""
        left = self._pace.left_tokens.get(model, 0.0)
        in_store_too = round(left) - self._window.attempted_tokens.get(model, 0)
        return max(self._window.waiting_tokens.get(model, 0), in_store_too)

    def _saturated(self, now: float) -> Iterator[ModelId]:
        """Models of which lines wait while no replica has room for one of mean size."""
        for model, lines in self._window.waiting_lines.items():
            mean_tokens = self._window.waiting_tokens[model] / lines
            if self._room.largest(model, None, now) < mean_tokens:
                yield model

    def _idle(self) -> dict[ModelId, float]:
        """Idle replicas by model; one that is lost is none."""
        idle: dict[ModelId, float] = {}
        for replica in self._replicas:
            beat = replica.heartbeat
            for model in beat.models:
                idle[model] = idle.get(model, 0.0) + idle_share(beat)
        return idle
