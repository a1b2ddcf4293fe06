"""What the doctor says of API keys: of a region that is open, and of a stream without any."""

from collections.abc import Iterator

import pytest

from infra.topology import parse
from mesh.cli.keys import KEYS
from mesh.doctor.findings import CheckResult, RegionFindings
from mesh.doctor.observed_state import check_keys
from mesh.doctor.permission_checks import add_keys
from schemas.ids import RegionId
from schemas.keys import RegionKeys
from schemas.subjects import STREAM_KEYS
from tests.support.nats_regions import NatsRegions, mesh_toml, running_regions

US = RegionId("us")
OPEN = mesh_toml(("us",))
REQUIRED = OPEN + "[auth]\nrequired = true\n"
WITH_FILE = REQUIRED + f'[tenants.acme]\nkey_sha256 = ["{"a" * 64}"]\n'


@pytest.fixture(scope="module")
def regions(tmp_path_factory) -> Iterator[NatsRegions]:
    with running_regions(tmp_path_factory.mktemp("us"), toml=OPEN) as made:
        yield made


def test_a_region_that_others_reach_without_a_key_is_a_warning():
    for toml, warns in ((OPEN, False), (OPEN.replace("127.0.0.1", "192.0.2.1"), True),
                        (REQUIRED.replace("127.0.0.1", "192.0.2.1"), False)):  # fmt: skip
        found = RegionFindings("us")
        add_keys(found, parse(toml, "mesh.toml"))
        assert [one.verdict for one in found.findings] == [CheckResult.WARNING] * warns


async def test_a_stream_without_keys_is_told_where_keys_are_required(regions):
    observer = await regions.connect("us", "observer")
    admin, setup = await regions.connect("us", "admin"), await regions.connect("us", "setup")

    async def told(toml: str) -> list[str]:
        found = RegionFindings("us")
        await check_keys(found, parse(toml, "mesh.toml"), observer)
        return [one.detail for one in found.findings]

    assert (await told(OPEN), await told(WITH_FILE)) == ([], [])
    [why] = await told(REQUIRED)
    assert "none was made" in why
    await KEYS.write(admin, US, RegionKeys(region=US), 0)
    assert await told(REQUIRED) == []
    await setup.jetstream().delete_stream(STREAM_KEYS)
    assert await told(REQUIRED) == [], "another check finds that"
    for client in (observer, admin, setup):
        await client.close()
