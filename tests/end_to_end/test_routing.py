"""`mesh routing` on a real mesh: routers follow, report it, and go back; it is in the history."""

import os
import signal

from tests.end_to_end.test_drain import Load, load, ordered
from tests.support.mesh_up import mesh_up, write_config
from tests.support.until import PATIENCE_S, until


async def clients_are_served(clients: Load) -> None:
    before = sum(clients.served.values())
    await until(lambda: sum(clients.served.values()) > before + 3, deadline_s=PATIENCE_S)


async def wrong_words_change_nothing(routing) -> None:
    for words, problem in (
        (("set", "us", "policy=fastest"), "unknown policy 'fastest'"),
        (("set", "us", "gossip_kib_per_s=0"), "can't change in a running router"),
        (("set", "mars", "policy=mesh"), "no region 'mars'"),
        (("set", "us", "policy"), "'policy' is not KEY=VALUE"),
        (("clear", "us", "polcy"), "no order sets polcy; there are policy,"),
        (("clear", "us", "policy_by_priority.urgent"), "no order sets policy_by_priority.urgent;"),
        (("set", "hops_max=0"), "give a region first, or --all"),
    ):
        code, lines = await routing(*words)
        assert code == 2 and problem in lines[-1], lines


async def regions_do_not_wait_for_each_other(routing, folder) -> None:
    """Where a key is not set there is nothing to clear; a region without a login is named."""
    code, lines = await routing("clear", "--all", "hops_max")
    assert code == 0 and {"us: nothing changes", "eu: hops_max 0 -> 1"} < set(lines)
    admin = folder / ".mesh" / "config" / "us" / "credentials" / "admin.env"
    admin.rename(admin.with_suffix(".away"))
    code, lines = await routing("set", "--all", "hops_max=0")
    admin.with_suffix(".away").rename(admin)
    assert code == 1 and {"eu: hops_max 1 -> 0", "eu: in force at r1"} < set(lines)
    assert any(line.startswith("us: not changed: no us/credentials/admin.env") for line in lines)


async def a_class_has_a_policy_of_its_own(routing) -> None:
    name = "policy_by_priority.low"
    for words, change in (
        (("set", "us", f"{name}=least-load"), f"{name} unset -> least-load"),
        (("clear", "us", name), f"{name} least-load -> unset"),
    ):
        assert await routing(*words) == (0, [f"us: {change}", "us: in force at r1"])


async def test_routing_is_set_shown_and_cleared_under_load_without_one_failed_request(tmp_path):
    config = write_config(tmp_path, regions=("us", "eu"), replicas={"us": 2, "eu": 1})
    async with mesh_up(tmp_path, config=config) as mesh, load(mesh, clients=2) as clients:

        async def routing(*words):
            code, said = await ordered(tmp_path, "routing", *words)
            return code, said.splitlines()

        await clients_are_served(clients)
        said = await routing(
            "set", "us", "policy=e2:60", "pushing=outstanding:8", "--reason", "why"
        )
        change = "policy mesh -> e2:60, pushing pending -> outstanding:8"
        assert said == (0, [f"us: {change}", "us: in force at r1"])
        code, lines = await routing("set", "--all", "hops_max=0")
        assert code == 0
        assert sorted(lines) == [
            "eu: hops_max 1 -> 0",
            "eu: in force at r1",
            "us: hops_max 1 -> 0",
            "us: in force at r1",
        ]
        code, lines = await routing("show")
        assert code == 0 and len(lines) == 2
        shown = "us/r1: policy=e2:60, pushing=outstanding:8, hops_max=0"
        assert lines[0].startswith(shown)
        assert lines[0].endswith("; by order: policy, pushing, hops_max")
        assert "eu/r1: policy=mesh," in lines[1]

        await a_class_has_a_policy_of_its_own(routing)
        # A router that starts later follows too; one that stands still is named.
        router = mesh.record["processes"]["router-us-r1"]
        os.kill(router, signal.SIGSTOP)
        try:
            code, lines = await routing("show", "--within-s", "2")
            assert code == 1 and lines[0] == "us: r1: no answer within 2 s" and len(lines) == 2
            code, lines = await routing("clear", "us", "policy", "--within-s", "2")
        finally:
            os.kill(router, signal.SIGCONT)
        assert code == 1
        assert lines[0] == "us: policy e2:60 -> mesh"
        assert lines[1].startswith("us: r1 did not report order 5 within 2 s")
        assert await routing("clear", "us") == (
            0,
            ["us: pushing outstanding:8 -> pending, hops_max 0 -> 1", "us: in force at r1"],
        )
        await regions_do_not_wait_for_each_other(routing, tmp_path)
        await clients_are_served(clients)
        assert clients.failed == []

        # What is not set is cleared already: no record says so.
        for words in (("us",), ("us", "policy"), ("us", "queue_delay_s_max"), ("us", "hold_order")):
            said = await routing("clear", *words)
            assert said == (0, ["us: nothing changes", "us: in force at r1"])

        await wrong_words_change_nothing(routing)
        code, said = await ordered(tmp_path, "changes", "us")
        lines = said.splitlines()
        assert code == 0 and len(lines) == 7
        assert "routing set region us: policy mesh -> e2:60, pushing" in lines[-1]
        assert lines[-1].endswith("why")
        assert "routing clear region us: pushing outstanding:8 -> pending" in lines[1]
