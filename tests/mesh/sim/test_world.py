"""Worlds small enough to be worked out by hand."""

from collections.abc import Sequence

import pytest

from mesh.core.model.request import Request
from mesh.core.model.settings import RouterSettings
from mesh.core.policies.base import Choice, Layered, Target
from mesh.session.answer import Held
from mesh.sim.config import ReplicaCrash
from mesh.sim.network import BUS_S, HTTP_S
from mesh.sim.workload import RequestNode, Segment, Workload
from mesh.sim.world import World, report, run
from schemas.exchange import Lost
from schemas.ids import ReplicaId
from schemas.settings import BLIND
from schemas.subjects import parse_inbox
from tests.mesh.sim.build import (
    AP,
    EU,
    LOCAL_S,
    US,
    arrivals,
    config,
    leftovers,
    node,
    played,
    prefill_s,
    steady,
    users,
)

RTT_S = 0.080  # us to eu, there and back
DECODE_S = 0.010


def test_one_request_takes_the_ways_and_the_engines_time():
    result = run(arrivals((0.0, US, node(100, 5))), config())
    assert result["requests"] == result["ok"] == 1
    assert result["ttft_s"]["mean"] == pytest.approx(LOCAL_S + prefill_s(100), abs=1e-9)
    assert result["itl_s"]["mean"] == pytest.approx(DECODE_S)
    assert result["e2e_s"]["mean"] == pytest.approx(result["ttft_s"]["mean"] + 4 * DECODE_S)
    assert result["gpu_busy_s"] == pytest.approx(prefill_s(100) + 4 * DECODE_S)
    assert result["prompt_tokens"] == {"asked": 100, "reported": 100}
    assert (result["output_tokens"], result["forwarded"], result["decisions"]) == (5, 0, 1)
    assert result["decisions_per_s"] is None


def test_the_same_prompt_again_computes_only_what_is_not_cached():
    asked = node(100, 5)
    result = run(arrivals((0.0, US, asked), (1.0, US, asked)), config())
    # Of 100 tokens 6 blocks are full; the first answer's own tokens are not asked for.
    assert result["cached_token_ratio"] == pytest.approx(96 / 200)
    first, second = LOCAL_S + prefill_s(100), LOCAL_S + prefill_s(4)
    assert result["ttft_s"]["mean"] == pytest.approx((first + second) / 2)


def test_a_request_of_an_empty_region_pays_one_round_trip():
    world = played(arrivals((0.0, US, node(100, 5))), config({US: 0, EU: 1}))
    result = report(world, Workload(name="test"))
    assert result["forwarded"] == 1
    expected_s = 2 * HTTP_S + BUS_S + RTT_S + prefill_s(100)
    assert result["ttft_s"]["mean"] == pytest.approx(expected_s, abs=1e-9)
    assert leftovers(world) == {}


@pytest.mark.parametrize(
    ("client", "home", "wide_s"),
    [(US, US, 0.0), (EU, US, RTT_S), (US, EU, RTT_S), (EU, EU, 2 * RTT_S)],
)
def test_a_central_router_is_paid_for_on_every_side_that_is_far(client, home, wide_s):
    fleet = {US: int(home == US), EU: int(home == EU)}
    world = played(arrivals((0.0, client, node(100, 5))), config(fleet, topology="central:us"))
    result = report(world, Workload(name="test"))
    bus_s = 2 * BUS_S if home == US else 0.0
    expected_s = 2 * HTTP_S + bus_s + wide_s + prefill_s(100)
    assert result["ttft_s"]["mean"] == pytest.approx(expected_s, abs=1e-9)
    assert (list(world.routers), result["forwarded"]) == ([US], 0)
    assert leftovers(world) == {}


CROWD = steady(60, 0.02, US)  # one engine of us can't, three of the mesh can


def test_a_full_region_forwards_and_a_region_on_its_own_never_does():
    fleet = {US: 1, EU: 1, AP: 1}
    together = run(CROWD, config(fleet))
    alone = run(CROWD, config(fleet, topology="region-local"))
    assert together["forwarded"] > 10
    assert alone["forwarded"] == 0
    assert together["ok"] == alone["ok"] == 60
    assert together["ttft_s"]["mean"] < alone["ttft_s"]["mean"] / 2


def test_users_play_all_their_trees_node_after_node():
    leaf = node(40, 3, name=7, pause_s=0.5)
    tree = node(40, 3, name=5, children=(leaf, node(40, 3, name=6, children=(leaf,))))
    world = played(users(US, 2, trees=3, tree=tree), config({US: 2}))
    result = report(world, Workload(name="test"))
    assert result["ok"] == result["requests"] == 2 * 3 * 4
    # Three trees in a row, each at least three answers and a pause long.
    answer_s = LOCAL_S + DECODE_S * 3
    assert result["duration_s"] > 3 * (3 * answer_s + 0.5)


def test_a_closed_loop_begins_nothing_after_its_time():
    workload = Workload(name="test", clients=users(US, 1, trees=10_000).clients, until_s=3.0)
    result = run(workload, config())
    assert 3.0 < result["duration_s"] < 3.5
    assert result["ok"] == result["requests"] > 10


def test_a_shed_request_ends_its_subtree_and_the_user_waits_for_retry_after():
    # A hold queue for one: most of the crowd is sent away with Retry-After.
    parent = node(800, 20, name=3, children=(node(10, 1, name=4),))
    result = run(
        users(US, 20, trees=2, tree=parent), config(policy="skywalker", hold_max=1, hold_s_max=0.1)
    )
    parents = 20 * 2
    assert result["shed"] > 5
    assert (
        result["ok"] + result["shed"] == result["requests"] == parents + (parents - result["shed"])
    )
    assert result["duration_s"] > 1.0


def test_a_request_that_can_never_fit_fails_by_the_engines_own_word():
    world = played(arrivals((0.0, US, node(20_000, 5))), config())
    result = report(world, Workload(name="test"))
    assert (result["failed"], result["failures"]) == (1, {"http_400": 1})
    assert leftovers(world) == {}


def test_a_client_that_waits_too_long_hangs_up_and_its_engine_is_freed():
    world = played(arrivals((0.0, US, node(100, 2000))), config(timeout_s=1.0))
    result = report(world, Workload(name="test"))
    assert result["failures"] == {"timeout": 1}
    assert result["e2e_s"]["mean"] is None
    assert result["gpu_busy_s"] == pytest.approx(1.0)  # the word goes the way of the request
    assert leftovers(world) == {}


def test_a_client_without_a_first_token_hangs_up_when_its_patience_ends():
    # Another prompt keeps the engine busy for longer; of the answer that runs nothing is cut.
    workload = arrivals((0.0, US, node(4000, 200)), (0.1, US, node(4000, 5)))
    patient = report(played(workload, config()), workload)
    slowest_s = patient["ttft_s"]["p99"]
    first_s = 2 * patient["ttft_s"]["p50"] - slowest_s  # of two requests
    world = played(workload, config(patience_s=(first_s + slowest_s) / 2))
    result = report(world, workload)
    assert (result["ok"], result["failures"]) == (1, {"patience": 1})
    assert result["e2e_s"]["mean"] > (first_s + slowest_s) / 2
    assert leftovers(world) == {}


def test_a_world_that_must_end_counts_what_is_open_as_failed():
    result = run(arrivals((0.0, US, node(100, 2000))), config(until_s=1.0))
    assert result["failures"] == {"unfinished": 1}


def test_requests_of_the_warm_up_are_played_and_not_reported():
    workload = steady(20, 0.5, US)
    result = run(workload, config(warmup_s=5.0))
    assert result["requests"] == result["ok"] == 10
    assert result["decisions"] == 20
    assert result["digest"] == run(workload, config())["digest"]


def test_progress_is_reported_in_virtual_time():
    seen = []
    run(steady(10, 0.5, US), config(), progress=lambda ended, now_s: seen.append((ended, now_s)))
    assert [now_s for _, now_s in seen] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert seen[0][0] == 0 < seen[-1][0] <= 10
    assert seen == sorted(seen)


def test_deciding_is_measured_by_the_clock_that_is_given():
    ticks = iter(range(1000))
    result = run(steady(10, 0.5, US), config(), perf=lambda: float(next(ticks)))
    assert result["decisions_per_s"] == 1.0


def test_blind_pushing_queues_in_the_engine_and_pending_in_the_router():
    blind = played(CROWD, config(pushing=BLIND))
    assert report(blind, CROWD)["ok"] == 60
    assert blind.replicas["us-1"].core is not None
    last = blind.replicas["us-1"].core.heartbeat(blind.queue.now)
    assert last.refused_total == 0


def test_slower_state_messages_make_a_worse_mesh():
    fleet = {US: 2, EU: 2, AP: 2}
    workload = steady(400, 0.01, US)
    live = run(workload, config(fleet, policy="skywalker"))
    late = {"heartbeat_s": 2.0, "gossip_s": 2.0, "state_at_once": False}
    stale = run(workload, config(fleet, policy="skywalker", **late))
    assert live["ok"] + live["shed"] == stale["ok"] + stale["shed"] == 400
    assert stale["ttft_s"]["mean"] > 1.1 * live["ttft_s"]["mean"]


def test_a_prefix_tree_finds_what_round_robin_scatters():
    # Each turn repeats the conversation: segments by position, the last one new.
    def conversation(number):
        head = [Segment(1, 128)]
        parts = [Segment(100 * number + turn, 200) for turn in range(8)]
        following: tuple[RequestNode, ...] = ()
        for turn in (3, 2, 1, 0):
            prompt = tuple(head + parts[: 2 * turn + 1])
            following = (
                RequestNode(prompt=prompt, answer=parts[2 * turn + 1], children=following),
            )
        return following[0]

    rows = [(0.3 * number, (US, EU)[number % 2], conversation(number + 1)) for number in range(20)]
    result = {
        policy: run(arrivals(*rows), config({US: 3, EU: 3}, policy=policy))
        for policy in ("prefix-tree", "round-robin")
    }
    tree, robin = result["prefix-tree"], result["round-robin"]
    assert tree["cached_token_ratio"] > robin["cached_token_ratio"] + 0.1
    assert tree["ttft_s"]["mean"] < robin["ttft_s"]["mean"]


class AllSeeing(Layered):
    """A policy that only the twin can have: it reads the engines themselves."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: list[tuple[int, int]] = []

    def choose(self, request: Request, targets: Sequence[Target], now: float) -> Choice:
        """The replica whose cache holds most of the prompt."""

        def held(target: Target) -> int:
            cache = self.world.replicas[ReplicaId(target.name)].engine.sim.cache
            return cache.matched(request.prompt.hashes)

        best = max(targets, key=held)
        self.seen.append((self.world.clients.sent(request).node.answer.tokens, held(best)))
        return Choice(best, "knows all")


def test_a_policy_may_see_the_whole_world():
    asked = node(640, 7)
    seers = []

    def makers(world):
        def maker(settings, dice):
            seers.append(AllSeeing(world))
            return seers[-1]

        return {"all-seeing": maker}

    workload = arrivals((0.0, US, asked), (2.0, US, asked), (4.0, US, asked))
    result = run(workload, config({US: 3}, policy="all-seeing"), makers=makers)
    seen = [row for seer in seers for row in seer.seen]
    # A router's hashes are keys of the engine's cache: ten of 64 tokens in this prompt.
    assert seen == [(7, 0), (7, 10), (7, 10)]
    assert result["cached_token_ratio"] == pytest.approx(2 * 624 / (3 * 640))


def test_messages_about_a_forwarded_request_reach_the_router_that_sent_it():
    """Two routers a region; eu, with the larger fleet, loses a replica that serves us' requests."""
    rows = [(0.02 * n, US, node(prompt=900, answer=60, name=1 + n)) for n in range(100)]
    crash = ReplicaCrash(replica=ReplicaId("eu-1"), at_s=3.0, until_s=4.0)
    world = World(
        arrivals(*rows),
        config({US: 1, EU: 3}, policy="mesh", routers=2, faults=(crash,), hold_s_max=60.0),
    )
    received = {
        (router.name, kind): 0 for router in world.region_routers[US] for kind in (Held, Lost)
    }
    for router in world.region_routers[US]:

        def receive(inbox, message, sender=None, *, name=router.name, receive=router.receive):
            if (name, type(message)) in received:
                received[name, type(message)] += parse_inbox(inbox).router == name
            return receive(inbox, message, sender)

        router.receive = receive
    world.run()
    assert all(received.values()), received
    assert leftovers(world) == {}


@pytest.mark.parametrize("policy", ["mesh", "skywalker", "least-load"])
def test_at_five_times_what_engines_can_do_most_are_refused_at_once_and_the_rest_in_time(policy):
    """3.3 prompts a second can be computed, 16.7 come; no request has an objective."""
    world, ends = World(steady(500, 0.06, US, prompt=300), config({US: 1}, policy=policy)), []
    world.requests.watch = lambda sent, end, now: ends.append((sent, end, now - sent.sent_at))
    world.run()
    limit_s = RouterSettings().queue_delay_s_max
    ttft_s = [sent.first_at - sent.sent_at for sent, _, _ in ends if sent.first_at is not None]
    refused = [(end, after_s) for sent, end, after_s in ends if sent.first_at is None]
    assert len(ttft_s) > 0.9 * (30.0 + limit_s) / prefill_s(300), "engines were not idle"
    assert max(ttft_s) < 1.5 * limit_s
    assert sorted(after_s for _, after_s in refused)[int(0.9 * len(refused))] < 0.1
    assert all(1.0 <= end.retry_after_s <= 60.0 for end, _ in refused)
    assert len(ttft_s) + len(refused) == 500
