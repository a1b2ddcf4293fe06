"""infra/k8s/three-nats: what differs from the manifests of one nats-server is what it is to be."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from infra import topology
from infra.nats import bundle
from tests.infra.k8s.manifests import FOLDER, STATE, Manifest

THREE = FOLDER / "three-nats"
MANIFESTS = [
    Manifest("nats.yaml", each) for each in yaml.safe_load_all((THREE / "nats.yaml").read_text())
]
[NATS] = [each for each in MANIFESTS if each.kind == "StatefulSet"]
[SERVER] = NATS.containers


def named(kind: str) -> dict[str, dict]:
    return {each.name: each.content["spec"] for each in MANIFESTS if each.kind == kind}


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_knows_every_field(version: str):
    for manifest in MANIFESTS:
        kubernetes_validate.validate(manifest.content, version, strict=True)


def test_each_pod_starts_with_the_file_that_is_rendered_for_it(tmp_path: Path):
    mesh = topology.load(THREE / "mesh.toml")
    files = bundle.write(mesh, tmp_path, state_directory=Path(STATE))["us"]
    spec = NATS.content["spec"]
    pods = [f"nats-{spec['ordinals']['start'] + n}" for n in range(spec["replicas"])]
    configs = [SERVER["command"][-1].replace("$(POD_NAME)", pod) for pod in pods]
    assert configs == [f"/etc/mesh/{config.name}" for config in files.configs]
    region = mesh.region("us")
    ports = {each["name"]: each["containerPort"] for each in SERVER["ports"]}
    for pod, server in zip(pods, region.servers, strict=True):
        within = {"nats": server.nats, "cluster": server.cluster, "monitor": server.monitor}
        for name, address in within.items():
            assert str(address) == f"{pod}.nats.mesh-us.svc:{ports[name]}"
        leaf = named("Service")[f"nats-leaf-{pod[-1]}"]
        assert leaf["selector"] == {"statefulset.kubernetes.io/pod-name": pod}
        assert [port["port"] for port in leaf["ports"]] == [ports["leaf"]] == [server.leaf.port]
    assert {each["port"] for each in named("Service")["nats"]["ports"]} == {
        ports[name] for name in ("nats", "cluster", "monitor")
    }
    [limit] = re.findall(r'"max_file_store": (\d+)', files.configs[0].read_text())
    [claim] = spec["volumeClaimTemplates"]
    assert int(limit) < int(claim["spec"]["resources"]["requests"]["storage"][:-2]) << 30


def test_they_start_together_and_are_ended_one_by_one():
    """A server alone has no leader: it is healthy, and ready only in step with the others."""
    assert NATS.content["spec"]["podManagementPolicy"] == "Parallel"
    paths = {probe: SERVER[probe]["httpGet"]["path"] for probe in SERVER if "Probe" in probe}
    alone = "/healthz?js-server-only=true"
    assert paths == {"startupProbe": alone, "livenessProbe": alone, "readinessProbe": "/healthz"}
    assert named("PodDisruptionBudget")["nats"]["maxUnavailable"] == 1
    assert all(each["publishNotReadyAddresses"] for each in named("Service").values())


def test_only_they_reach_each_others_routes():
    [rule] = named("NetworkPolicy")["nats-cluster"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": "cluster"}]
    [who] = rule["from"]
    assert who["podSelector"]["matchLabels"].items() <= NATS.content["metadata"]["labels"].items()


def test_the_rest_is_as_with_one_server():
    [one] = [
        each
        for each in yaml.safe_load_all((FOLDER / "nats.yaml").read_text())
        if each["kind"] == "StatefulSet"
    ]
    [other] = one["spec"]["template"]["spec"]["containers"]
    same = ("image", "resources", "securityContext", "volumeMounts", "livenessProbe")
    assert {key: SERVER[key] for key in same} == {key: other[key] for key in same}
    assert NATS.pod["securityContext"] == one["spec"]["template"]["spec"]["securityContext"]
