"""A region whose nats-server's disk is full: requests go on, and everything names it.

The disk is a small file system in memory, which takes root.
"""

import contextlib
import os
import subprocess

import aiohttp
import pytest

from infra.topology import parse
from mesh.doctor.findings import STREAM_WRITES
from tests.support.examined_mesh import examined, looked
from tests.support.mesh_command import mesh_command
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import chat, post, small_mesh
from tests.tools.test_server_versions import installed

pytestmark = [pytest.mark.tools, pytest.mark.timeout(180)]

DISK = "12m"


@contextlib.contextmanager
def disk(folder):
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder):
    """With a file of somebody else's. Returns it."""
    filler = folder / "filler"
    file = os.open(filler, os.O_CREAT | os.O_WRONLY)
    try:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file, bytes(size))
    finally:
        os.close(file)
    return filler


def store_of(regions, region):
    """Where the region's server keeps its streams, as rendered."""
    config = regions.files[region].config.read_text().splitlines()
    [line] = [line for line in config if "store_dir" in line]
    return line.split('"')[-2]


async def problem_of(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/ready") as answer:
        return answer.status, (await answer.json())["problem"]


@pytest.mark.parametrize("version", ["2.12.7", "2.15.1"])
async def test_a_full_disk_is_named_until_its_server_takes_writes_again(tmp_path, version):
    text = mesh_toml(("us", "eu"), replicas=1)
    (tmp_path / "mesh.toml").write_text(text)
    binaries = dict.fromkeys(("us", "eu"), installed(version))
    regions = NatsRegions(parse(text, "mesh.toml"), tmp_path / "rendered", binaries=binaries)
    with disk(type(tmp_path)(store_of(regions, "us"))) as store:
        try:
            await regions.start()
            async with scripted_engine() as engine, small_mesh(regions) as mesh:
                for region in ("us", "eu"):
                    await mesh.router(region)
                    await mesh.agent(region, f"{region}-0", engine)
                    await mesh.until_ready(region, 1)
                await is_named(regions, mesh, tmp_path, store)
        finally:
            await regions.stop()


async def is_named(regions, mesh, directory, store):
    url = mesh.urls["us"]
    assert await problem_of(url) == (200, None)
    filler = fill(store)
    leases = mesh.routers["us"].requests.leases
    await mesh.until(lambda: leases.problem is not None, "the router to notice")
    status, problem = await problem_of(url)
    assert status == 200 and "disk of its nats-server" in problem
    assert mesh.sample("us", "mesh_lease_writes_failed_total") >= 2
    status, *_ = await post(mesh, chat("x"))
    assert status == 200, "requests go on"

    def is_found(findings):
        return any((one.region, one.check) == ("us", STREAM_WRITES) for one in findings)

    findings = await looked(lambda: examined(regions, directory), is_found)
    [found] = [one for one in findings if one.check == STREAM_WRITES]
    assert found.region == "us" and "restart" in found.remedy.what
    options = (
        "--config",
        str(directory / "mesh.toml"),
        "--credentials",
        str(directory / "rendered"),
    )
    status, _, err = await mesh_command("cordon", "us-0", *options)
    assert status != 0 and "disk is or was full" in err

    filler.unlink()
    await regions.stop_one("us")
    await regions.start_one("us")
    await mesh.until(lambda: leases.problem is None, "the streams to take writes again")
    status, *_ = await mesh_command("cordon", "us-0", *options)
    assert status == 0
    findings = await looked(lambda: examined(regions, directory), lambda them: not is_found(them))
    assert not is_found(findings)
