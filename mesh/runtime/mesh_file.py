"""A mesh.toml as every command of `mesh` reads it: with the policies that this version has."""

from collections.abc import Iterator
from pathlib import Path

from infra.toml_positions import key_text
from infra.topology import Topology, load
from mesh.core.model.settings import RouterSettings
from schemas.ids import RegionId
from schemas.settings import RoutingTable


def load_mesh(path: Path) -> Topology:
    """Read a mesh.toml. Raises TopologyError that names all mistakes: print its text and stop."""
    return load(path, [routing_problems])


def routing_problems(topology: Topology) -> Iterator[str]:
    """Each choice that this version's routers can't follow, as `key: what to do`."""
    found = {
        f"{key}: {problem}": None  # the mesh's own are those of several regions
        for region in topology.regions
        for key, problem in region_problems(topology, region, topology.routing_of(region))
    }
    yield from found
    for name, table in topology.models.items():
        if table.policy is not None and (problem := _policy_problem(table.policy)) is not None:
            yield f"{key_text('models', name, 'policy')}: {problem}"


def region_problems(
    topology: Topology, region: RegionId, chosen: RoutingTable
) -> Iterator[tuple[str, str]]:
    """The same of a region with these choices, key and problem apart."""
    for key, problem in policy_problems(RouterSettings(**chosen.as_settings())):
        yield _key(topology, region, key), problem


def policy_problems(settings: RouterSettings) -> Iterator[tuple[str, str]]:
    """Policies that this version lacks, or that don't fit the other settings: key and problem."""
    named = [("policy", settings.policy)]
    named += [("policy_by_priority", name) for _, name in settings.policy_by_priority]
    for key, name in named:
        if (problem := _policy_problem(name)) is not None:
            yield key, problem
            return


def _policy_problem(name: str) -> str | None:
    if name == RouterSettings().policy:
        return None  # commands need no policies then, and start sooner
    from mesh.core.policies import find_maker

    try:
        find_maker(name)
    except ValueError as error:
        return str(error)
    return None


def _key(topology: Topology, region: RegionId, key: str) -> str:
    """The region's own key if it is written there, else the mesh's."""
    is_own = getattr(topology.regions[region].routing, key)
    return f"{f'regions.{region}.' if is_own else ''}routing.{key}"
