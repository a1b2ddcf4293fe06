"""The nats-servers of infra/compose/mesh.toml, in containers, joined by networks of their own.

Every region's server is on a network of its region, where it publishes its client port to this
machine, and on one network per leaf link. So one link can be cut as a failing wide-area path
would: no packet passes, no connection is closed, and nobody is told.

The image holds the static nats-server that is a dependency of the mesh, and nothing else: no
registry is asked for anything. Rejected: pausing or killing a server to stand for a lost link;
that also takes the region's own clients from it.
"""

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient
from testcontainers.core.image import DockerImage
from testcontainers.core.labels import LABEL_SESSION_ID, SESSION_ID
from testcontainers.core.network import Network
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

from infra import topology
from infra.credentials_file import read_environment
from infra.nats import bundle
from infra.nats.bundle import Written
from schemas.ids import RegionId
from tests.support.nats_server import nats_server_binary

ROOT = Path(__file__).parents[2]
MESH_TOML = ROOT / "infra" / "compose" / "mesh.toml"
CONFIG = "/nats.conf"
DOCKERFILE = 'FROM scratch\nCOPY nats-server /nats-server\nENTRYPOINT ["/nats-server"]\n'
START_TIMEOUT_S = 30


class LeafMesh:
    """The running servers, by region, and the networks between them."""

    def __init__(
        self,
        servers: Mapping[str, DockerContainer],
        links: Mapping[frozenset[str], Network],
        mesh_toml: topology.Topology,
        files: Written,
    ) -> None:
        self._servers = servers
        self._links = links
        self._files = files
        self.topology = mesh_toml

    def environment(self, region: str, user: str) -> dict[str, str]:
        """The variables of a user's credentials file, with the address seen from this machine."""
        server = self._servers[region]
        port = server.get_exposed_port(self.topology.region(region).nats[0].port)
        url = f"nats://{server.get_container_host_ip()}:{port}"
        credentials = read_environment(self._files[RegionId(region)].credentials[user])
        return {**credentials, "NATS_URL": url}

    def log(self, region: str) -> str:
        """What the region's server has printed."""
        return self._servers[region].get_wrapped_container().logs().decode()

    def cut(self, a: str, b: str) -> None:
        """Take the network between two regions away; everything else stays joined."""
        network, solicitor = self._link(a, b)
        network._unwrap_network.disconnect(solicitor)

    def mend(self, a: str, b: str) -> None:
        """Give it back."""
        network, solicitor = self._link(a, b)
        network.connect(solicitor)

    def _link(self, a: str, b: str) -> tuple[Network, str]:
        """The network of a link, and the container that dials through it."""
        solicitor = self.topology.link(a, b).solicitor
        return self._links[frozenset((a, b))], self._servers[solicitor].get_container_id()


@contextlib.contextmanager
def running_leaf_mesh(directory: Path) -> Iterator[LeafMesh]:
    """Render the configurations, start a server per region, and leave nothing behind."""
    mesh_toml = topology.load(MESH_TOML)
    files = bundle.write(mesh_toml, directory / "rendered", state_directory=Path("/jetstream"))
    with contextlib.ExitStack() as stack:
        stack.callback(assert_nothing_is_left)
        image = stack.enter_context(_server_image(directory))
        homes = {region: stack.enter_context(Network()) for region in mesh_toml.regions}
        # Internal: without a way out, Docker publishes no port there (see infra/compose.yaml).
        links = {
            frozenset(link.between): stack.enter_context(
                Network(docker_network_kw={"internal": True})
            )
            for link in mesh_toml.links
        }
        servers = {}
        for region, has in mesh_toml.regions.items():
            server = DockerContainer(str(image), ports=[has.nats[0].port], network=homes[region])
            server.with_command(["--config", CONFIG])
            server.with_copy_into_container(files[region].config, CONFIG)
            server.waiting_for(
                LogMessageWaitStrategy("Server is ready").with_startup_timeout(START_TIMEOUT_S)
            )
            servers[region] = stack.enter_context(server)
        for pair, network in links.items():
            for region in pair:
                alias = mesh_toml.region(region).leaf[0].host
                network.connect(servers[region].get_container_id(), network_aliases=[alias])
        yield LeafMesh(servers, links, mesh_toml, files)


@contextlib.contextmanager
def _server_image(directory: Path) -> Iterator[DockerImage]:
    context = directory / "image"
    context.mkdir(parents=True)
    shutil.copy(nats_server_binary(), context / "nats-server")
    (context / "Dockerfile").write_text(DOCKERFILE)
    # The label makes it another image than that of a test session beside this one, which has
    # the same content: either could not be removed while the other is in use.
    label = {LABEL_SESSION_ID: SESSION_ID}
    tag = f"mesh-nats-server:{uuid.uuid4().hex}"
    with DockerImage(path=context, tag=tag, rm=True, labels=label) as image:
        yield image


def assert_nothing_is_left() -> None:
    """Fail if a container, network or image of this test session is still there."""
    docker = DockerClient().client
    mine = {"label": f"{LABEL_SESSION_ID}={SESSION_ID}"}
    left = [
        *docker.containers.list(all=True, filters=mine),
        *docker.networks.list(filters=mine),
        *docker.images.list(filters=mine),
    ]
    docker.close()
    assert not left, f"left behind: {left}"
