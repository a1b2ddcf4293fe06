"""Two small regions as `mesh doctor` finds them: eu is confined to `eu`, us carries `us`."""

import asyncio
from contextlib import asynccontextmanager

from infra.topology import parse
from mesh.doctor.examination import ExaminationSettings, TimeLimits, examine
from mesh.doctor.findings import CheckResult
from mesh.doctor.logins import read_logins
from mesh.doctor.manual_commands import SystemdCommands
from tests.support.mesh_command import mesh_command
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import small_mesh
from tests.support.until import PATIENCE_S

TABLES = {"eu": 'residency = ["eu"]\nconfined_to = ["eu"]', "us": 'residency = ["us"]'}
LISTEN_S = 1.5


@asynccontextmanager
async def running(directory, *, edit=None, rendered=TABLES, clusters=()):
    """Both regions at work, each with a router and an agent."""
    text = mesh_toml(("us", "eu"), replicas=1, more=rendered, clusters=clusters)
    (directory / "mesh.toml").write_text(text)
    regions = NatsRegions(parse(text, "mesh.toml"), directory / "rendered", edit=edit)
    try:
        await regions.start()
        async with scripted_engine() as engine, small_mesh(regions) as mesh:
            for region in ("us", "eu"):
                await mesh.router(region, ground=regions.topology.ground)
                await mesh.agent(region, f"{region}-0", engine)
            for region, peer in (("us", "eu"), ("eu", "us")):
                await mesh.until_ready(region, 1)
                await mesh.until_peer(region, peer)
            mesh.engines = (engine,)
            yield regions, mesh
    finally:
        await regions.stop()


async def examined(regions, directory, **differs):
    """All findings of those whose credentials are there. `differs`: a topology, or limits."""
    logins = read_logins(regions.topology, directory / "rendered")
    topology = differs.get("topology", regions.topology)
    manner = ExaminationSettings(
        LISTEN_S, asyncio.get_running_loop().time, differs.get("limits", TimeLimits())
    )
    commands = SystemdCommands(topology, directory / "mesh.toml", directory / "rendered")
    return await examine(topology, logins, manner, commands)


async def looked(look, fits):
    """What is found in the end: a mesh that stands still while it is listened to seems ill, and one
    that gets well does so in its time."""
    clock = asyncio.get_running_loop().time
    until = clock() + PATIENCE_S
    while not fits(found := await look()) and clock() < until:
        pass
    return found


def ill(findings):
    """What is bad by itself."""
    return {
        (one.region, one.check, one.about)
        for one in findings
        if one.verdict is CheckResult.BAD and one.because is None
    }


async def command(directory, *arguments, config="mesh.toml"):
    """Status, output and errors of `mesh doctor`."""
    which = () if config is None else ("--config", str(directory / config))
    credentials = ("--credentials", str(directory / "rendered"))
    return await mesh_command("doctor", *which, *credentials, *arguments)
