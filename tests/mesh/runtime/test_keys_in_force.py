"""Keys that operators made on the bus: in force in all regions, also when their store is lost."""

import asyncio
import time
from types import SimpleNamespace

import orjson
import pytest
from click.testing import CliRunner

from infra.auth_table import AuthTable
from mesh.cli.keys import id_of
from mesh.cli.main import main
from mesh.cli.unusable import Unusable
from mesh.runtime.keys_in_force import KeysInForce
from schemas import subjects
from schemas.keys import KeyRecord, RegionKeys, Scope, encode_keys
from tests.support.nats_regions import mesh_toml, running_regions
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, client, post, small_mesh

REGIONS = ("us", "eu", "ap")
SOON_S = 2.0  # what is promised; a machine that is busy may take longer
AT_MOST_S = 20.0


def key(name: str, **fields) -> KeyRecord:
    made = {"sha256": name * 64, "tenant": "acme", "scopes": (Scope.INFERENCE,)}
    return KeyRecord(id=name, **made | {"created_at_unix_s": 1.0} | fields)


def record(*keys: KeyRecord) -> bytes:
    return encode_keys(RegionKeys(region="us", keys=keys))


def test_a_lost_store_neither_opens_nor_closes_the_door(caplog):
    known = []
    keys = KeysInForce("us", known.append, lambda: 50.0)
    keys.read(3, record(key("a"), key("b", revoked_at_unix_s=9.0)))
    for seq, data in ((0, b""), (1, record(key("b"))), (1, b"{"), (2, record(key("c")))):
        keys.read(seq, data)
        assert {one.id for one in known[-1] if one.ends_at_unix_s > 50.0} >= {"a"}
        assert [one.revoked_at_unix_s for one in known[-1] if one.id == "b"] == [9.0]
        assert keys.is_lost and "mesh keys sync" in keys.problem
    assert caplog.text.count("the stream of API keys lacks some") == 1
    keys.read(3, record(key("a"), key("c")))
    assert not keys.is_lost and len(known[-1]) == 3


def test_only_the_stream_tells_of_keys():
    keys = KeysInForce("us", lambda keys: None)
    place = {"Nats-Stream": subjects.STREAM_KEYS, "Nats-Subject": subjects.keys("us")}
    for headers in (None, {}, place | {"Nats-Stream": "LEASES"}, place | {"Nats-Subject": "x"}):
        keys.receive(SimpleNamespace(headers=headers, data=record(key("a")), subject="s"))
        assert not keys.is_read
    keys.receive(SimpleNamespace(headers=place, data=record(key("a")), subject="s"))
    assert keys.is_read


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    toml = mesh_toml(REGIONS) + "\n[auth]\nrequired = true\n"
    directory = tmp_path_factory.mktemp("keys")
    with running_regions(directory, toml=toml) as made:
        (made.directory / "mesh.toml").write_text(toml)
        yield made


@pytest.fixture
async def mesh(regions):
    async with small_mesh(regions) as made:
        for region in REGIONS:
            await made.router(region, auth=AuthTable(required=True), **PATIENT)
            keys = made.routers[region].requests.keys
            await made.until(lambda keys=keys: keys.is_read, "the keys")
        yield made


async def keys_command(regions, *words: str):
    """`mesh keys`, as an operator types it."""
    where = ["--config", regions.directory / "mesh.toml", "--credentials", regions.directory]
    return await asyncio.to_thread(CliRunner().invoke, main, ["keys", *words, *map(str, where)])


async def models(mesh, region: str, secret: str) -> str:
    headers = {"authorization": f"Bearer {secret}"}
    url = mesh.urls[region] + "/v1/models"
    async with client() as session, session.get(url, headers=headers) as answer:
        error = orjson.loads(await answer.read()).get("error") or {}
        return error.get("code", "ok")


async def until_all_say(mesh, secret: str, code: str) -> float:
    """How long it took, in seconds."""
    began = time.monotonic()
    async with asyncio.timeout(AT_MOST_S):
        for region in REGIONS:
            while await models(mesh, region, secret) != code:
                await asyncio.sleep(0.01)
    return time.monotonic() - began


KNOWN = "no_replica"  # such a mesh has no engine: who gets so far was let in


async def test_a_key_is_in_force_everywhere_at_once_and_gone_as_soon(mesh, regions):
    made = await keys_command(regions, "create", "--tenant", "acme", "--reason", "a test")
    assert made.exit_code == 0, made.output
    secret, name = made.stdout.strip(), made.stderr.split()[0]
    assert secret.startswith("mesh-") and len(secret) == 48
    await until_all_say(mesh, secret, KNOWN)
    rotated = await keys_command(regions, "rotate", name[:8], "--overlap-s", "600")
    fresh, its_name = rotated.stdout.strip(), rotated.stderr.split()[-12:]
    assert rotated.exit_code == 0 and fresh != secret, its_name
    for each in (secret, fresh):
        await until_all_say(mesh, each, KNOWN)
    revoked = await keys_command(regions, "revoke", name[:8])
    assert (revoked.exit_code, revoked.stdout) == (0, f"{name}: revoked\n"), revoked.output
    took_s = await until_all_say(mesh, secret, "invalid_api_key")
    print(f"revoked in {len(REGIONS)} regions {took_s:.3f} s after the command")
    await until_all_say(mesh, fresh, KNOWN)
    limited = ("--limit", "requests_per_minute=60", "--limit", "priority_max=low")
    assert (await keys_command(regions, "create", "--tenant", "acme", *limited)).exit_code == 0
    for wrong in ("requests=1", "requests_per_minute=-1", "priority_max=urgent", "requests"):
        assert (
            await keys_command(regions, "create", "--tenant", "acme", "--limit", wrong)
        ).exit_code
    listed = await keys_command(regions, "list")
    assert "priority_max=low requests_per_minute=60" in listed.stdout
    assert "revoked" in listed.stdout and secret not in listed.output
    told = await keys_command(regions, "history")
    assert f"create {name} for acme" in told.stdout and "a test" in told.stdout
    assert f"rotate {name} to" in told.stdout and f"revoke {name} " in told.stdout


async def test_a_key_for_one_region_is_refused_in_others_with_its_reason(mesh, regions):
    made = await keys_command(regions, "create", "--tenant", "acme", "--origin", "us")
    secret = made.stdout.strip()
    async with asyncio.timeout(AT_MOST_S):
        while await models(mesh, "us", secret) != KNOWN:
            await asyncio.sleep(0.01)
        while await models(mesh, "eu", secret) != "key_not_allowed":
            await asyncio.sleep(0.01)


async def test_an_emptied_stream_locks_nobody_out_and_sync_fills_it(mesh, regions):
    secret = (await keys_command(regions, "create", "--tenant", "acme")).stdout.strip()
    await until_all_say(mesh, secret, KNOWN)
    setup = await regions.connect("us", "setup")
    await setup.jetstream().delete_stream(subjects.STREAM_KEYS)
    await setup.close()
    await regions.set_up("us")
    keys = mesh.routers["us"].requests.keys
    mesh.routers["us"]._bus._returned.set()  # read again now, not in half a minute
    await mesh.until(lambda: keys.is_lost, "the loss to be noticed")
    assert await models(mesh, "us", secret) == KNOWN
    async with client() as session, session.get(mesh.urls["us"] + "/ready") as answer:
        assert answer.status == 503  # without an engine, and its readiness tells more
    assert "mesh keys sync" in mesh.routers["us"].requests.readiness().problem
    assert (await keys_command(regions, "sync")).exit_code == 0
    await mesh.until(lambda: not keys.is_lost, "the stream to have them again")


async def test_where_a_region_is_away_the_command_says_so_and_sync_completes_it(mesh, regions):
    await regions.stop_one("ap")
    try:
        made = await keys_command(regions, "create", "--tenant", "acme")
        secret = made.stdout.strip()
        assert made.exit_code == 1 and "ap: not reached, not known there until" in made.stderr
    finally:
        await regions.start_one("ap")
    async with asyncio.timeout(AT_MOST_S):
        while (await keys_command(regions, "sync")).exit_code:
            await asyncio.sleep(0.1)
    await until_all_say(mesh, secret, KNOWN)


def test_an_id_may_be_given_by_how_it_begins():
    ids = ("4f0c1d22ab97", "4f0c1d33ab97", "77aa00000000", "77aa")
    for given, found in (("4f0c1d2", ids[0]), ("77aa", "77aa"), ("77aa0", ids[2]), ("77a", None),
                         ("", None), ("4f0d", None), ("4f0c1d22ab970", None)):  # fmt: skip
        assert id_of(ids, given) == found
    with pytest.raises(Unusable, match="begin so: 4f0c1d22ab97, 4f0c1d33ab97"):
        id_of(ids, "4f0c")


async def test_mistakes_of_operators_are_told(regions):
    for words, says in (
        (("create", "--tenant", "A b"), "--tenant"),
        (("create", "--tenant", "acme", "--origin", "mars"), "no region 'mars'"),
        (("create", "--tenant", "acme", "--scope", "batch", "--model", "m"), "any model"),
        (
            ("create", "--tenant", "acme", "--limit", "tokens_per_day"),
            "as NAME=VALUE; there are req",
        ),
        (("revoke", "nothing"), "no key 'nothing'; `mesh keys list`"),
        (("revoke", "43d"), "no key '43d'; give 4 characters of an id at least; `mesh"),
        (("rotate", "nothing"), "no key 'nothing'"),
    ):
        found = await keys_command(regions, *words)
        assert found.exit_code == 2 and says in found.output, words


@pytest.mark.parametrize("name", ["create", "revoke", "rotate"])
def test_the_help_names_the_command_that_shows_a_reason(name):
    told = CliRunner().invoke(main, ["keys", name, "--help"])
    assert "`mesh keys history` shows" in " ".join(told.output.split())


async def test_a_router_that_has_read_no_keys_takes_none_and_says_so(regions):
    """It starts while its stream is not there, which is made then."""
    setup = await regions.connect("eu", "setup")
    await setup.jetstream().delete_stream(subjects.STREAM_KEYS)
    await setup.close()
    async with small_mesh(regions) as mesh:
        await mesh.router("eu", auth=AuthTable(required=True), **PATIENT)
        requests = mesh.routers["eu"].requests
        await mesh.until(
            lambda: mesh.sample("eu", "mesh_stream_altered", stream="KEYS") == 1.0, "a look at it"
        )
        status, body, headers = await post(mesh, chat(), "eu", authorization="Bearer mesh-x")
        assert (status, orjson.loads(body)["error"]["code"]) == (503, "api_keys_unread")
        assert int(headers["retry-after"]) >= 1
        async with client() as session, session.get(mesh.urls["eu"] + "/ready") as answer:
            told = orjson.loads(await answer.read())["error"]
        assert (answer.status, told["code"]) == (503, "api_keys_unread")
        assert "mesh infra streams" in told["message"]
        await regions.set_up("eu")
        await mesh.until(lambda: requests.keys.is_read, "the stream that was made")
        status, body, _ = await post(mesh, chat(), "eu", authorization="Bearer mesh-x")
        assert (status, orjson.loads(body)["error"]["code"]) == (401, "invalid_api_key")


async def test_a_key_for_a_model_that_nobody_serves_is_made_with_a_warning(mesh, regions):
    """The last one here: these regions know a replica from now on."""
    async with scripted_engine() as engine:
        await mesh.agent("us", "us-0", engine)
        await mesh.until_ready("us", 1)
        made = await keys_command(regions, "create", "--tenant", "acme", "--model", "tinny")
    warning = made.stderr.splitlines()[0]
    assert warning.startswith(
        "warning: no replica serves the model 'tinny' now (served: tiny; did "
    )
    assert made.exit_code == 0 and warning.endswith("; the key is made all the same")
