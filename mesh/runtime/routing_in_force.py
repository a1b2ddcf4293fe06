"""By which choices a router places requests: its configuration, and operators' orders over it.

Orders come as keys of mesh.toml's `[routing]` and are checked like that. The router follows all
keys of a record or none: one that it can't follow leaves it on what it has.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infra.process import LimitedLog
from mesh.adapters.access_log import quoted_once
from mesh.core.model import events as ev
from mesh.core.model.settings import RouterSettings, with_changes
from mesh.runtime.mesh_file import policy_problems
from schemas import explain, http
from schemas.control import RegionControl
from schemas.settings import ordered_table

log = logging.getLogger(__name__)

NOT_READ = -1


def ordered_settings(configured: RouterSettings, keys: Mapping[str, Any]) -> RouterSettings:
    """The configured settings with an operator's choices over them.

    An ordered policy holds for all classes of requests that the order does not name. Raises
    ValueError that names key and remedy.
    """
    table = ordered_table(keys)
    changes = table.as_settings()
    if table.policy is None:
        classes = dict(configured.policy_by_priority) | table.policy_by_priority
        changes["policy_by_priority"] = tuple(classes.items())
    settings = with_changes(configured, replace(configured, **changes))
    for key, problem in policy_problems(settings):
        raise ValueError(f"{key}: {problem}")
    return settings


def as_keys(settings: RouterSettings) -> dict[str, Any]:
    """What can be ordered, as mesh.toml writes it."""
    goal_s = settings.own_ttft_goal_s
    return {
        "policy": settings.policy,
        "policy_by_priority": {
            str(priority): policy for priority, policy in settings.policy_by_priority
        },
        "pushing": str(settings.pushing),
        "hops_max": settings.hops_max,
        "queue_delay_s_max": settings.queue_delay_s_max,
        "own_ttft_goal_ms": None if goal_s is None else round(goal_s * 1000),
    }


class RouterRouting:
    """One router's. `feed` takes the event that changes its core."""

    def __init__(self, configured: RouterSettings, feed: Callable[[ev.Event], None]) -> None:
        self.settings = configured  # in force
        self._configured = configured
        self._feed = feed
        self._log = LimitedLog(log)
        self._seq = NOT_READ
        self._wanted: Mapping[str, Any] = {}  # by the last record
        self._ordered: Mapping[str, Any] = {}  # what is followed of it, or of one before
        self._refused: str | None = None
        self._to_move = ev.MoveStreams()

    def order(self, seq: int, orders: RegionControl) -> None:
        """Follow this record, number `seq`."""
        to_move = ev.MoveStreams(orders.moved, orders.all_moved)
        if to_move != self._to_move:
            self._to_move = to_move
            self._feed(to_move)
        is_new = orders.routing != self._wanted
        self._seq, self._wanted = seq, orders.routing
        if not is_new:
            return
        who = quoted_once(f"{orders.by}: {orders.reason}" if orders.reason else orders.by)
        try:
            settings = ordered_settings(self._configured, self._wanted)
        except ValueError as error:
            self._refuse(f"order {seq} of {who}", error)
            return
        self._ordered, self._refused = self._wanted, None
        self._follow(settings, f"order {seq} ({who})")

    def reconfigure(self, configured: RouterSettings) -> None:
        """The file was read again; what is followed of orders goes before it."""
        self._configured = with_changes(self._configured, configured)
        self._follow(ordered_settings(self._configured, self._ordered), "mesh.toml")

    def answer(self) -> explain.RoutingInForce:
        """For people who ask over the bus."""
        return explain.RoutingInForce(
            orders=self._seq,
            ordered=dict(self._ordered),
            in_force=as_keys(self.settings),
            refused=self._refused,
        )

    def shown(self) -> http.Routing:
        """For `/v1/regions`."""
        return http.Routing(
            policy=self.settings.policy, ordered=tuple(self._ordered), refused=self._refused
        )

    def _follow(self, settings: RouterSettings, why: str) -> None:
        if settings == self.settings:
            return
        before, now = as_keys(self.settings), as_keys(settings)
        changed = [f"{key} {before[key]} -> {now[key]}" for key in now if now[key] != before[key]]
        if settings.models != self.settings.models:
            changed.append("single models")
        log.warning("routing by %s: %s", why, quoted_once(", ".join(changed)))
        self.settings = settings
        self._feed(ev.SettingsChanged(settings))

    def _refuse(self, what: str, error: ValueError) -> None:
        self._refused = quoted_once(f"{what}: {error}")[: explain.REFUSED_CHARS_MAX]
        self._log.warning("routing", "refused", "%s; routing stays as it was", self._refused)
