"""infra/compose.yaml as it stands: its image built, its three regions run, a link cut and mended.

The image's base is a Debian 12 that the test makes instead of python:3.12-slim, which would have to
be pulled; for the same reason the services of the profile `observe` don't run. `make test-compose`
runs this with the engine that answers, or with one of its own (.ci/container-engine).
"""

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.containers.test_compose import COMPOSE_FILE, MESH_TOML, services
from tests.support.debian import (
    BASE,
    COMPOSE,
    INSTALLS_FROM_WHEELS,
    WHEELS,
    make_all,
    make_base,
    make_compose,
    make_wheels,
)
from tests.support.machine_needs import engine_problem
from tests.support.ports import free_ports

pytestmark = [pytest.mark.composed, pytest.mark.timeout(1500)]  # archives may be slow

REGIONS = ("us", "eu", "ap")
DEBIAN, IMAGE_BASE = "mesh-test-debian", "mesh-test-base"
IMAGES = ("inference-mesh", IMAGE_BASE, DEBIAN)
MODEL = "mistralai/Mistral-7B-Instruct-v0.3"
WITHIN_S = 90.0
ONCE = {"render", *(f"streams-{region}" for region in REGIONS)}
NOT_RUN = {name for name, each in services.items() if "profiles" in each}


def wait_until(condition: Callable[[], object], what: str) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WITHIN_S, what
        time.sleep(0.2)
    return time.monotonic() - began


class Failed(AssertionError):
    """A command of Compose failed; the message has what it printed."""


class Composed:
    """The running stack."""

    def __init__(self, folder: Path) -> None:
        self.ports = dict(zip(REGIONS, free_ports(len(REGIONS)), strict=True))
        self._override = folder / "override.yaml"
        # Ports of their own, so that another mesh may run on this machine; and a doctor on every
        # region's network.
        text = "services:\n"
        for region, port in self.ports.items():
            [published] = services[f"router-{region}"]["ports"]
            own = f"127.0.0.1:{port}:{published.rpartition(':')[2]}"
            text += f'  router-{region}: {{ ports: !override ["{own}"] }}\n'
            text += f"  nats-{region}: {{ ports: !reset [] }}\n"
        doctor = {
            "image": "inference-mesh",
            "profiles": ["doctor"],
            "networks": list(REGIONS),
            "volumes": ["state:/var/lib/mesh", f"{MESH_TOML}:/etc/mesh/mesh.toml:ro"],
            "command": "mesh doctor --config /etc/mesh/mesh.toml --credentials /var/lib/mesh",
        }
        text += f"  doctor: {json.dumps(doctor)}\n"
        self._override.write_text(text)

    def compose(self, *words: str) -> str:
        files = ("--file", COMPOSE_FILE, "--file", self._override)
        done = subprocess.run(
            [COMPOSE, *files, *words], capture_output=True, text=True, check=False, timeout=500
        )
        if done.returncode != 0:
            raise Failed(f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done.stdout

    def page_bytes(self, region: str, target: str) -> int:
        """How long a page of metrics is, read from the region's network; 0: it isn't served."""
        program = (
            "from urllib.request import urlopen; "
            f"print(len(urlopen('http://{target}/metrics', timeout=9).read()))"
        )
        try:
            words = ("exec", "-T", f"engine-{region}-0", "python3", "-c", program)
            return int(self.compose(*words))
        except Failed:
            return 0

    def states(self) -> dict[str, tuple[str, int]]:
        """Service → its state and exit code."""
        rows = map(json.loads, self.compose("ps", "--all", "--format", "json").splitlines())
        return {row["Service"]: (row["State"], row["ExitCode"]) for row in rows}

    def url(self, region: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[region]}{path}"

    def is_ready(self, region: str) -> bool:
        try:
            with urllib.request.urlopen(self.url(region, "/ready"), timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def ask(self, region: str) -> dict[str, Any]:
        """Have a stream answered whole; the receipt of its placement."""
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "stream": True}
        request = urllib.request.Request(
            self.url(region, "/v1/completions"),
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", "x-mesh-debug": "1"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.read().rstrip().endswith(b"data: [DONE]")
                receipt: dict[str, Any] = json.loads(answer.headers["x-mesh-decision"])
                return receipt
        except urllib.error.HTTPError as refused:
            logs = self.compose("logs", "--tail=20", f"router-{region}", f"agent-{region}-0")
            raise Failed(f"{region}: {refused.status} {refused.read()!r}\n{logs}") from None

    def free(self, region: str, peer: str) -> float:
        """Free replicas of a peer that is not red, as the region's router sees it."""
        with urllib.request.urlopen(self.url(region, "/metrics"), timeout=10) as answer:
            page = answer.read().decode()
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.labels.get("peer") == peer
        }
        if not values.get("mesh_peer_health"):
            return 0.0
        return float(values.get("mesh_peer_replicas_free", 0.0))


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    problem = engine_problem()
    assert problem is None, f"{problem}: run .ci/container-engine make test-compose"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        client = docker.from_env(timeout=300)
        there = [each.name for each in client.containers.list(all=True)]
        found = [name for name in there if name.startswith("mesh-")] + kept(client)
        assert not found, f"of an infra/compose.yaml that runs, or ran: {found}; remove it first"
        try:
            yield client
        finally:
            client.close()


@pytest.fixture(scope="module")
def composed(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Composed]:
    began = time.monotonic()
    make_all(make_base, make_wheels, make_compose)
    fetched = time.monotonic()
    stack = Composed(tmp_path_factory.mktemp("composed"))
    with contextlib.ExitStack() as made:
        made.callback(remove_images, engine)
        make_image_base(engine, tmp_path_factory.mktemp("base"))
        stack.compose("build", "--build-arg", f"BASE={IMAGE_BASE}", "render")
        built = time.monotonic()
        made.callback(stack.compose, "down", "--volumes")
        stack.compose("up", "--detach", "--no-build")
        yield stack
        print(f"fetched in {fetched - began:.0f} s, built in {built - fetched:.0f} s")
    assert_nothing_is_left(engine)


def make_image_base(engine: docker.DockerClient, folder: Path) -> None:
    """A Debian with the wheels, and pip's settings that make it use them alone."""
    engine.api.import_image_from_file(str(BASE), repository=DEBIAN, tag="latest")
    shutil.copytree(WHEELS, folder / "wheels")
    settings = {"PIP_FIND_LINKS": "/srv/wheels", **INSTALLS_FROM_WHEELS}
    lines = [f"FROM {DEBIAN}", "COPY wheels /srv/wheels"]
    lines += [f"ENV {name}={value}" for name, value in settings.items()]
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    engine.images.build(path=str(folder), tag=IMAGE_BASE, rm=True)


def remove_images(engine: docker.DockerClient) -> None:
    for name in IMAGES:
        with contextlib.suppress(docker.errors.ImageNotFound):
            engine.images.remove(name, force=True)


def kept(engine: docker.DockerClient) -> list[str]:
    """Networks, volumes and images of the stack. Somebody's own must not be removed."""
    ours = {"label": "com.docker.compose.project=mesh"}
    left = [
        each.name
        for each in (*engine.networks.list(filters=ours), *engine.volumes.list(filters=ours))
    ]
    tags = [tag for image in engine.images.list() for tag in image.tags]
    return left + [tag for tag in tags if tag.split(":")[0] in IMAGES]


def assert_nothing_is_left(engine: docker.DockerClient) -> None:
    ours = {"label": "com.docker.compose.project=mesh"}
    left = [each.name for each in engine.containers.list(all=True, filters=ours)] + kept(engine)
    assert not left, left


def test_every_service_runs_and_every_region_answers(composed: Composed):
    expected = {name: ("exited", 0) if name in ONCE else ("running", 0) for name in services}
    expected = {name: state for name, state in expected.items() if name not in NOT_RUN}
    wait_until(lambda: composed.states() == expected, "services run")
    for region in REGIONS:
        took_s = wait_until(lambda name=region: composed.is_ready(name), f"{region} is ready")
        receipt = composed.ask(region)
        print(f"{region} was ready after {took_s:.1f} s more; {receipt['placement']}")
    left_out = ", ".join(sorted(NOT_RUN))
    print(f"{len(expected)} services run; not run, because pulled: {left_out}")
    assert {"grafana", "jaeger", "prometheus"} == NOT_RUN


def test_the_doctor_finds_nothing_bad(composed: Composed):
    for region in REGIONS:
        for peer in set(REGIONS) - {region}:
            wait_until(lambda a=region, b=peer: composed.free(a, b) == 2, f"{region} sees {peer}")
    print(composed.compose("run", "--rm", "--no-TTY", "doctor"))


def test_pages_that_prometheus_reads_are_served(composed: Composed):
    config = yaml.safe_load((COMPOSE_FILE.parent / "compose" / "prometheus.yml").read_text())
    targets = [
        target
        for job in config["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    for region in REGIONS:
        own = [target for target in targets if f"-{region}" in target]
        assert len(own) == 4  # router, batch runner, two agents
        for target in own:
            what = f"{target} serves its metrics\n{composed.compose('logs', target.split(':')[0])}"
            wait_until(lambda a=region, b=target: composed.page_bytes(a, b) > 500, what)


def test_a_cut_link_heals_and_forwarded_requests_cross_it(
    composed: Composed, engine: docker.DockerClient
):
    """us has no replica, and ap has none: only eu can answer, over one link."""
    agents = [f"agent-{region}-{n}" for region in ("us", "ap") for n in (0, 1)]
    composed.compose("stop", *agents)
    wait_until(lambda: composed.free("us", "ap") == 0, "us sees that ap has no replica")
    receipt = composed.ask("us")
    assert (receipt["placement"], receipt["peer"]) == ("peer", "eu")

    cut, mend = re.findall(r"#   (docker network .*)", COMPOSE_FILE.read_text())
    run_as_written(engine, cut)
    wait_until(lambda: composed.free("us", "eu") == 0, "us sees that eu is gone")
    assert not composed.is_ready("us")
    run_as_written(engine, mend)
    took_s = wait_until(lambda: composed.free("us", "eu") == 2, "us sees eu again")
    print(f"the link healed {took_s:.1f} s after its network was back")
    receipt = composed.ask("us")
    assert (receipt["placement"], receipt["peer"]) == ("peer", "eu")
    composed.compose("start", *agents)
    wait_until(lambda: composed.ask("us")["placement"] == "local", "us answers by itself")


def run_as_written(engine: docker.DockerClient, command: str) -> None:
    """A `docker network connect` or `disconnect` of the file's header."""
    program, noun, verb, network, container = command.split()
    assert (program, noun) == ("docker", "network")
    [found] = engine.networks.list(names=[network])
    {"connect": found.connect, "disconnect": found.disconnect}[verb](container)
