"""A mesh.toml whose routers serve https, made of one whose routers don't: `mesh up --tls`.

The text is kept as it is but for the lines that differ.
"""

from infra.nats.bundle import ROUTER_CERTIFICATE
from infra.toml_positions import TomlPositions
from infra.topology import Topology

CERTIFICATE, KEY = ROUTER_CERTIFICATE


def with_tls(text: str, topology: Topology) -> str:
    """The text with `tls` in each region, of files as `mesh infra nats` renders them beside it.

    Raises TopologyError for a region that has its own, or no header of its own.
    """
    positions, lines = TomlPositions(text), text.splitlines()
    for name, region in topology.regions.items():
        header = positions.of(("regions", name))
        at = -1 if header is None else header.line - 1
        if region.tls is not None:
            raise topology.error(f"regions.{name}.tls", "leave it out, or --tls")
        if not lines[at].lstrip().startswith("["):
            raise topology.error(f"regions.{name}", f"write [regions.{name}] above it for --tls")
        if region.endpoint and (place := positions.of(("regions", name, "endpoint"))) is not None:
            lines[place.line - 1] = lines[place.line - 1].replace("http://", "https://", 1)
        lines[at] += f'\ntls = {{ cert = "{name}/{CERTIFICATE}", key = "{name}/{KEY}" }}'
    return "\n".join([*lines, ""])
