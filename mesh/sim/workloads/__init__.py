"""What the twin can be asked: synthetic workloads by name, and recorded traces.

Each maker is one function with the same four arguments and more of its own; called without any it
gives its source's own setting. `clients` are people per region, `rate_per_s` requests a second of
an open loop (a workload that is a closed loop by nature stays one without it), `duration_s` how
long requests begin. Same arguments, same workload, in every process.
"""

from collections.abc import Mapping
from typing import Protocol

from mesh.sim.workload import Workload
from mesh.sim.workloads.chapter_fleet import chapter
from mesh.sim.workloads.chat import arena, chat
from mesh.sim.workloads.diurnal import diurnal
from mesh.sim.workloads.embodied_agent import embodied_agent
from mesh.sim.workloads.loops import Clients
from mesh.sim.workloads.programming import programming
from mesh.sim.workloads.questions import loogle, toolbench, video_qa
from mesh.sim.workloads.short_prefixes import short
from mesh.sim.workloads.trees_of_thoughts import mixed_tree, tot
from mesh.sim.workloads.world_product import world_product


class Maker(Protocol):
    """Makes a workload; None means the source's own setting. Raises ValueError."""

    def __call__(
        self,
        *,
        clients: Clients | None = None,
        seed: int = 0,
        duration_s: float | None = None,
        rate_per_s: float | None = None,
    ) -> Workload: ...


WORKLOADS: Mapping[str, Maker] = {
    "chat": chat,
    "arena": arena,
    "tot": tot,
    "mixed-tree": mixed_tree,
    "toolbench": toolbench,
    "agent": embodied_agent,
    "programming": programming,
    "video-qa": video_qa,
    "loogle": loogle,
    "diurnal": diurnal,
    "world-product": world_product,
    "short": short,
    "chapter": chapter,
}


def make(
    name: str,
    *,
    clients: Clients | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
) -> Workload:
    """The workload of this name. Raises ValueError that names the known ones."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}: use one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name](clients=clients, seed=seed, duration_s=duration_s, rate_per_s=rate_per_s)
