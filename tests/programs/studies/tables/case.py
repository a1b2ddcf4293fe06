"""One run of one table, and what it depends on."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from mesh.sim.study.cells import Cell
from mesh.sim.study.settings import SimSettings
from schemas.ids import RegionId
from tests.programs.studies.tables.fingerprint import code_of

NOT_ABOUT_RESULTS = {"policy", "topology", "pushing", "load", "regions", "jobs", "out"}
REGIONS = ("us", "eu", "ap")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What is compared: a policy, where its routers are, and when they push.

    `setting`: settings of its routers, `name=value`.
    """

    name: str
    policy: str
    topology: str = "mesh"
    pushing: str = "pending"
    setting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario played by one system. `tags`: its place in the table.

    `world`: fields of WorldConfig that scenarios don't have. `patience_s`: the clients', None where
    only answered requests count; with it, `warm_up` requests a replica are not measured.
    """

    tags: tuple[Any, ...]
    scenario: SimSettings
    cell: Cell
    world: Mapping[str, Any] = field(default_factory=dict)
    patience_s: float | None = None
    warm_up: int | None = None

    def key(self) -> str:
        """Equal keys, equal results (but for what is measured by a clock)."""
        asked = {
            "scenario": self.scenario.model_dump(
                mode="json", exclude={*NOT_ABOUT_RESULTS, "pictures"}
            ),
            "cell": [self.cell.policy, self.cell.topology, self.cell.pushing, self.cell.load],
            "replicas": dict(self.cell.replicas),
            "world": dict(self.world),
            "clients": [self.patience_s, self.warm_up],
            "code": code_of(self.cell.policy),
            "trace": None if self.scenario.trace is None else _content(self.scenario.trace),
        }
        asked["scenario"].pop("trace")
        text = orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(text, digest_size=16).hexdigest()


NO_DELAY_LIMIT = "queue_delay_s_max=0"


def fleet(total: int, regions: Iterable[str] = REGIONS) -> dict[RegionId, int]:
    """Replicas dealt out evenly, the first regions getting what is left over."""
    names = [RegionId(region) for region in regions]
    return {name: (total + len(names) - 1 - at) // len(names) for at, name in enumerate(names)}


def case(
    tags: tuple[Any, ...],
    system: System,
    replicas: Mapping[RegionId, int],
    *,
    load: float | None = None,
    world: Mapping[str, Any] | None = None,
    patience_s: float | None = None,
    warm_up: int | None = None,
    **scenario: Any,
) -> Case:
    """A case from a scenario's own fields. Raises ValidationError for one that can't be.

    No system has a limit of queue delay unless the case gives one: the studies compare where
    requests are placed, on the same requests, and the systems that they represent refuse none.
    """
    scenario["setting"] = (NO_DELAY_LIMIT, *system.setting, *scenario.get("setting", ()))
    settings = SimSettings(
        regions=[{str(region): count for region, count in replicas.items()}],
        **scenario,
    )
    cell = Cell(
        policy=system.policy,
        topology=system.topology,
        pushing=system.pushing,
        load=load,
        replicas=replicas,
    )
    return Case(
        tags=tags,
        scenario=settings,
        cell=cell,
        world=world or {},
        patience_s=patience_s,
        warm_up=warm_up,
    )


@cache
def _content(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
