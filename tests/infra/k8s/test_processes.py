"""The containers of infra/k8s as processes of this machine: their commands, variables and probes.

What a container mounts is where its command looks for it, below a folder of the test; addresses of
Services and ports of pods are free ports here. The first pod of each kind runs, with a simulated
engine; kubelet's probes are made as it makes them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.infra.k8s.manifests import FOLDER, PODS, STATE, Manifest, Rendered, render
from tests.support.nats_server import nats_server_binary
from tests.support.ports import free_ports
from tests.support.until import PATIENCE_S

SERVICES = {"router.mesh-us.svc:8101": 8101, "nats.mesh-us.svc:4101": 4101}
SERVICES |= {"nats.mesh-us.svc:8222": 8222, "nats.us.example.com:4201": 4201}
PORTS = (4101, 4201, 8000, 8101, 8222, 9100, 9700)
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
# A router is ready when a replica is.
ORDER = ("nats.yaml", "streams.yaml", "engine-simulated.yaml", "router.yaml", "batch-runner.yaml")


class Cluster:
    """Pods, as processes; `here` turns what a container names into what there is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        text = (FOLDER / "mesh.toml").read_text()
        for address, port in SERVICES.items():
            text = text.replace(address, f"127.0.0.1:{self.ports[port]}")
        mesh_toml = folder / "mesh.toml"
        mesh_toml.write_text(text)
        self.rendered: Rendered = render(mesh_toml, folder / "rendered")
        self.running: list[subprocess.Popen[bytes]] = []

    def here(self, text: str, root: Path, name: str) -> str:
        text = text.replace("$(POD_NAME)", name)
        for path in ("/etc/mesh", "/run/mesh", "/tmp/ready"):
            text = text.replace(path, f"{root}{path}")
        for port, free in self.ports.items():
            text = text.replace(str(port), str(free))
        return text

    def mount(self, pod: Manifest, container: dict[str, Any], root: Path, name: str) -> None:
        claims = pod.content["spec"].get("volumeClaimTemplates", ())
        for each in container["volumeMounts"]:
            at = root / each["mountPath"][1:]
            if each["name"] in {claim["metadata"]["name"] for claim in claims}:
                at.mkdir(parents=True)
                continue
            for path, content in self.rendered.mounted(pod.pod, each, name).items():
                file = root / path[1:]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.replace(STATE.encode(), f"{root}{STATE}".encode()))
        (root / "tmp").mkdir(parents=True, exist_ok=True)

    def run(self, pod: Manifest, container: dict[str, Any]) -> None:
        """Start it, and wait until its probes succeed; of a Job, until it has ended well."""
        name = f"{pod.name}-0"
        root = self.folder / pod.name
        self.mount(pod, container, root, name)
        given = {each["name"]: each.get("value", name) for each in container.get("env", ())}
        program, *words = [self.here(word, root, name) for word in container["command"]]
        binary = (
            nats_server_binary()
            if program == "nats-server"
            else Path(sys.executable).with_name(program)
        )
        with (self.folder / f"{pod.name}-{container['name']}.log").open("wb") as log:
            process = subprocess.Popen(
                [binary, *words],
                env={"PATH": os.environ["PATH"]}
                | {key: self.here(value, root, name) for key, value in given.items()},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.running.append(process)
        if pod.kind == "Job":
            assert process.wait(PATIENCE_S) == 0, Path(log.name).read_text()
        for probe in PROBES:
            if (how := container.get(probe)) is not None:
                began = time.monotonic()
                while not self.succeeds(how, container, root, name):
                    assert process.poll() is None, Path(log.name).read_text()
                    assert time.monotonic() - began < PATIENCE_S, f"{container['name']}: {probe}"
                    time.sleep(0.1)

    def succeeds(
        self, probe: dict[str, Any], container: dict[str, Any], root: Path, name: str
    ) -> bool:
        if "exec" in probe:
            words = [self.here(word, root, name) for word in probe["exec"]["command"]]
            return (
                subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0
            )
        [port] = [
            each["containerPort"]
            for each in container["ports"]
            if each["name"] == probe["httpGet"]["port"]
        ]
        url = f"http://127.0.0.1:{self.ports[port]}{probe['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return 200 <= answer.status < 400
        except (urllib.error.URLError, OSError):
            return False

    def end(self) -> list[int]:
        """Let all end, those that were started last first; their exit codes."""
        codes = []
        for process in reversed(self.running):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                codes.append(process.wait(PATIENCE_S))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        return codes


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.end()


def test_the_region_of_the_manifests_answers(cluster: Cluster):
    pods = {pod.file: pod for pod in PODS}
    ran = 0
    for file in ORDER:
        for container in pods[file].containers:
            cluster.run(pods[file], container)
            ran += 1
    body = {"model": "mistralai/Mistral-7B-Instruct-v0.3", "prompt": "hi", "max_tokens": 3}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{cluster.ports[8101]}/v1/completions",
        data=orjson.dumps({**body, "stream": True}),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.read().rstrip().endswith(b"data: [DONE]")
    for port in (8101, 9100, 9700):
        url = f"http://127.0.0.1:{cluster.ports[port]}/metrics"
        with urllib.request.urlopen(url, timeout=30) as page:
            assert b"process_cpu_seconds_total" in page.read()
    assert cluster.end() == [0] * ran
    print(f"{ran} containers of {len(ORDER)} manifests ran")
