"""What `mesh top` makes of messages and the time: states, ages, sums, limits."""

from dataclasses import replace

import pytest

from mesh.top.fleet import REPLICAS_MAX, REQUESTS_MAX, ROUTERS_MAX, Fleet, percentile
from mesh.top.rows import STALE_S, Level, level
from schemas.control import RegionControl
from schemas.explain import RequestFlow, RequestLife, RouterRequests, TenantWork
from schemas.state import Digest, EngineResults, Heartbeat, Lease, OfflineState, ReplicaState

REGIONS = {"us": ("us-0", "us-1"), "eu": ("eu-0",)}


def beat(replica="us-0", **values) -> Heartbeat:
    values = {
        "state": ReplicaState.READY, "full": False, "pending": 1, "running": 2, "outstanding": 3,
        "engine": "vllm", "models": ("m",), "epoch": 1, "seq": 1, **values,
    }  # fmt: skip
    return Heartbeat(region=replica.split("-")[0], replica=replica, **values)


def digest(region="us", router="r1", seq=1, **values) -> Digest:
    values = {
        "accepting": True, "replicas_ready": 2, "replicas_free": 1, "queue": 4, "models": {},
        "requests_per_s": 5.0, "epoch": 1, **values,
    }  # fmt: skip
    return Digest(region=region, router=router, seq=seq, **values)


def life(request, at=100.0, **values) -> RequestLife:
    values = {"route": "/v1/chat/completions", "outcome": "ok", "status": 200, **values}
    return RequestLife(
        request=request, region="us", router="r1", arrived_at=at, started_at=at + 0.25,
        ended_at=at + 2.0, served_by_region="us", served_by_replica="us-0", **values,
    )  # fmt: skip


def answer(router="r1", *requests, flows=(), region="us", counted_s=60.0) -> RouterRequests:
    return RouterRequests(
        region=region, router=router, kept=9, requests=requests, flows=flows, counted_s=counted_s
    )


def watched(*logins: str) -> Fleet:
    fleet = Fleet(REGIONS, logins)
    for name in logins:
        fleet.connected(name, 0.0)
    return fleet


def region(fleet, name="us", now=1.0):
    return next(row for row in fleet.frame(now).regions if row.region == name)


def replicas(fleet, now):
    return {row.replica: row for row in fleet.frame(now).replicas}


def test_before_any_message_all_is_unknown_and_then_silent():
    fleet = watched("us", "eu")
    assert {row.state for row in replicas(fleet, 1.0).values()} == {"unknown"}
    assert region(fleet).state == "unknown"
    assert {row.state for row in replicas(fleet, STALE_S + 1).values()} == {"silent"}
    row = region(fleet, now=STALE_S + 1)
    assert (row.state, row.ready, row.pending, row.requests_per_s) == ("silent", 0, None, None)


def test_a_region_sums_its_replicas_and_routers():
    fleet = watched("us", "eu")
    fleet.heartbeat(beat("us-0", kv_used_ratio=0.2, prefix_hit_ratio=0.5), 1.0)
    fleet.heartbeat(beat("us-1", pending=None, kv_used_ratio=0.4), 1.0)
    fleet.digest(digest(router="r1", rtt_s={"eu": 0.08, "elsewhere": 1.0}), 1.0)
    fleet.digest(digest(router="r2"), 1.0)
    fleet.offline(
        OfflineState(
            region="us", router="b1", epoch=1, seq=1, accepting=True, models={}, jobs=1,
            lines_waiting=7, lines_running=2,
        ),
        1.0,
    )  # fmt: skip
    row = region(fleet, now=1.5)
    assert (row.ready, row.replicas, row.pending, row.running, row.held) == (2, 2, 1, 4, 8)
    assert (row.requests_per_s, row.rtt_s, row.batch_lines) == (10.0, {"eu": 0.08}, 9)
    assert (row.kv_used_ratio, row.prefix_hit_ratio) == (pytest.approx(0.3), 0.5)
    assert (row.bus, row.state, row.age_s) == ("connected", "serving", 0.5)
    fleet.digest(digest(router="r1", seq=2), 1.6)  # round trips come once a second
    assert region(fleet, now=1.7).rtt_s == {"eu": 0.08}


def test_a_silent_replica_counts_no_more():
    fleet = watched("us")
    fleet.heartbeat(beat("us-0"), 1.0)
    fleet.heartbeat(beat("us-1"), 5.0)
    rows = replicas(fleet, 5.0)
    assert (rows["us-0"].state, rows["us-0"].age_s, rows["us-0"].pending) == ("silent", 4.0, None)
    assert (region(fleet, now=5.0).ready, region(fleet, now=5.0).running) == (1, 2)


def test_before_its_first_connection_succeeds_or_fails_a_bus_is_connecting_without_alarm():
    fleet = Fleet(REGIONS, ("us", "eu"))
    frame = fleet.frame(0.0)
    assert frame.notes == ()
    assert [(row.bus, row.state, level(row)) for row in frame.regions] == [
        ("connecting", "connecting", Level.OLD)
    ] * 2
    assert {(row.state, level(row)) for row in frame.replicas} == {("connecting", Level.OLD)}
    assert region(fleet).ready in (0, None)
    fleet.disconnected("us", "no bus at x")
    fleet.connected("eu", 1.0)
    away, there = region(fleet, "us"), region(fleet, "eu")
    assert (away.bus, away.state, level(away)) == ("away", "unknown", Level.BAD)
    assert (there.bus, there.state, level(there)) == ("connected", "unknown", Level.WARNING)
    assert fleet.frame(1.0).notes == ("us: its bus is away: no bus at x",)


def test_the_speed_of_answers_is_that_of_replicas_that_run_some():
    fleet = watched("us")
    fast = {"decode_tokens_per_s": 40.0}
    fleet.heartbeat(beat("us-0", **fast, running=1, outstanding=0), 1.0)
    fleet.heartbeat(beat("us-1", **fast, running=0, outstanding=0), 1.0)
    fleet.heartbeat(beat("eu-0", **fast, running=None, outstanding=2), 1.0)
    shown = {name: row.decode_tokens_per_s for name, row in replicas(fleet, 1.0).items()}
    assert shown == {"us-0": 40.0, "us-1": None, "eu-0": 40.0}


def test_while_a_bus_is_away_the_last_state_stays_with_its_age():
    fleet = watched("us", "eu")
    fleet.heartbeat(beat("us-0"), 1.0)
    fleet.digest(digest(), 1.0)
    fleet.disconnected("us", "no bus at x")
    row, replica = region(fleet, now=9.0), replicas(fleet, 9.0)["us-0"]
    assert (row.bus, row.why_away, row.age_s) == ("away", "no bus at x", 8.0)
    assert row.state == "silent"  # eu's bus would bring its digests
    assert (replica.state, replica.age_s, replica.pending) == ("ready", 8.0, 1)
    assert fleet.frame(9.0).notes == ("us: its bus is away: no bus at x",)
    fleet.disconnected("eu", "gone too")
    assert (region(fleet, now=9.0).state, region(fleet, now=9.0).held) == ("serving", 4)
    fleet.connected("us", 9.5)
    assert replicas(fleet, 10.0)["us-0"].state == "ready"  # it has not had time to be silent
    assert replicas(fleet, 12.0)["us-0"].state == "silent"
    assert fleet.frame(12.0).notes == ("eu: its bus is away: gone too",)


def test_a_region_without_credentials_is_shown_by_its_digest():
    fleet = watched("us")
    fleet.digest(digest("eu", kv_used_ratio=0.7), 1.0)
    row = region(fleet, "eu")
    assert (row.bus, row.state, row.ready, row.held) == ("none", "serving", 2, 4)
    assert (row.kv_used_ratio, row.pending) == (0.7, None)
    assert replicas(fleet, 9.0)["eu-0"].state == "unknown"


def test_a_region_does_not_serve_while_no_replica_of_any_region_is_ready():
    fleet = watched("us")
    fleet.digest(digest(replicas_ready=0, queue=7), 1.0)
    row = region(fleet)
    assert (row.state, row.held, level(row)) == ("no replica", 7, Level.BAD)
    fleet.digest(digest("eu", replicas_ready=1), 1.0)  # which answers for it
    assert region(fleet).state == "serving"
    fleet.digest(digest(seq=2, replicas_ready=0, accepting=False), 1.0)
    assert region(fleet).state == "draining"


def test_drained_draining_and_down():
    fleet = watched("us")
    orders = RegionControl(region="us", drained=("us-0",), by="ann@host", reason="new fan",
                           command="drain replica us-0")  # fmt: skip
    fleet.heartbeat(beat("us-0", state=ReplicaState.DRAINING), 1.0)
    assert replicas(fleet, 1.0)["us-0"].state == "draining"
    fleet.orders(orders)
    assert replicas(fleet, 1.0)["us-0"].state == "draining"  # it still has three requests
    fleet.heartbeat(beat("us-0", state=ReplicaState.DRAINING, outstanding=0), 1.1)
    assert replicas(fleet, 1.2)["us-0"].state == "drained"
    lines = list(fleet.replica_lines("us", "us-0", 1.2))
    assert lines[:2] == [
        "replica us-0 of us: drained",
        "drained by ann@host (`drain replica us-0`): new fan",
    ]
    assert any(line.split() == ["pending", "1"] for line in lines)
    fleet.heartbeat(beat("us-1", state=ReplicaState.DOWN, down_reason="hung"), 1.0)
    assert replicas(fleet, 1.0)["us-1"].state == "down: hung"
    fleet.digest(digest(), 1.0)
    fleet.orders(replace(orders, all_drained=True))
    assert region(fleet).state == "drained"
    assert list(fleet.replica_lines("eu", "eu-0", 1.0))[-1] == "no heartbeat was received"


def test_a_replica_whose_engine_fails_its_requests_is_failing_and_says_how():
    fleet = watched("us", "eu")
    failing = EngineResults(failed=9, of=10, in_a_row=2, what="HTTP 500")
    some = EngineResults(failed=2, of=40, in_a_row=1, what="no connection")
    fleet.heartbeat(beat("us-0", results=failing), 1.0)
    fleet.heartbeat(beat("us-1", results=some), 1.0)
    rows = replicas(fleet, 1.0)
    assert (rows["us-0"].state, level(rows["us-0"])) == ("failing: HTTP 500", Level.BAD)
    assert (rows["us-1"].state, level(rows["us-1"])) == ("ready", Level.GOOD)
    for name, words in (
        ("us-0", "failed 9 of its last 10 requests, HTTP 500"),
        ("us-1", "failed 2 of its last 40 requests, no connection"),
    ):
        assert dict(fleet.heartbeat_fields("us", name))["results"] == words
    fleet.heartbeat(beat("us-0", state=ReplicaState.DRAINING, results=failing), 1.1)
    assert replicas(fleet, 1.1)["us-0"].state == "draining"
    down = beat("us-0", state=ReplicaState.DOWN, down_reason="hung", results=failing)
    fleet.heartbeat(down, 1.2)
    assert replicas(fleet, 1.2)["us-0"].state == "down: hung"


def test_a_replica_that_a_router_avoids_is_slow_or_failing_and_says_why():
    fleet = watched("us", "eu")
    why = "slow: tokens 7.0× its like"
    fleet.heartbeat(beat("us-0"), 1.0)
    fleet.digest(digest("us", avoided={"us-0": why}), 1.0)
    assert replicas(fleet, 1.0)["us-0"].state == why
    fleet.digest(digest("us", seq=2), 1.1)
    assert replicas(fleet, 1.1)["us-0"].state == "ready"


def test_a_region_whose_routing_is_ordered_has_a_note():
    fleet = watched("us", "eu")
    fleet.orders(RegionControl(region="us", routing={"policy": "e2:60", "hops_max": 0}))
    fleet.orders(RegionControl(region="eu", drained=("eu-0",)))
    note = "us: routing by order: policy e2:60, hops_max 0; `mesh changes us` has whose"
    assert fleet.frame(1.0).notes == (note,)


def test_a_peer_that_fails_what_is_forwarded_there_has_a_note():
    fleet = watched("us", "eu")
    why = "failing: 3 of its last 3, HTTP 500"
    fleet.digest(digest("us", avoided_peers={"eu": why, "stranger": why}), 1.0)
    assert fleet.frame(1.0).notes == (f"us: forwards little to eu: {why}",)
    fleet.digest(digest("us", seq=2), 1.1)
    assert fleet.frame(1.1).notes == ()


def test_a_tenant_that_floods_the_mesh_has_a_note_while_routers_say_so():
    fleet = watched("us", "eu")
    told = TenantWork(tenant="acme", waiting=9, tokens=30), TenantWork(tenant="beta", tokens=10)
    for name in ("us", "eu"):
        fleet.answer(replace(answer(), region=name, tenants=told), 1.0)
    note = (
        "the tenant acme has 18 of 18 waiting requests (eu 9, us 9), 75 % of the last minute's work"
    )
    assert fleet.frame(1.5).notes == (f"{note}; beta: 0, 25 %",)
    assert fleet.frame(1.0 + 10 * STALE_S).notes == ()


def test_who_has_adopted_a_region():
    fleet = watched("us", "eu")
    fleet.digest(digest("eu", adopted={"us": 3}), 5.0)
    assert region(fleet, now=5.5).state == "adopted by eu"
    lease = Lease(region="us", owner="eu", router="r1", term=3, lease_s=2.0)
    other = watched("us")
    other.lease(lease, 5.0)
    assert region(other, now=5.5).state == "adopted by eu"
    other.digest(digest(), 5.2)
    assert region(other, now=5.5).state == "serving"
    other.digest(digest(seq=2, accepting=False), 5.3)
    assert region(other, now=5.5).state == "draining"


def test_one_digest_by_two_buses_counts_once_and_an_old_one_changes_nothing():
    fleet = watched("us", "eu")
    fleet.digest(digest(seq=5, queue=1), 1.0)
    fleet.digest(digest(seq=5, queue=9), 1.1)
    fleet.digest(digest(seq=4, queue=9), 1.1)
    assert (region(fleet, now=2.0).held, region(fleet, now=2.0).age_s) == (1, 1.0)
    fleet.digest(digest(seq=1, epoch=0, queue=7), 1.2)  # the router started again
    assert region(fleet, now=2.0).held == 7


def test_traffic_adds_up_over_routers():
    fleet = watched("us")
    near = RequestFlow(served_by_region="us", requests=30, failed=3, ttft_s=(0.1, 0.2, 0.3))
    far = RequestFlow(served_by_region="eu", requests=6, failed=0, ttft_s=(0.9,))
    shed = RequestFlow(requests=12, failed=12)
    fleet.answer(answer("r1", flows=(near, shed)), 1.0)
    fleet.answer(answer("r2", flows=(near, far)), 1.0)
    fleet.digest(digest(rtt_s={"eu": 0.08}), 1.0)
    rows = {row.served: row for row in fleet.frame(2.0).traffic if row.asked == "us"}
    assert rows.keys() == {None, "us", "eu"}
    assert (rows["us"].requests_per_s, rows["us"].failed_per_s) == (1.0, 0.1)
    assert (rows["us"].ttft_p50_s, rows["us"].rtt_s, rows["eu"].rtt_s) == (0.2, None, 0.08)
    assert (rows[None].requests_per_s, rows[None].ttft_p50_s) == (0.2, None)
    assert (region(fleet).ttft_p50_s, region(fleet).ttft_p99_s) == (0.2, 0.9)
    assert region(fleet, now=100.0).ttft_p50_s is None  # nobody has answered for a minute


def test_requests_are_kept_and_the_oldest_leave():
    fleet = watched("us")
    fleet.answer(answer("r1", life("a", 100.0), life("b", 101.0, outcome="failed")), 1.0)
    fleet.answer(answer("r1", life("b", 101.0001), life("c", 102.0)), 2.0)
    rows = {row.request: row for row in fleet.frame(2.0).requests}
    assert rows.keys() == {"a", "b", "c"}
    assert (rows["a"].wait_s, rows["a"].duration_s, rows["b"].outcome) == (0.25, 2.0, "ok")
    for number in range(REQUESTS_MAX):
        fleet.answer(answer("r1", life(f"n{number}", 200.0 + number)), 3.0)
    left = {row.request for row in fleet.frame(3.0).requests}
    assert len(left) == REQUESTS_MAX and not left & {"a", "b", "c"}


def test_senders_are_limited_and_strangers_dropped():
    fleet = watched("us")
    for number in range(ROUTERS_MAX + 5):
        fleet.digest(digest(router=f"r{number}"), 1.0)
    assert region(fleet).held == 4 * ROUTERS_MAX
    fleet.digest(digest(router="new", queue=100), 50.0)  # the others have been silent
    assert region(fleet, now=50.0).held == 100
    for number in range(REPLICAS_MAX + 5):
        fleet.heartbeat(beat(f"us-{number}"), 1.0)
    assert len([one for one in fleet.frame(1.0).replicas if one.region == "us"]) == REPLICAS_MAX
    fleet.heartbeat(beat("mars-0"), 1.0)
    fleet.digest(digest("mars"), 1.0)
    fleet.answer(answer("r1", region="mars"), 1.0)
    assert {row.region for row in fleet.frame(1.0).regions} == {"us", "eu"}


@pytest.mark.parametrize(
    ("values", "part", "found"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([4.0, 1.0, 2.0, 3.0], 0.5, 2.0),
     (range(1, 101), 0.99, 99), (range(1, 101), 1.0, 100)],
)  # fmt: skip
def test_percentiles_are_by_nearest_rank(values, part, found):
    assert percentile(values, part) == found
