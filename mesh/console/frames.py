"""One frame of the fleet as the page reads it: plain values, from the rows of `mesh top`."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from infra.tracing import package_version
from mesh.console.config import ConsoleConfig
from mesh.core.model.settings import RouterSettings
from mesh.explain.terminal import printable
from mesh.runtime.config import router_settings
from mesh.runtime.routing_in_force import ordered_settings
from mesh.top.fleet import Fleet
from mesh.top.rows import (
    REPLICAS,
    REQUESTS,
    STALE_S,
    TRAFFIC,
    Column,
    Frame,
    RegionRow,
    Row,
    key,
    level,
)
from schemas.control import RegionControl
from schemas.ids import RegionId

REPLICAS_MAX = 2000  # in the table; a larger fleet is for `mesh top` and Prometheus
ROUTING = {
    "policy": "policy",
    "pushing": "pushing",
    "regions that one may pass": "hops_max",
    "held at once, at most": "hold_max",
    "held for, at most (s)": "hold_s_max",
    "queue delay, at most (s)": "queue_delay_s_max",
    "own first tokens within (s)": "own_ttft_goal_s",
}


class Frames:
    """Makes the frames of one console."""

    def __init__(self, config: ConsoleConfig) -> None:
        self._region, self._own_settings = config.region, config.settings
        self._about = {
            "mesh": config.topology.mesh.name,
            "region": config.region,
            "router": config.router,
            "version": package_version(),
            "can_change": sorted(
                name for name, login in config.logins.items() if config.admin_key and login.admin
            ),
            "stale_s": STALE_S,
        }
        self._settings = {
            name: router_settings(config.topology, name) for name in config.topology.regions
        }
        self._places = {
            name: None if table.location is None else list(table.location)
            for name, table in config.topology.regions.items()
        }

    def shown(self, frame: Frame, fleet: Fleet, unix_s: float) -> dict[str, Any]:
        """What the page draws of a frame at that time."""
        notes = [printable(note) for note in frame.notes]
        if (left_out := len(frame.replicas) - REPLICAS_MAX) > 0:
            notes.append(f"{left_out} more replicas are not shown; `mesh top` has them")
        replicas = frame.replicas[:REPLICAS_MAX]
        return {
            **self._about,
            "at": unix_s,
            "notes": notes,
            "regions": [self._shown_region(row, fleet) for row in frame.regions],
            "traffic": [asdict(row) for row in frame.traffic],
            "tables": {
                "replicas": _table(REPLICAS, replicas, ("region", "replica")),
                "requests": _table(REQUESTS, frame.requests, ("region", "request", "served")),
                "traffic": _table(TRAFFIC, frame.traffic, ("asked",)),
            },
        }

    def _shown_region(self, row: RegionRow, fleet: Fleet) -> dict[str, Any]:
        name = RegionId(row.region)
        orders = fleet.orders_of(name)
        return {
            **asdict(row),
            "why_away": printable(row.why_away),
            "level": level(row),
            "location": self._places[name],
            "routing": self._shown_routing(name, orders),
            "is_own": name == self._region,
            "orders": None if orders is None else shown_orders(orders),
        }

    def _shown_routing(self, region: RegionId, orders: RegionControl | None) -> list[list[str]]:
        """How its routers place requests: by mesh.toml (this router's own options included) and
        operators' orders. Routers go on as before where they can't follow an order."""
        is_own = region == self._region
        configured = self._own_settings() if is_own else self._settings[region]
        settings = configured
        if orders is not None:
            with suppress(ValueError):
                settings = ordered_settings(configured, orders.routing)
        before = dict(_choices(configured))
        return [
            [title, text if before.get(title) == text else f"{text} (by order)"]
            for title, text in _choices(settings)
        ]


def shown_orders(orders: RegionControl) -> dict[str, Any]:
    """Operators' orders: what is drained, and the command that was last."""
    return {
        "drained": list(orders.drained),
        "all_drained": orders.all_drained,
        "command": printable(orders.command),
        "by": printable(orders.by),
        "reason": printable(orders.reason),
        "at": orders.at_unix_s or None,
    }


def _choices(settings: RouterSettings) -> Iterator[tuple[str, str]]:
    for title, name in ROUTING.items():
        value = getattr(settings, name)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        yield title, "none" if value is None else shown
    for priority, policy in settings.policy_by_priority:
        yield f"policy of {priority.name.lower()}", policy


def _table(columns: Sequence[Column], rows: Sequence[Row], ids: Sequence[str]) -> dict[str, Any]:
    """Titles, cells and what to sort by; `ids`: what a row is of, by the names of its fields."""
    return {
        "columns": [
            {"title": one.title, "is_number": one.is_number, "keep": one.keep} for one in columns
        ],
        "rows": [
            {
                "key": key(row),
                "level": level(row),
                "age_s": getattr(row, "age_s", None),
                "of": {name: getattr(row, name) for name in ids},
                "cells": [one.text(row) for one in columns],
                "values": [_comparable(one, row) for one in columns],
            }
            for row in rows
        ],
    }


def _comparable(column: Column, row: Row) -> float | str | None:
    value = column.value(row)
    return value if value is None or isinstance(value, int | float) else str(value)
