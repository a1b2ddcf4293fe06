"""What infra/k8s has, and what the commands of docs/install.md make for it."""

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from infra import topology
from infra.nats import bundle
from tests.support.pages import blocks

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "infra" / "k8s"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
STATE = "/var/lib/mesh"
CONTROLLERS = ("StatefulSet", "Job")


class Manifest(NamedTuple):
    """One document of one file."""

    file: str
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content["kind"])

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])

    @property
    def pod(self) -> dict[str, Any]:
        """The specification of a controller's pods."""
        pod: dict[str, Any] = self.content["spec"]["template"]["spec"]
        return pod

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.pod.get("initContainers", ()), *self.pod["containers"]]


def of_region(region: str = "us") -> list[Manifest]:
    """All manifests; for another region made from those of us, as the page says."""
    found = []
    for file in FILES:
        text = re.sub(r"\bus\b", region, (FOLDER / file).read_text())
        found += [Manifest(file, content) for content in yaml.safe_load_all(text)]
    return found


MANIFESTS = of_region()
PODS = [each for each in MANIFESTS if each.kind in CONTROLLERS]


def commands() -> Iterator[list[str]]:
    """The words of each `kubectl` on the page."""
    [page] = [block for block in blocks("sh") if "\nkubectl " in block.text]
    for line in page.text.splitlines():
        words = shlex.split(line)
        if words[0] == "kubectl":
            yield words[1:]


def values(words: list[str], option: str) -> list[str]:
    return [after for word, after in itertools.pairwise(words) if word == option]


@dataclass(frozen=True)
class Rendered:
    """A rendering of a mesh.toml, and the objects that the page makes of it."""

    mesh: topology.Topology
    objects: dict[str, dict[str, bytes]]  # Secrets and ConfigMaps: name → key → content

    def mounted(self, pod: dict[str, Any], mount: dict[str, Any], name: str) -> dict[str, bytes]:
        """Path in the container → content, of one mount of the pod of that name."""
        [volume] = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        if "emptyDir" in volume:
            return {}
        source = (
            volume["secret"]["secretName"] if "secret" in volume else volume["configMap"]["name"]
        )
        files = self.objects[source]
        if key := mount.get("subPathExpr", "").replace("$(POD_NAME)", name):
            return {mount["mountPath"]: files[key]}
        return {f"{mount['mountPath']}/{key}": content for key, content in files.items()}


def render(mesh_toml: Path, folder: Path, region: str = "us") -> Rendered:
    """Do what the page says, but for a cluster."""
    mesh = topology.load(mesh_toml)
    bundle.write(mesh, folder, state_directory=Path(STATE))
    objects = {}
    for words in commands():
        if words[0] != "create":
            continue
        name = words[2] if words[1] == "configmap" else words[3]
        files = {}
        for path in values(words, "--from-file"):
            own = re.sub(r"\bus\b", region, path)
            here = mesh_toml if own.endswith(".toml") else folder / region / own
            files[here.name] = here.read_bytes()
        objects[name] = files
    return Rendered(mesh, objects)
