"""A fleet of the last release becomes one of this version, process by process, under load.

Every mix of versions that an operator may have on the way meets clients' streams and plain
requests, in all regions. None may be lost or broken; SIGTERM ends a process, as systemd sends it.
"""

import itertools
import re
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.upgrade.fleet import ROUTERS, Fleet, Version
from tests.upgrade.rolling import Rolling, regions_of

pytestmark = [pytest.mark.upgrade, pytest.mark.timeout(900)]

COMPLAINT = re.compile(r"Traceback|\bERROR\b|\bCRITICAL\b|^\w*Error:")
# Routers of 0.1.0 don't know why heartbeats are no longer synced to the disk. CHANGELOG says so.
EXPECTED = re.compile(r"stream HEARTBEATS of \w+ is not as it was made: persist_mode is \"async\";")


async def test_a_fleet_is_upgraded_under_load_and_no_request_is_lost(
    tmp_path: Path, last: Version, new: Version
):
    assert last.number != new.number
    async with Fleet(tmp_path, last, new) as fleet:
        await fleet.start(last)
        mesh = Rolling(fleet, await model_of(fleet))
        async with mesh.load():
            await mesh.meet(f"all is {last.number}")
            await shows(fleet, dict.fromkeys(ROUTERS, last))
            await servers_and_streams(mesh)
            await eu_routers_first(mesh)
            await us_runner_and_agents_first(mesh)
            await ap_while_adopted(mesh)
            await shows(fleet, dict.fromkeys(ROUTERS, new))
            await back_and_forth(mesh)
            assert await mesh.job_problems() == []
            for router in fleet.http:
                await mesh.note_dropped(fleet[router])
        mesh.account("the end")
        for mix in mesh.mixes:
            print(f"{mix.at_s:5.1f} s, {mix.requests:3}, {mix.forwarded:3} abroad: {mix.name}")
        print(f"{len(mesh.requests)} requests, {mesh.turned_away} of them were turned away first")
        assert mesh.problems == []
        assert "\n".join(complaints(fleet)) == ""


async def servers_and_streams(mesh: Rolling) -> None:
    """Rendered anew: a reload, which a server of before refuses, changes nothing; restarted in all
    regions; then the streams, of which one is new."""
    fleet, new = mesh.fleet, mesh.fleet.new
    await fleet.render(new)
    fleet.reload_nats("us")
    await mesh.meet("nats-us is reloaded")
    for region in ("us", "eu", "ap"):
        await fleet.change(fleet[f"nats-{region}"], new)
        await mesh.meet(f"nats-{region} is restarted")
    await fleet.make_streams(new)
    await mesh.meet("streams are made again")


async def eu_routers_first(mesh: Rolling) -> None:
    """New routers over old agents, beside an old one, peers of old ones; then old ones adopt."""
    fleet, last, new = mesh.fleet, mesh.fleet.last, mesh.fleet.new
    await mesh.change("router-eu-r1", new)
    await siblings_share(mesh, "eu", "r2", "r1")
    await peers_share(mesh, "router-us-r1")
    await peers_share(mesh, "router-eu-r1")
    await works_from_here(mesh)
    await mesh.change("router-eu-r2", new)
    await drained(mesh, "eu", "new routers, old agents, old peers")
    await mesh.change("agent-eu-0", new)
    await mesh.change("agent-eu-1", new)
    await shows(fleet, {"us": last, "eu": new, "ap": last})
    await adopted(mesh, "eu", new)


async def us_runner_and_agents_first(mesh: Rolling) -> None:
    """The batch runner in the middle of a job, then old routers over new agents."""
    fleet, last, new = mesh.fleet, mesh.fleet.last, mesh.fleet.new
    await mesh.submit_job()
    await mesh.until(mesh.job_progress, "a line of the job is answered")
    await mesh.change("batch-runner-us-batch-0", new)
    await mesh.change("agent-us-0", new)
    done = await mesh.job_progress()
    assert 0 < done < 1, f"{done:.0%} of the job is done: nothing of it spans the upgrade"
    await works_from_here(mesh)
    await mesh.change("agent-us-1", new)
    await drained(mesh, "us", "old routers, new agents")
    await mesh.change("router-us-r2", new)
    await siblings_share(mesh, "us", "r1", "r2")
    await mesh.change("router-us-r1", new)
    await shows(fleet, {"us": new, "eu": new, "ap": last})


async def ap_while_adopted(mesh: Rolling) -> None:
    """The last region: its old replica is drained, adopted and handed back by new routers."""
    new = mesh.fleet.new
    await peers_share(mesh, "router-ap-r1")
    await drained(mesh, "ap", "an old region among new ones")
    await works_from_here(mesh)
    await adopted(mesh, "ap", new)
    await mesh.change("batch-runner-ap-batch-0", new)
    await mesh.change("agent-ap-0", new)


async def back_and_forth(mesh: Rolling) -> None:
    """One router, one agent and the runner become the last release again, and this one."""
    for name in ("router-us-r2", "agent-eu-0", "batch-runner-ap-batch-0"):
        await mesh.change(name, mesh.fleet.last)
        await mesh.change(name, mesh.fleet.new)


async def siblings_share(mesh: Rolling, region: str, one: str, other: str) -> None:
    """What either places, the other knows of: the same replica for the same prompt."""
    for placing, asking in itertools.permutations(f"router-{region}-{n}" for n in (one, other)):
        text = f"{placing} for {asking} " * 100
        receipt = await mesh.ask(placing, text, label=region)
        await mesh.until(
            partial(mesh.knows, asking, text, receipt["replica"], label=region),
            f"{asking} knows what {placing} placed",
        )


async def peers_share(mesh: Rolling, placing: str) -> None:
    """Whichever region serves a prompt, all routers of others know that it holds it."""
    text = f"{placing} {len(mesh.requests)} " * 100
    receipt = await mesh.ask(placing, text)
    region = receipt["peer"] or receipt["region"]
    for asking in mesh.fleet.http:
        if mesh.fleet[asking].region != region:
            await mesh.until(
                partial(mesh.knows, asking, text, region), f"{asking} knows what {region} holds"
            )


async def drained(mesh: Rolling, region: str, mix: str) -> None:
    """A region that an operator drains by the new command forwards all; then it serves again."""
    fleet = mesh.fleet
    await fleet.command(fleet.new, "drain", region, "--credentials", fleet.rendered)
    since = len(mesh.requests)
    await mesh.meet(f"{region} is drained: {mix}")
    here = regions_of(mesh.requests[since:])
    assert any(asked == region != by for asked, by in here), here
    assert (region, region) not in regions_of(mesh.requests[-4:]), here
    await fleet.command(fleet.new, "undrain", region, "--credentials", fleet.rendered)
    router = f"router-{region}-r1"
    await mesh.until(partial(mesh.serves, router, region), f"{region} serves again")
    mesh.account(f"{region} takes work again")


async def adopted(mesh: Rolling, region: str, version: Version) -> None:
    """Its routers end, a peer adopts its replicas; its routers come back and own them again."""
    fleet = mesh.fleet
    routers = [name for name in fleet.http if fleet[name].region == region]
    others = [name for name in fleet.http if name not in routers]
    for name in routers:
        await mesh.stop(name)

    async def owned(routers: list[str]) -> bool:
        return any([await mesh.metric(r, "mesh_region_owned", of=region) for r in routers])

    await mesh.until(lambda: owned(others), f"{region} is adopted")

    async def serves_others() -> bool:
        return any([await mesh.serves(router, region) for router in others])

    await mesh.until(serves_others, f"replicas of {region} serve others")
    await mesh.meet(f"{region} is adopted")
    for name in routers:
        await fleet.launch(fleet[name], version)
    await mesh.until(lambda: owned(routers), f"{region} owns its replicas")
    await mesh.meet(f"{region} has been handed back to {version.number}")


async def works_from_here(mesh: Rolling) -> None:
    """The operator's commands of this version, over what runs now."""
    fleet = mesh.fleet
    where = ("--credentials", fleet.rendered)
    for router in ("router-us-r1", "router-ap-r1"):
        name = f"from-{router}-{len(mesh.requests)}"
        await mesh.ask(router, "why?", request_id=name)
        assert name in await fleet.command(fleet.new, "explain", name, *where)
    shown = await fleet.command(fleet.new, "top", "--once", *where)
    assert all(f"{region}-0" in shown for region in ROUTERS), shown
    await fleet.command(fleet.new, "doctor", *where)
    mesh.account("explain, top and doctor")


async def shows(fleet: Fleet, versions: dict[str, Version]) -> None:
    """Which version the processes of each region are, as they show it on the bus."""
    for region, version in versions.items():
        found = await fleet.versions_on_the_bus(region)
        assert set(found.values()) == {version.number} and len(found) > 1, found


def complaints(fleet: Fleet) -> list[str]:
    """Lines of logs that an operator would ask about."""
    return [
        f"{name}: {line}"
        for name, line in fleet.log_lines()
        if COMPLAINT.search(line) and not EXPECTED.search(line)
    ]


async def model_of(fleet: Fleet) -> str:
    url = f"http://{fleet.http['router-us-r1']}/v1/models"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        models = (await answer.json())["data"]
    return str(models[0]["id"])
