"""Workloads for the twin: synthetic ones by name, and recorded traces.

Each maker takes the same four arguments and options of its own; called without any it gives its
source's setting. `clients` are users per region, `rate_per_s` requests a second of an open loop (a
workload that is a closed loop in its source stays one without it), `duration_s` how long requests
begin. Same arguments, same workload, in every process.
"""

from collections.abc import Mapping

from mesh.sim.workload import Workload
from mesh.sim.workloads.arrivals import ClientCounts, WorkloadMaker
from mesh.sim.workloads.daily_load import diurnal, world_product
from mesh.sim.workloads.preble import embodied_agent, loogle, programming, toolbench, video_qa
from mesh.sim.workloads.prefix_groups import chapter, short
from mesh.sim.workloads.skywalker import arena, chat, mixed_tree, tot
from schemas.problems import checked_choice

WORKLOADS: Mapping[str, WorkloadMaker] = {
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
    clients: ClientCounts | None = None,
    seed: int = 0,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
) -> Workload:
    """The workload of this name. Raises ValueError that names the known ones."""
    maker = WORKLOADS[checked_choice("workload", name, WORKLOADS)]
    return maker(clients=clients, seed=seed, duration_s=duration_s, rate_per_s=rate_per_s)
