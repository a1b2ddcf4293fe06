"""Residency in mesh.toml: what it means, and every mistake in a line."""

import hashlib
import re

import pytest

from infra.tenant_table import Caller, key_hash
from infra.topology import Topology, TopologyError, parse
from schemas.ids import RegionId

US, EU = RegionId("us"), RegionId("eu")
KEY = hashlib.sha256(b"sk-1").hexdigest()


def text(us: str = "", eu: str = "", tail: str = "") -> str:
    regions = "\n".join(
        f'[regions.{name}]\nhttp = "127.0.0.1:{port}"\nnats = "127.0.0.1:{port + 1}"\n'
        f'leaf = "127.0.0.1:{port + 2}"\nreplicas = 1\n{more}'
        for name, port, more in (("us", 8100, us), ("eu", 8200, eu))
    )
    return (
        f'[mesh]\nname = "two"\n{regions}\n[[links]]\nbetween = ["us", "eu"]\nrtt_ms = 80\n{tail}'
    )


def tenant(keys: str = f'["{KEY}"]', labels: str = '["eu"]', name: str = "acme") -> str:
    return f"[tenants.{name}]\nkey_sha256 = {keys}\nresidency = {labels}\n"


CARRIES = 'residency = ["eu"]'


def read(*parts: str) -> Topology:
    return parse(text(*parts), "mesh.toml")


def problems_of(*parts: str) -> list[str]:
    """The lines of the error, without their places."""
    with pytest.raises(TopologyError) as caught:
        read(*parts)
    lines = str(caught.value).splitlines()
    return [re.sub(r"^mesh\.toml:\d+:\d+: ", "mesh.toml: ", line) for line in lines]


def test_a_file_without_labels_leaves_all_open():
    mesh = read()
    assert (mesh.ground.labels, mesh.ground.confined, mesh.keys) == (set(), (), {})
    assert mesh.ground.may_send(US, EU)


def test_ground_and_keys_are_those_of_the_file():
    mesh = read("", 'residency = ["eu", "de"]\nconfined_to = ["eu"]', tenant())
    assert mesh.ground.carried_by(EU) == {"de", "eu"}
    assert mesh.ground.confined_to(EU) == {"eu"}
    assert mesh.keys == {key_hash("sk-1"): Caller(KEY[:12], "acme", residency=("eu",))}


def test_regions_that_are_not_forwarded_to_carry_no_labels():
    own = '[regions.eu.routing]\ntopology = "region-local"\n'
    mesh = read("", f"{CARRIES}\n{own}")
    assert mesh.ground.carried_by(EU) == mesh.ground_for(EU).carried_by(EU) == {"eu"}
    assert mesh.ground_for(US).carried_by(EU) == set()


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (('residency = "eu"',), 'regions.us.residency: write a list of labels, like ["eu"]'),
        (("residency = [1]",), "regions.us.residency.0: must be a text"),
        (('residency = ["EU"]',), "regions.us.residency.0: use 1 to 32"),
        (('residence = ["eu"]',), 'regions.us.residence: unknown key; did you mean "residency"?'),
        (
            (CARRIES + '\nconfined_to = ["us"]',),
            'regions.us.confined_to: the region itself does not carry "us"; add it',
        ),
        (
            ("", CARRIES, tenant(labels='["ue"]')),
            'tenants.acme.residency: no region carries "ue"; there are eu',
        ),
        (("", CARRIES, tenant(labels="[]")), "tenants.acme.residency: "),
        (("", CARRIES, tenant(keys="[]")), "tenants.acme.key_sha256: "),
        (
            ("", CARRIES, "[tenants.acme]\nkey = 1\n"),
            "tenants.acme.key: unknown key; there are",
        ),
        (
            ("", CARRIES, tenant() + tenant(name="bad")),
            "tenants.bad.key_sha256: a key of tenants.acme; remove one",
        ),
    ],
)
def test_a_mistake_is_a_line_with_its_correction(parts, line):
    assert any(problem.startswith(f"mesh.toml: {line}") for problem in problems_of(*parts)), (
        problems_of(*parts)
    )


def test_a_key_written_by_mistake_is_not_repeated():
    problem = "\n".join(problems_of("", CARRIES, tenant(keys='["sk-secret"]')))
    assert "write the key's SHA-256" in problem
    assert "sk-secret" not in problem


def test_a_list_of_wrong_items_is_not_reported_as_too_short():
    [problem] = problems_of("", CARRIES, tenant(keys='["6b4c"]'))
    assert problem.startswith("mesh.toml: tenants.acme.key_sha256.0: write the key's SHA-256")
    [problem] = problems_of("", CARRIES, tenant(keys="[]"))
    assert problem == "mesh.toml: tenants.acme.key_sha256: must have at least 1"
