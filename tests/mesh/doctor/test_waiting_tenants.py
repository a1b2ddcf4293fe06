"""Whom the doctor and `mesh top` name when a tenant floods a region."""

import asyncio

import pytest

from infra.tenant_table import Caller, key_hash
from infra.topology import DEFAULT_FILE, load, parse
from mesh.doctor.connectivity import logged_in, read_logins
from mesh.doctor.findings import CheckResult, RegionFindings
from mesh.doctor.observed_state import ObservedMessages, compare, listen
from mesh.doctor.waiting_tenants import WAITING_MIN, flood
from schemas.explain import OTHERS, RouterRequests, TenantWork
from schemas.subjects import INBOX_ROOT
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh
from tests.support.until import PATIENCE_S

SOME = ("acme", 200, 750), ("beta", 12, 150), ("gamma", 3, 50), ("delta", 1, 50)
ACME = "214 of 230 waiting requests, 75 % of the last minute's work; beta: 12, 15 %; gamma: 3, 5 %"


def answer(*tenants, router="r1") -> RouterRequests:
    told = tuple(TenantWork(tenant=name, waiting=w, tokens=t) for name, w, t in tenants)
    return RouterRequests(region="us", router=router, kept=9, tenants=told)


def test_the_doctor_names_the_tenant_that_floods_by_all_routers_of_the_region():
    two = {"r1": answer(*SOME), "r2": answer(("acme", 14, 0), router="r2")}
    found = RegionFindings("us")
    compare(found, load(DEFAULT_FILE), ObservedMessages(answers=two), 1.0)
    [told] = [one for one in found.findings if one.check == "tenants"]
    assert (told.about, told.verdict, told.detail) == ("acme", CheckResult.WARNING, ACME)


@pytest.mark.parametrize(
    "tenants",
    [
        (),
        (("acme", WAITING_MIN - 1, 9),),
        (("acme", 100, 9), ("beta", 100, 9)),
        (("", 500, 9),),
        (("acme", 500, 9),),
        (("acme", 9, 9), ("beta", 9, 9), (OTHERS, 400, 9)),
    ],
    ids=["of an older router", "few", "two alike", "not told apart", "no other", "many tenants"],
)
def test_nobody_is_named_where_none_floods(tenants):
    assert flood([answer(*tenants)]) is None


def test_requests_without_a_tenant_are_named_so_beside_those_with_one():
    told = flood([answer(("", 20, 0), ("acme", 0, 0))])
    assert told == ("no tenant", "20 of 20 waiting requests; acme: 0")


async def test_a_region_s_observer_hears_whose_requests_wait(tmp_path):
    text = mesh_toml(("us",), replicas=1)
    regions = NatsRegions(parse(text, "mesh.toml"), tmp_path)
    keys = {key_hash(name): Caller(name, name) for name in ("acme", "beta")}
    senders = ["acme"] * WAITING_MIN + ["beta"]
    clock = asyncio.get_running_loop().time
    try:
        await regions.start()
        async with scripted_engine() as engine, small_mesh(regions) as mesh:
            await mesh.router("us", keys=keys, policy="least-load", **PATIENT)
            await mesh.agent("us", "us-0", engine)
            await mesh.until_ready("us", 1)
            core, engine.waiting = mesh.routers["us"].core, 5
            await mesh.until(lambda: all(one.heartbeat.pending for one in core.replicas), "full")
            sent = [
                asyncio.create_task(post(mesh, chat(), authorization=f"Bearer {name}"))
                for name in senders
            ]
            await mesh.until(lambda: len(core.held) == len(senders), "all to be held")
            observer = read_logins(regions.topology, tmp_path)["us"].observer
            async with asyncio.timeout(PATIENCE_S), logged_in(observer, INBOX_ROOT, 9) as bus:
                while not (heard := await listen(bus.client, "us", clock, 0.3)).answers:
                    pass  # somebody stood still: again
            assert flood(heard.answers.values()) == ("acme", "16 of 17 waiting requests; beta: 1")
            engine.waiting = 0
            assert [(await one)[0] for one in sent] == [200] * len(sent)
    finally:
        await regions.stop()
