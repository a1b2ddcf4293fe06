"""The manifests of infra/k8s: valid to Kubernetes, and about processes, files and ports there are.

Against the schemas of Kubernetes' own OpenAPI document, in which a field that is not known is an
error here. No cluster runs: what they do is tried in test_processes.py as far as that goes.
"""

import copy
import re
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

import agents.cli
import mesh.cli.main
from infra import topology
from tests.infra.k8s.manifests import (
    CONTROLLERS,
    FILES,
    FOLDER,
    MANIFESTS,
    PODS,
    Manifest,
    Rendered,
    commands,
    of_region,
    render,
    values,
)

VERSIONS = ("1.29", "1.37")  # the first whose init containers may go on, and a new one
MESH_TOML = FOLDER / "mesh.toml"
EVERY = {f"{each.kind}/{each.name} of {each.file}": each for each in MANIFESTS}
CONTAINERS = {
    f"{pod.file}:{container['name']}": container for pod in PODS for container in pod.containers
}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(MESH_TOML, tmp_path_factory.mktemp("rendered"))


def check(content: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(content, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", EVERY.values(), ids=EVERY)
def test_kubernetes_knows_every_field(manifest: Manifest, version: str):
    check(manifest.content, version)


def test_a_field_that_it_does_not_know_is_found():
    for pod in PODS:
        wrong = copy.deepcopy(pod.content)
        wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
        with pytest.raises(kubernetes_validate.ValidationError):
            check(wrong, VERSIONS[0])


def test_a_file_per_process():
    assert [pod.file for pod in PODS] == [
        *("batch-runner.yaml", "engine-simulated.yaml", "engine-vllm.yaml"),
        *("nats.yaml", "router.yaml", "streams.yaml"),
    ]
    namespaces = {each.content["metadata"].get("namespace") for each in MANIFESTS}
    assert namespaces == {None, "mesh-us"}
    [namespace] = [each for each in MANIFESTS if each.kind == "Namespace"]
    assert namespace.name == "mesh-us"


def test_the_page_applies_every_file():
    applied = {Path(file).name for words in commands() for file in values(words, "-f")}
    assert applied == set(FILES) - {"engine-simulated.yaml"}  # instead of engine-vllm.yaml


@pytest.mark.parametrize("region", ["us", "eu"])
def test_files_that_containers_read_are_those_that_the_page_makes(tmp_path: Path, region: str):
    made = render(MESH_TOML, tmp_path, region)
    for pod in of_region(region):
        if pod.kind not in CONTROLLERS:
            continue
        for container in pod.containers:
            replicas = pod.content["spec"].get("replicas", 1)
            for name in (f"{pod.name}-{number}" for number in range(replicas)):
                assert_paths_are_mounted(made, pod, container, name)
    assert set(made.objects) == named_objects(of_region(region))


def named_objects(manifests: list[Manifest]) -> set[str]:
    text = "\n".join(yaml.safe_dump(each.content) for each in manifests)
    found = re.findall(r"secretName: (\S+)|configMap:\n\s+name: (\S+)", text)
    return {secret or config for secret, config in found}


def assert_paths_are_mounted(
    made: Rendered, pod: Manifest, container: dict[str, Any], name: str
) -> None:
    there: set[str] = set()
    for mount in container["volumeMounts"]:
        templates = pod.content["spec"].get("volumeClaimTemplates", ())
        if mount["name"] not in {each["metadata"]["name"] for each in templates}:
            there |= set(made.mounted(pod.pod, mount, name))
    words = " ".join(container["command"]).replace("$(POD_NAME)", name)
    read = set(re.findall(r"/(?:etc|run)/mesh/[\w./-]+", words))
    assert read <= there, (name, there)


def test_pods_are_named_as_mesh_toml_names_their_processes(rendered: Rendered):
    region = rendered.mesh.region("us")
    named = {"router": region.routers, "batch-runner": region.batch_runners, "us": region.replicas}
    for pod in PODS:
        if pod.name in named:
            pods = tuple(f"{pod.name}-{n}" for n in range(pod.content["spec"]["replicas"]))
            assert pods == named[pod.name]


def test_services_are_what_mesh_toml_says(rendered: Rendered):
    region = rendered.mesh.region("us")
    services = {each.name: each.content["spec"] for each in MANIFESTS if each.kind == "Service"}
    for address in (region.http, *region.nats, *region.monitor):
        name, namespace, _ = address.host.split(".")
        assert namespace == "mesh-us"
        assert address.port in [port["port"] for port in services[name]["ports"]]
    [leaf] = services["nats-leaf"]["ports"]
    assert (services["nats-leaf"]["type"], leaf["port"]) == ("LoadBalancer", region.leaf[0].port)
    for pod in PODS:  # what is forwarded to is what listens
        labels = pod.content["spec"]["template"]["metadata"]["labels"]
        ports = {p["name"]: p["containerPort"] for c in pod.containers for p in c.get("ports", ())}
        for service in services.values():
            if service["selector"].items() <= labels.items():
                assert {p["port"] for p in service["ports"]} <= set(ports.values())
                assert {p["targetPort"] for p in service["ports"]} <= set(ports)
    governing = {pod.content["spec"]["serviceName"] for pod in PODS if pod.kind == "StatefulSet"}
    assert governing <= set(services)


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_may_do_little(container: dict[str, Any]):
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_a_pod_is_nobody(pod: Manifest):
    context = pod.pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == 10001
    assert f"--uid {context['runAsUser']} " in (FOLDER.parent / "compose/Dockerfile").read_text()
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.pod["automountServiceAccountToken"] is False
    for volume in pod.pod["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440


def default(group: click.Group, name: str, option: str) -> float:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    [found] = [param for param in command.params if option in param.opts]
    return float(found.default)


def test_pods_have_the_time_to_drain():
    drains = {
        "router": default(mesh.cli.main.main, "router", "--drain-s"),
        "batch-runner": default(mesh.cli.main.main, "batch-runner", "--drain-s"),
        "us": default(agents.cli.main, "run", "--drain-timeout"),
    }
    for pod in PODS:
        if pod.name in drains:
            [container] = pod.pod["containers"]
            before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
            sleeps_s = float(before.get("command", [0, 0])[1])
            assert pod.pod["terminationGracePeriodSeconds"] >= drains[pod.name] + sleeps_s + 10


def test_the_volume_of_streams_holds_what_the_server_may_write(rendered: Rendered):
    [limit] = re.findall(r'"max_file_store": (\d+)', rendered.objects["nats"]["nats.conf"].decode())
    [nats] = [pod for pod in PODS if pod.name == "nats"]
    [claim] = nats.content["spec"]["volumeClaimTemplates"]
    size = re.fullmatch(r"(\d+)Gi", claim["spec"]["resources"]["requests"]["storage"])
    assert size is not None
    assert int(limit) < int(size[1]) << 30


def test_policies_open_what_listens_and_no_engine():
    policies = {
        each.name: each.content["spec"] for each in MANIFESTS if each.kind == "NetworkPolicy"
    }
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    opened = {
        port["port"]
        for policy in policies.values()
        for rule in policy.get("ingress", ())
        for port in rule["ports"]
    }
    listening = {
        port["name"] for pod in PODS for each in pod.containers for port in each.get("ports", ())
    }
    assert opened == listening
    for pod in PODS:
        for container in pod.containers:
            if container["name"] == "engine":
                assert "ports" not in container and "--host=127.0.0.1" in container["command"]
    [monitoring] = policies["monitoring"]["ingress"]
    from_monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    assert monitoring["from"] == [{"namespaceSelector": {"matchLabels": from_monitoring}}]


def test_annotations_lead_prometheus_to_a_page_that_is_served():
    pages = {}
    for pod in PODS:
        metadata = pod.content["spec"]["template"]["metadata"]
        if annotations := metadata.get("annotations"):
            ports = {p["containerPort"] for c in pod.containers for p in c.get("ports", ())}
            assert int(annotations["prometheus.io/port"]) in ports
            pages[pod.file] = annotations["prometheus.io/path"]
    assert set(pages.values()) == {"/metrics"} and len(pages) == 4


def test_budgets_let_one_pod_go_at_a_time():
    budgets = [each for each in MANIFESTS if each.kind == "PodDisruptionBudget"]
    assert {each.name for each in budgets} == {"router", "replica"}
    for each in budgets:
        assert each.content["spec"]["maxUnavailable"] == 1


def test_the_mesh_toml_of_the_manifests_has_no_mistake():
    assert set(topology.load(MESH_TOML).regions) == {"us", "eu"}
